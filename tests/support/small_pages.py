"""Generators on a CPU whose pages hold 16 tokens, so that short texts cross several."""

from typing import Any

from exl2flow.inference import Generator, LoadedModel

PAGE_TOKENS = 16
DELTA_PAGE_TOKENS = 64  # for states: a text cut at multiples of it has the same bits


def small_generator(model: LoadedModel, **options: Any) -> Generator:
    """Return a generator with pages of `PAGE_TOKENS`, unless options say otherwise."""
    return Generator(model, **{"page_tokens": PAGE_TOKENS, **options})


def is_empty(generator: Generator) -> bool:
    """Return whether no job is left, nor a page that one uses."""
    return generator.is_idle and generator.free_pages == generator.pages
