"""Hidden states of texts, for programs with a loop of their own."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from exl2flow.core.errors import CacheFull, ContextOverflow
from exl2flow.core.requests.request import AdapterLike
from exl2flow.inference.adapters import Used, adapters_of
from exl2flow.inference.cache.page_pool import PagePool, SequencePages
from exl2flow.inference.cache.views import Segment
from exl2flow.inference.generate.device_slots import DeviceSlots
from exl2flow.inference.loading.load import LoadedModel
from exl2flow.model import check_ids


class HiddenStates:
    """Reads texts without jobs; their pages stay in the cache, so only what is new is computed.

    table: what is in the cache, for reading only.
    """

    def __init__(
        self, model: LoadedModel, steps: DeviceSlots, table: PagePool, *, context: int, chunk: int
    ) -> None:
        """Take the positions of one text, and the tokens of a pass."""
        self.table = table
        self._model, self._steps, self._context, self._chunk = model, steps, context, chunk

    @torch.inference_mode()
    def hidden(
        self, *texts: Sequence[int], last: int = 1, adapters: Sequence[AdapterLike] = ()
    ) -> list[torch.Tensor]:
        """Return the last hidden states (last, hidden) of texts, which the decoder's head takes.

        Jobs may run before and after it.

        Args:
            texts: token ids; a text without tokens has no states.
            last: tokens at the end of each text.
            adapters: as of `Request`.

        Raises:
            ConfigError, SourceModelError: an adapter or an id does not belong to the model.
            ContextOverflow, CacheFull: a text is too long, or jobs use the pages that it needs.
            InferenceError: the generator has failed.
        """
        self._steps.check_works()
        self._steps.check_stream()
        used = adapters_of(adapters, self._model)
        for ids in texts:
            check_ids(ids, self._model.spec)
            if len(ids) > self._context:
                raise ContextOverflow(
                    f"{len(ids)} tokens exceed the model's {self._context} positions; give fewer"
                )
        begun = {self.table.begin(salt_of(used)): tuple(ids) for ids in texts}
        try:
            return self._read(begun, last, used)
        finally:
            for held in begun:
                self.table.release(held)

    @property
    def stored(self) -> list[torch.Tensor]:
        """The tensors of the cache, for reading only."""
        return self._steps.cache.tensors

    def _read(
        self, texts: Mapping[SequencePages, Sequence[int]], last: int, used: Used
    ) -> list[torch.Tensor]:
        found = {held: self._steps.no_states for held in texts}
        for held, ids in texts.items():
            self._steps.copy(self.table.match(held, ids[: max(len(ids) - last, 0) + 1]))
            if not self.table.reserve(held, len(ids)):
                raise CacheFull(
                    f"no pages are free for a text of {len(ids)} tokens; end jobs, or give the "
                    "generator more `tokens`"
                )
        while unread := [held for held, ids in texts.items() if held.filled < len(ids)]:
            most = max(self._chunk // len(unread), 1)
            new = [texts[held][held.filled : held.filled + most] for held in unread]
            segments = [
                Segment(pages=tuple(held.pages), begin=held.filled, end=held.filled + len(ids))
                for held, ids in zip(unread, new, strict=True)
            ]
            states = self._steps.read(
                [*chain(*new)], segments, adapters=[used] * len(new), states=True
            )
            parts = states.split_with_sizes([*map(len, new)])
            for held, ids, rows in zip(unread, new, parts, strict=True):
                self.table.fill(held, ids)
                found[held] = torch.cat([found[held], rows])[-last:]
        return [*found.values()]


def salt_of(adapters: Used) -> bytes:
    """Return what pages of a text with these adapters are hashed with, in any order of them."""
    return b"".join(sorted(adapter.digest for adapter in adapters))
