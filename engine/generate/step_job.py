"""A job in a decode step: its draft, and the mask of allowed tokens at each draft position."""

from typing import NamedTuple

import torch

from exl2flow.engine.drafts.acceptance_rate import AcceptanceRate, DraftKind
from exl2flow.engine.filters import Allowed, Combined
from exl2flow.engine.generate.bans import allowed_by
from exl2flow.engine.generate.job import FREE, Job, Mask
from exl2flow.engine.sampling.bits import WORD, all_but, words_of

UNCONSTRAINED = Allowed(None)


class TokenMask(NamedTuple):
    """Ids that may be sampled: by the output (stops, bans, healing), and by the constraint."""

    mask: Mask = FREE
    allowed: Allowed = UNCONSTRAINED

    def goes_on(self, token: int) -> bool:
        """Return whether a token may be sampled that does not end the text."""
        words = self.allowed.words
        may = words is None or bool(words[token // WORD] >> token % WORD & 1)
        return may and token not in self.allowed.ends

    def words(self, width: int) -> torch.Tensor | None:
        """Return the mask of the ids that may be sampled, None: all."""
        only, without = self.mask
        if self.allowed is not UNCONSTRAINED:
            return self.allowed.words
        if only is not None:
            return words_of(set(only) - without, width)
        return all_but(without, width) if without else None


NO_MASK = TokenMask()


class StepJob:
    """A job in a step.

    slot: the one that samples; draft: ids to verify, or `ON_DEVICE` for each; kind: of draft;
    masks: of the first sample, and of the one after each id of the draft; is_masked: whether one of
    them rules ids out; accepted: draft tokens; is_last: whether its tokens end the text.
    """

    def __init__(self, job: Job, draft: list[int], *, kind: DraftKind | None = None) -> None:
        self.job, self.slot, self.draft, self.kind = job, job.lead.slot, draft, kind
        self.slots = [s.slot for s in job.sequences]
        self.masks: list[TokenMask] = []
        self.is_masked = self.is_last = False
        self.accepted = 0

    @property
    def rate(self) -> AcceptanceRate:
        """The acceptance rate of the text's draft tokens of this kind."""
        assert self.kind is not None
        return self.job.acceptance.rates[self.kind]

    def plan(self) -> None:
        """Compute the masks, once the last token is known, and cut the draft where the text ends.

        Raises:
            Exception: what the constraint raises if nothing may follow the text.
        """
        self._plan()
        self.is_masked = any(mask != NO_MASK for mask in self.masks)

    def _plan(self) -> None:
        job, constraint = self.job, self.job.constraint
        if constraint is None:
            drafts = (self.draft[:count] for count in range(len(self.draft) + 1))
            self.masks = [TokenMask(job.mask(drafted)) for drafted in drafts]
            return
        self.masks = [self._mask(constraint, 0)]
        for accepted, token in enumerate(self.draft, 1):
            if not self.masks[-1].goes_on(token):
                break
            constraint.accept(token)
            try:
                mask: TokenMask | None = self._mask(constraint, accepted)
            except Exception:  # an error only if the text comes here
                mask = None
            if mask is None or mask.allowed.must_end:
                constraint.rollback(1)
                break
            self.masks.append(mask)
        constraint.rollback(len(self.masks) - 1)
        del self.draft[len(self.masks) - 1 :]

    def _mask(self, constraint: Combined, count: int) -> TokenMask:
        """Return the mask after `count` draft tokens; the constraint has accepted them."""
        drafted = self.draft[:count]
        mask, cut = self.job.mask(drafted), self.job.output.cut(drafted)
        return TokenMask(mask, allowed_by(constraint, *mask, cut))
