"""The sampled tokens of a decode step while they are copied to the host."""

from collections.abc import Sequence

import torch

from exl2flow.engine.generate.event import Token
from exl2flow.engine.sampling import OwnProbabilities, SampledTokens


class PendingResult:
    """A step's result, copied as soon as it is computed; `token` waits for the copy."""

    def __init__(
        self,
        sampled: SampledTokens,
        logits: torch.Tensor,
        slots: Sequence[int],
        own: tuple[Sequence[int], OwnProbabilities] | None = None,
    ) -> None:
        """Begin to copy the sample, and of the logits (slots, v) those of some slots.

        own: slots whose tokens get the model's own probabilities, and these.
        """
        self._ids = _copied(sampled.ids)
        self._probabilities = _copied(sampled.probabilities)
        self._top_ids = _copied(sampled.top_ids)
        self._top_probabilities = _copied(sampled.top_probabilities)
        self._logits = {slot: _copied(logits[slot]) for slot in slots}
        self._own_slots = () if own is None else own[0]
        self._own = None if own is None else own[1].to_host()
        self._end: torch.cuda.Event | None = None
        if sampled.ids.is_cuda:
            self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped
            self._end.record(torch.cuda.current_stream(sampled.ids.device))
        self._list: list[int] = []

    def wait(self) -> None:
        """Wait until everything is copied."""
        if self._end is not None:
            self._end.synchronize()
        assert self._ids is not None
        self._list = self._ids.tolist()

    def id(self, slot: int) -> int:
        """Return the sampled id of a slot."""
        return self._list[slot]

    def token(self, slot: int, top: int, own_top: int = 0) -> Token:
        """Return the token of a slot with its `top` likeliest ids; see `SampledTokens`.

        own_top: likeliest ids in the model's own distribution.
        """
        probability, ids, probabilities = None, (), ()
        if self._probabilities is not None:
            probability = float(self._probabilities[slot])
        if top and self._top_ids is not None and self._top_probabilities is not None:
            ids = tuple(self._top_ids[slot, :top].tolist())
            probabilities = tuple(self._top_probabilities[slot, :top].tolist())
        return Token(
            self._list[slot],
            probability,
            ids,
            probabilities,
            self._logits.get(slot),
            own=self._own_of(slot, own_top),
        )

    def _own_of(
        self, slot: int, top: int
    ) -> tuple[float, tuple[int, ...], tuple[float, ...]] | None:
        if self._own is None or slot not in self._own_slots:
            return None
        row = self._own_slots.index(slot)
        logs, top_ids, top_logs = (x[row] for x in self._own)
        probabilities = tuple(top_logs[:top].exp().tolist())
        return float(logs.exp()), tuple(top_ids[:top].tolist()), probabilities


def _copied(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to("cpu", non_blocking=True, copy=True)
