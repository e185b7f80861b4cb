"""Speculative decoding: draft tokens that one pass verifies; the text stays the same."""

from exl2flow.engine.drafts.acceptance_rate import Acceptance
from exl2flow.engine.drafts.hybrid import HybridDraft
from exl2flow.engine.drafts.model import Draft
from exl2flow.engine.drafts.mtp import Mtp
from exl2flow.engine.drafts.ngram import NgramDraft
from exl2flow.engine.drafts.proposer import Drafter, DraftKind, DraftRequest, Proposal, SharedSlots

__all__ = [
    "Acceptance",
    "Draft",
    "DraftKind",
    "DraftRequest",
    "Drafter",
    "HybridDraft",
    "Mtp",
    "NgramDraft",
    "Proposal",
    "SharedSlots",
]
