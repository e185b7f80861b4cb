"""Speculative decoding: draft tokens that one pass verifies; the text stays the same."""

from exl2flow.engine.drafts.acceptance_rate import Acceptance, DraftKind
from exl2flow.engine.drafts.hybrid import HybridDraft
from exl2flow.engine.drafts.model import Draft
from exl2flow.engine.drafts.mtp import Mtp
from exl2flow.engine.drafts.ngram import NgramDraft
from exl2flow.engine.drafts.proposer import (
    ON_DEVICE,
    Drafter,
    DraftRequest,
    Proposal,
    SharedSlots,
)

__all__ = [
    "ON_DEVICE",
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
