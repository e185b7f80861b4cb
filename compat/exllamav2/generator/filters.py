"""Filters: exllamav2's, which are ours under its names, and the base of others."""

from collections.abc import Iterable, Sequence
from typing import Any

from exl2flow.core.request import Filter
from exl2flow.inference import filters


class ExLlamaV2Filter:
    """Base of filters with `begin`, `feed` and `next`; see `ForeignFilter`."""

    allow_return_type_list = True
    native: Filter | None = None  # ours, which takes the place of this one

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.sequence_str = model, tokenizer, ""


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
    """Return ours in place of theirs; ours stay as they are."""
    every = [getattr(one, "native", None) or one for one in given or ()]
    return [one if hasattr(one, "start") else filters.ForeignFilter(one) for one in every]
