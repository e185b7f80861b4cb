"""A follower of a team: `python -m exl2flow.engine.generate.follow RANK FD PID`.

It runs what rank 0, the process PID, tells it over a socket: it loads the same model, makes the
device side of the same generators, and calls the same methods of their runners.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from exl2flow.core.runtime.following import Follower, main
from exl2flow.core.runtime.memory import free_memory
from exl2flow.engine.cache.paged import reserve
from exl2flow.engine.drafts import NgramDraft
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.engine.loading.team import FEWER
from exl2flow.kernels import CacheFormat
from exl2flow.model.tensor_parallel.ranks import Ranks


class ModelFollower(Follower):
    """A follower's objects: its rank's model, and runners by their keys."""

    remedy = FEWER

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._ranks: Ranks | None = None
        self._model: LoadedModel | None = None

    def use(self, devices: Sequence[str]) -> None:
        """Take this rank's device, or its part of the CPU's cores."""
        super().use(devices)
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))

    def join(self, method: str, count: int) -> None:
        """Meet the others."""
        device = self.device if self.device.type == "cuda" else None
        self._ranks = Ranks.join(method, rank=self.rank, count=count, device=device, is_led=True)
        self._met = self._ranks

    def load(self, folder: str, options: dict[str, Any]) -> None:
        """Load this rank's part of a model."""
        self._model = load_model(folder, device=str(self.device), ranks=self._ranks, **options)

    def free(self) -> int:
        """Return the free bytes of this rank's GPU."""
        return free_memory(self.device)

    def make(
        self,
        key: int,
        form: CacheFormat,
        pages: int,
        page_tokens: int,
        slots: int,
        max_tokens: int,
        drafts: int,
    ) -> None:
        """Make the device side of a generator; its runner has a key."""
        assert self._model is not None
        placement, spec = self._model.decoder.placement, self._model.spec
        cache = reserve(
            spec,
            pages=pages,
            form=form,
            placement=placement,
            slots=slots,
            page_tokens=page_tokens,
        )
        draft = NgramDraft(tokens=drafts) if drafts else None
        made = DeviceSlots(self._model, cache, slots=slots, max_tokens=max_tokens, draft=draft)
        self.objects[key] = made.runner


if __name__ == "__main__":
    with torch.inference_mode():
        main(ModelFollower, sys.argv[1:])
