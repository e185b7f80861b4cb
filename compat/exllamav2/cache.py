"""Caches: each owns one `Generator`, which all of exllamav2's generators on that cache use.

It is made when it is first needed, and again when one of them needs other options. Its pages know
which texts they hold, so that nobody needs to reset or to copy a cache.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

from exl2flow.core.errors import ConfigError
from exl2flow.inference import Generator
from exl2flow.inference.cache.paged import pages_of
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model.footprint import cache_bytes, exact_format


class ExLlamaV2Cache:
    """Keys and values in fp16; on a CPU in fp32."""

    format: ClassVar[str | None] = None

    def __init__(
        self, model: Any, batch_size: int = 1, max_seq_len: int = -1, copy_from: Any = None,
        lazy: bool = False, num_key_value_heads: int | None = None, fixed_device: Any = None,
    ) -> None:  # fmt: skip
        self.model, self.batch_size, self.current_seq_len = model, batch_size, 0
        self.max_seq_len = model.config.max_seq_len if max_seq_len == -1 else max_seq_len
        if self.max_seq_len < 1 or batch_size < 1:
            sizes = f"`max_seq_len` is {max_seq_len} and `batch_size` {batch_size}"
            raise ConfigError(f"{sizes}; give 1 or more")
        self.tokens = batch_size * pages_of(self.max_seq_len) * PAGE_TOKENS
        self._generator: Generator | None = None
        self._options: Any = None
        self.end_stream: Callable[[], None] = lambda: None

    def generator(
        self, *, slots: int, chunk: int, context: int, draft: Any = None, exact: bool = False
    ) -> Generator:
        """Return the cache's generator; `exact`: with as many slots, not at least."""
        native, held = self.model.native, self._generator
        chunk = max(chunk // PAGE_TOKENS, 1) * PAGE_TOKENS
        options = (native, chunk, context, draft)
        slots = slots if exact or held is None else max(slots, held.slots)
        if held is not None and (self._options, held.slots) == (options, slots):
            return held
        del held  # so that its memory is free
        self.drop()
        self._generator = Generator(
            replace(native, max_tokens=min(context, native.max_tokens)), cache=self.format,
            tokens=self.tokens, slots=slots, chunk=chunk, draft=draft,
        )  # fmt: skip
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
        return type(self)(self.model, self.batch_size, self.max_seq_len)

    def copy_states(self, target: "ExLlamaV2Cache", *ranges: int) -> None:
        """Do nothing: the target's generator reads what it lacks."""

    def footprint(self) -> list[int]:
        """Return the bytes on each device."""
        native = self.model.native
        name = self.format or exact_format(native.decoder.embedding.weight.device)
        return [cache_bytes(native.spec, context=self.tokens, cache_format=name)]


ExLlamaV2Cache_8bit, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8 = (
    type(f"ExLlamaV2Cache_{name}", (ExLlamaV2Cache,), {"format": form})
    for name, form in (("8bit", "fp8"), ("Q4", "q4"), ("Q6", "q6"), ("Q8", "q8"))
)


def ExLlamaV2Cache_TP(  # a class there
    model: Any, base: type[ExLlamaV2Cache] = ExLlamaV2Cache, batch_size: int = 1,
    max_seq_len: int = -1,
) -> ExLlamaV2Cache:  # fmt: skip
    """Return a cache of a model that `load_tp` loaded."""
    return base(model, batch_size, max_seq_len)
