"""A job's share of a decode step: its draft, and what may be sampled at each place of it."""

from typing import NamedTuple

import torch

from exl2flow.inference.filters import Allowed, Combined
from exl2flow.inference.generate.bans import allowed_by
from exl2flow.inference.generate.job import FREE, Job, Mask
from exl2flow.inference.sampling.bits import WORD, all_but, words_of


class TokenMask(NamedTuple):
    """What a sample may take: by the output (stops, bans, healing), and by the constraint."""

    mask: Mask = FREE
    allowed: Allowed | None = None

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end the text here."""
        return self.allowed.ends if self.allowed is not None else frozenset()

    @property
    def must_end(self) -> bool:
        """Whether nothing may be sampled."""
        return self.allowed is not None and self.allowed.must_end

    def goes_on(self, token: int) -> bool:
        """Return whether a token may be sampled that does not end the text."""
        words = self.allowed.words if self.allowed is not None else None
        may = words is None or bool(words[token // WORD] >> token % WORD & 1)
        return may and token not in self.ends

    def words(self, width: int) -> torch.Tensor | None:
        """Return the mask of the ids that may be sampled, None: all."""
        only, without = self.mask
        if self.allowed is not None:
            return self.allowed.words
        if only is not None:
            return words_of(set(only) - without, width)
        return all_but(without, width) if without else None


class StepJob:
    """A job in a step.

    slot: the one that samples; draft: ids that are verified; places: the first sample, and one
    behind each id of the draft.
    """

    def __init__(self, job: Job, draft: list[int]) -> None:
        self.job, self.slot, self.draft = job, job.lead.slot, draft
        self.slots = [s.slot for s in job.sequences]
        self.places: list[TokenMask] = []

    def plan(self) -> None:
        """Find the places, once the last token is known, and cut the draft where the text ends.

        Raises:
            Exception: what the constraint raises if nothing may follow the text.
        """
        job, constraint = self.job, self.job.constraint
        if constraint is None:
            drafts = (self.draft[:place] for place in range(len(self.draft) + 1))
            self.places = [TokenMask(job.mask(drafted)) for drafted in drafts]
            return
        self.places = [self._place(constraint, 0)]
        for accepted, token in enumerate(self.draft, 1):
            if not self.places[-1].goes_on(token):
                break
            constraint.accept(token)
            try:
                place = self._place(constraint, accepted)
            except Exception:  # an error only if the text comes here
                constraint.rollback(1)
                break
            if place.must_end:
                constraint.rollback(1)
                break
            self.places.append(place)
        constraint.rollback(len(self.places) - 1)
        del self.draft[len(self.places) - 1 :]

    def _place(self, constraint: Combined, count: int) -> TokenMask:
        """Return the mask after `count` draft tokens; the constraint has accepted them."""
        drafted = self.draft[:count]
        mask, cut = self.job.mask(drafted), self.job.output.cut(drafted)
        return TokenMask(mask, allowed_by(constraint, *mask, cut))
