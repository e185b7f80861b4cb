"""Drafts: guesses of the next tokens, which the model verifies in one pass; they change no text."""

from exl2flow.inference.drafts.guesses import Drafter, Guesses, Slots, Wanted
from exl2flow.inference.drafts.model import Draft
from exl2flow.inference.drafts.ngram import NgramDraft
from exl2flow.inference.drafts.reach import Reach

__all__ = ["Draft", "Drafter", "Guesses", "NgramDraft", "Reach", "Slots", "Wanted"]
