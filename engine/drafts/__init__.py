"""Speculative decoding: draft tokens that one pass verifies; the text stays the same."""

from exl2flow.engine.drafts.acceptance_rate import AcceptanceRate
from exl2flow.engine.drafts.model import Draft
from exl2flow.engine.drafts.ngram import NgramDraft
from exl2flow.engine.drafts.proposer import Drafter, DraftRequest, SharedSlots

__all__ = [
    "AcceptanceRate",
    "Draft",
    "DraftRequest",
    "Drafter",
    "NgramDraft",
    "SharedSlots",
]
