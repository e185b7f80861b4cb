"""Hidden states of texts, for programs with a loop of their own."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from exl2flow.core.errors import CacheFull, ContextOverflow
from exl2flow.core.requests.request import AdapterLike
from exl2flow.engine.adapters import Used, adapters_of, salt_of
from exl2flow.engine.cache.page_pool import PagePool
from exl2flow.engine.cache.prefix_tree import SequencePages
from exl2flow.engine.cache.views import Segment
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.sequence_states import SequenceStates
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.model import check_ids


class HiddenStates:
    """Computes hidden states of texts without jobs; cached prefixes are not computed again.

    table: the page pool of the cache, for reading only.
    """

    def __init__(
        self,
        model: LoadedModel,
        device_slots: DeviceSlots,
        page_pool: PagePool,
        sequence_states: SequenceStates,
        *,
        context: int,
        chunk: int,
    ) -> None:
        """Read texts of up to `context` tokens, `chunk` tokens per pass."""
        self.table = page_pool
        self._model, self._device_slots, self._states = model, device_slots, sequence_states
        self._context, self._chunk = context, chunk

    @torch.inference_mode()
    def hidden(
        self, *texts: Sequence[int], last: int = 1, adapters: Sequence[AdapterLike] = ()
    ) -> list[torch.Tensor]:
        """Return the last hidden states (last, hidden) of texts, which the decoder's head takes.

        Jobs may run before and after it.

        Args:
            texts: token ids; a text without tokens has no states.
            last: tokens at the end of each text.
            adapters: see `Request`.

        Raises:
            ConfigError, SourceModelError: an adapter or an id does not belong to the model.
            ContextOverflow, CacheFull: a text is too long, or jobs use the pages that it needs.
            InferenceError: the generator has failed.
        """
        self._device_slots.check_works()
        self._device_slots.check_stream()
        used = adapters_of(adapters, self._model)
        for ids in texts:
            check_ids(ids, self._model.spec)
            if len(ids) > self._context:
                raise ContextOverflow(
                    f"{len(ids)} tokens exceed the model's {self._context} positions; give fewer"
                )
        sequences = {self.table.begin(salt_of(used)): tuple(ids) for ids in texts}
        together = (
            [sequences] if self._states.store is None else [{s: sequences[s]} for s in sequences]
        )
        try:
            return [*chain.from_iterable(self._read(some, last, used) for some in together)]
        finally:
            for held in sequences:
                self.table.release(held)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits fp32 (n, t, v) of hidden states (n, t, hidden)."""
        return self._device_slots.runner.head(hidden)

    @property
    def stored(self) -> list[torch.Tensor]:
        """The tensors of the cache, for reading only."""
        return self._device_slots.cache.tensors

    def _read(
        self, texts: Mapping[SequencePages, Sequence[int]], last: int, used: Used
    ) -> list[torch.Tensor]:
        hidden = {held: self._device_slots.no_hidden for held in texts}
        for held, ids in texts.items():
            self._device_slots.copy(self.table.match(held, ids[: max(len(ids) - last, 0) + 1]))
            self._states.follow(self._states.spare, held)
            if not self.table.reserve(held, len(ids)):
                raise CacheFull(
                    f"no pages are free for a text of {len(ids)} tokens; end jobs, or give the "
                    "generator more `tokens`"
                )
        while unread := [held for held, ids in texts.items() if held.filled < len(ids)]:
            count = max(self._chunk // len(unread), 1)
            new = [texts[held][held.filled : held.filled + count] for held in unread]
            segments = [
                Segment(
                    pages=tuple(held.pages),
                    begin=held.filled,
                    end=held.filled + len(ids),
                    slot=self._states.spare,
                )
                for held, ids in zip(unread, new, strict=True)
            ]
            states = self._device_slots.read(
                [*chain(*new)], segments, adapters=[used] * len(new), states=True
            )
            split = states.split_with_sizes([*map(len, new)])
            for held, ids, states in zip(unread, new, split, strict=True):
                self.table.fill(held, ids)
                self._states.has_read(self._states.spare, held)
                hidden[held] = torch.cat([hidden[held], states])[-last:]
        return [*hidden.values()]
