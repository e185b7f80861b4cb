"""A job's share of a decode step: its draft, and what may be sampled at each place of it."""

from typing import NamedTuple

import torch

from exl2flow.inference.filters import Allowed
from exl2flow.inference.generate.job import FREE, Job, Mask
from exl2flow.inference.sampling.bits import words_of

WORD = 32


class Place(NamedTuple):
    """What a sample may take: by the output (stops, bans, healing), and by the constraint."""

    mask: Mask = FREE
    allowed: Allowed | None = None

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end the text here."""
        return self.allowed.ends if self.allowed is not None else frozenset()

    def words(self, width: int) -> torch.Tensor | None:
        """Return the mask of the ids that may be sampled, None: all."""
        only, without = self.mask
        if self.allowed is not None:
            return self.allowed.words
        if only is not None:
            return words_of(set(only) - without, width)
        return ~words_of(without, width) if without else None


class Part:
    """A job in a step.

    slot: the one that samples; draft: ids that are verified; places: the first sample, and one
    behind each id of the draft.
    """

    def __init__(self, job: Job, draft: list[int]) -> None:
        self.job, self.slot, self.draft = job, job.lead.slot, draft
        self.slots = [s.slot for s in job.sequences]
        self.places: list[Place] = []

    def plan(self) -> None:
        """Find the places, once the last token is known, and cut the draft where the text ends.

        Raises:
            Exception: what the constraint raises if nothing may follow the text.
        """
        job, constraint = self.job, self.job.constraint
        if constraint is None:
            self.places = [Place(job.mask(place)) for place in range(len(self.draft) + 1)]
            return
        allowed = constraint.allowed(*job.mask(0))
        self.places = [Place(job.mask(0), allowed)]
        accepted = 0
        for token in self.draft:
            if token in allowed.ends or not _has(allowed.words, token):
                break
            constraint.accept(token)
            accepted += 1
            mask = job.mask(accepted)
            try:
                allowed = constraint.allowed(*mask)
            except Exception:  # that is an error only if the text comes to it
                break
            if allowed.must_end:
                break
            self.places.append(Place(mask, allowed))
        constraint.rollback(accepted)
        del self.draft[len(self.places) - 1 :]


def _has(words: torch.Tensor | None, token: int) -> bool:
    return words is None or bool(words[token // WORD] >> token % WORD & 1)
