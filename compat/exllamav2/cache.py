"""Caches: each owns one `Generator`, which all of exllamav2's generators on that cache use.

It is made when it is first needed, and again when one of them needs other options. Its pages
are found by the tokens they hold: nobody needs to reset or copy a cache, and `texts` is its state.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch

from exl2flow.core.errors import ConfigError, ContextOverflow
from exl2flow.engine import Generator
from exl2flow.engine.cache.paged import whole_pages
from exl2flow.model.memory.footprint import exact_format, layer_bytes, state_bytes


class ExLlamaV2Cache:
    """Keys and values in fp16; on a CPU in fp32. texts: ids that `ExLlamaV2.forward` was given."""

    format: ClassVar[str | None] = None
    page_tokens: ClassVar[int] = Generator.page_tokens

    def __init__(
        self,
        model: Any,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: Any = None,
        lazy: bool = False,
        num_key_value_heads: int | None = None,
        fixed_device: Any = None,
    ) -> None:
        self.model, self.batch_size, self.current_seq_len = model, batch_size, 0
        self.max_seq_len = model.config.max_seq_len if max_seq_len == -1 else max_seq_len
        if self.max_seq_len < 1 or batch_size < 1:
            sizes = f"`max_seq_len` is {max_seq_len} and `batch_size` {batch_size}"
            raise ConfigError(f"{sizes}; give 1 or more")
        self.tokens = batch_size * whole_pages(self.max_seq_len, self.page_tokens)
        self.texts = [list[int]() for _ in range(batch_size)]
        if copy_from is not None:
            self.current_seq_len, self.texts = copy_from.current_seq_len, [*copy_from.texts]
        self._generator: Generator | None = None
        self._options: Any = None
        self.end_stream: Callable[[], None] = lambda: None

    def generator(
        self,
        *,
        min_slots: int = 1,
        slots: int | None = None,
        chunk: int | None = None,
        context: int | None = None,
        draft: Any = None,
    ) -> Generator:
        """Return the cache's generator with `slots` slots, or at least `min_slots`."""
        native, config, current = self.model.native, self.model.config, self._generator
        chunk, context = chunk or config.max_input_len, context or config.max_seq_len
        options = (native, chunk, context, draft)
        if current is not None and current.failure is None and self._options == options:
            slots = slots or max(min_slots, current.slots)
            if current.slots == slots:
                return current
        del current  # so that its memory is free
        self.drop()
        self._generator = Generator(
            replace(native, max_tokens=min(context, native.max_tokens)),
            cache=self.format,
            tokens=self.tokens,
            slots=slots or min_slots,
            draft=draft,
            chunk=max(chunk // self.page_tokens, 1) * self.page_tokens,
            page_tokens=self.page_tokens,
        )
        self._options = options
        return self._generator

    def drop(self) -> None:
        """End all jobs and free the memory."""
        if self._generator is not None:
            self._generator.cancel_all()
        self._generator = self._options = None

    def reset(self) -> None:
        self.current_seq_len = 0

    def clone(self) -> Self:
        return type(self)(self.model, self.batch_size, self.max_seq_len, self)

    def copy_states(
        self,
        target: "ExLlamaV2Cache",
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        from_row: int,
        from_rows: int,
        to_row: int,
        to_rows: int,
    ) -> None:
        """Copy texts; the target reads missing keys and values when it is used."""
        for row in range(to_rows):
            source, text = self.texts[from_row + row % from_rows], [*target.texts[to_row + row]]
            text[to_column : to_column + to_columns] = source[from_column:][:from_columns]
            target.texts[to_row + row] = text

    def append(self, ids: torch.Tensor) -> list[list[int]]:
        """Return the first `current_seq_len` ids of each row, followed by ids (b, t)."""
        (rows, count), length = ids.shape, self.current_seq_len
        if rows > self.batch_size or length + count > self.max_seq_len:
            room = f"{self.batch_size} rows of {self.max_seq_len} tokens"
            raise ContextOverflow(f"the cache has {room}, not {rows} of {length + count}")
        if min(map(len, self.texts[:rows])) < length:
            raise ConfigError(f"`current_seq_len` is {length}, but the cache has read less")
        pairs = zip(self.texts, ids.tolist(), strict=False)
        return [[*text[:length], *new] for text, new in pairs]

    def all_tensors(self) -> list[torch.Tensor]:
        """Return keys and values as they are stored, of all layers, for reading only."""
        return self.generator().states.stored

    def footprint(self) -> list[int]:
        """Return the bytes on each device."""
        native, nbytes = self.model.native, Counter[torch.device]()
        placement, pages = native.decoder.placement, self.tokens // self.page_tokens
        name = self.format or exact_format(placement.head)
        for layer, device in zip(native.spec.attentions, placement.layers, strict=True):
            nbytes[device] += layer_bytes(layer, pages, name, self.page_tokens)
            nbytes[device] += state_bytes(layer, self.batch_size)
        return [*nbytes.values()] * (1 if native.team is None else len(native.team.devices))


ExLlamaV2Cache_8bit, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8 = (
    type(f"ExLlamaV2Cache_{name}", (ExLlamaV2Cache,), {"format": form})
    for name, form in (("8bit", "fp8"), ("Q4", "q4"), ("Q6", "q6"), ("Q8", "q8"))
)


def ExLlamaV2Cache_TP(  # a class there
    model: Any,
    base: type[ExLlamaV2Cache] = ExLlamaV2Cache,
    batch_size: int = 1,
    max_seq_len: int = -1,
) -> ExLlamaV2Cache:
    """Return a cache of a model that `load_tp` loaded."""
    return base(model, batch_size, max_seq_len)
