"""Sampled ids on their way from the device to the host."""

import torch

from exl2flow.core.errors import InferenceError


class Drawn:
    """Ids int64 (b,), copied as soon as they are computed; `read` waits for the copy."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids.to("cpu", non_blocking=True, copy=True)
        self._arrival: torch.cuda.Event | None = None
        if ids.is_cuda:
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped
            self._arrival.record(torch.cuda.current_stream(ids.device))

    def read(self) -> list[int]:
        """Return the ids.

        Raises:
            InferenceError: the logits of a sequence were not finite.
        """
        if self._arrival is not None:
            self._arrival.synchronize()
        ids: list[int] = self._ids.tolist()
        if min(ids) < 0:
            raise InferenceError("the logits are not finite; check the files of the model")
        return ids
