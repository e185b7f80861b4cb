"""exllamav2's filters: our filters under its names, and a base class for others."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import Filter
from exl2flow.engine import filters
from exl2flow.engine.sampling.bits import ids_of


class ExLlamaV2Filter:
    """Base class of filters; these methods call `native`. See `ForeignFilter`."""

    allow_return_type_list = True
    native: Any = None  # ours, which replaces this one

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.sequence_str = model, tokenizer, ""

    def begin(self, prefix_str: str = "") -> None:
        if self.native is None:
            raise ConfigError(f"the filter {self!r} lacks `begin`, `feed` or `next`; define them")
        width = self.model.native.spec.head.out_features
        self._text = self.native.start(self.tokenizer.native, width, prefix_str)

    def feed(self, token: torch.Tensor) -> None:
        self._text.accept(int(token))

    def next(self) -> Any:
        """Return the ids that may follow, None for all, and the ids that end the text."""
        allowed = self._text.allowed()
        return None if allowed.words is None else ids_of(allowed.words), sorted(allowed.ends)


class ExLlamaV2PrefixFilter(ExLlamaV2Filter):
    def __init__(self, model: Any, tokenizer: Any, prefix_strings: str | Sequence[str]) -> None:
        super().__init__(model, tokenizer)
        strings = [prefix_strings] if isinstance(prefix_strings, str) else prefix_strings
        self.native = filters.PrefixFilter(*strings)


class ExLlamaV2SelectFilter(ExLlamaV2Filter):
    def __init__(
        self, model: Any, tokenizer: Any, options: Sequence[str], case_insensitive: bool = False
    ) -> None:
        super().__init__(model, tokenizer)
        self.native = filters.SelectFilter(options, case_insensitive)


def native_filters(given: Iterable[Any] | None) -> list[Filter]:
    """Return exllamav2's filters as ours; ours are returned unchanged."""
    known = [getattr(one, "native", None) or one for one in given or ()]
    return [one if hasattr(one, "start") else filters.ForeignFilter(one) for one in known]
