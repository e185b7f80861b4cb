"""Formats of cached keys and values: fp32, fp16, its upper byte, or rotated in 8, 6 or 4 bits.

A format is a row of `CACHE_FORMATS`; `docs/concepts/cache.md` defines each.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Self

import torch

PAGE_TOKENS = 256  # of a page unless a cache says otherwise; kernels for GPUs know no other
STEP_TOKENS = 16  # most new tokens of a sequence in a step, which may be taken back
UNIT = 64  # elements rotated together: the even places, and the odd ones
RUN = 32  # elements that share a scale
LARGEST_HALF = torch.finfo(torch.float16).max


class Element(Enum):
    """Storage of an element: its bits, and whether each run of elements has a scale."""

    HALF = (16, False)
    UPPER_BYTE = (8, False)  # E5M2, truncated towards zero
    ROTATED_8 = (8, True)
    ROTATED_6 = (6, True)
    ROTATED_4 = (4, True)
    FULL = (32, False)  # on a CPU

    def __init__(self, bits: int, has_scales: bool) -> None:
        self.bits = bits
        self.has_scales = has_scales

    @property
    def steps(self) -> int:
        """How often a run's scale is in its largest element: codes of 6 bits are read as of 8."""
        return 8 if self is Element.ROTATED_4 else 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """The elements of cached keys and of cached values."""

    keys: Element
    values: Element


CACHE_FORMATS: dict[str, CacheFormat] = {
    "fp16": CacheFormat(keys=Element.HALF, values=Element.HALF),
    "fp8": CacheFormat(keys=Element.UPPER_BYTE, values=Element.UPPER_BYTE),
    "q8": CacheFormat(keys=Element.ROTATED_8, values=Element.ROTATED_8),
    "q6": CacheFormat(keys=Element.ROTATED_8, values=Element.ROTATED_4),
    "q8/q6": CacheFormat(keys=Element.ROTATED_8, values=Element.ROTATED_6),
    "q8/q4": CacheFormat(keys=Element.ROTATED_8, values=Element.ROTATED_4),
    "q6/q4": CacheFormat(keys=Element.ROTATED_6, values=Element.ROTATED_4),
    "q4": CacheFormat(keys=Element.ROTATED_4, values=Element.ROTATED_4),
    "fp32": CacheFormat(keys=Element.FULL, values=Element.FULL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRows:
    """Keys or values of one layer, indexed by slot.

    data: uint8 (slots, bytes); scales: fp16 (slots, runs), zero runs if the element has no scales.
    width: elements per slot, heads times head_dim; stored rows are padded to a multiple of 64.
    """

    element: Element
    width: int
    data: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, element: Element, *, slots: int, width: int, device: torch.device | str) -> Self:
        """Allocate this many slots, uninitialized."""
        padded = padded_width(width)
        runs = padded // RUN if element.has_scales else 0
        return cls(
            element=element,
            width=width,
            data=torch.empty(slots, padded * element.bits // 8, dtype=torch.uint8, device=device),
            scales=torch.empty(slots, runs, dtype=torch.float16, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.data.numel() + self.scales.numel() * self.scales.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStore:
    """Keys and values of one layer; slot `page_tokens · page + place` holds those of one token."""

    keys: CacheRows
    values: CacheRows
    kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS

    @classmethod
    def empty(
        cls,
        form: CacheFormat,
        *,
        pages: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        page_tokens: int = PAGE_TOKENS,
    ) -> Self:
        """Reserve pages."""
        slots, width = pages * page_tokens, kv_heads * head_dim
        return cls(
            keys=CacheRows.empty(form.keys, slots=slots, width=width, device=device),
            values=CacheRows.empty(form.values, slots=slots, width=width, device=device),
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_tokens=page_tokens,
        )

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.keys.nbytes + self.values.nbytes

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, int64 (n,) each; no page is both source and target."""
        for rows in (self.keys, self.values):
            for x in (rows.data, rows.scales):
                pages = x.view(len(x) // self.page_tokens, self.page_tokens, x.shape[1])
                pages[target] = pages[source]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCache:
    """The cache of one layer, for a step that adds t tokens to each of b sequences.

    tables: int32 (b, pages), each sequence's pages in order; lengths: int32 (b,), its stored
    positions before the new tokens; slots: int64 (b, t), those of the new positions. Duplicates, as
    idle rows have them on a spare page, hold any of their tokens afterwards.
    to: int32 (heads · head_dim,), the place of each element in a token's result; None: its own.
    """

    store: LayerStore
    tables: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    to: torch.Tensor | None = None


def padded_width(width: int) -> int:
    """Return the number of elements stored per slot."""
    return -(-width // UNIT) * UNIT


def slots_of(
    table: torch.Tensor, begin: int, end: int, page_tokens: int = PAGE_TOKENS
) -> torch.Tensor:
    """Return the slots of positions `begin` to `end` of a sequence, int64.

    Args:
        table: int32 (pages,), the pages of the sequence in order.
        begin: first position.
        end: one past the last position.
        page_tokens: of a page.
    """
    positions = torch.arange(begin, end, device=table.device)
    return slots_at(table[None], positions[None], page_tokens)[0]


def slots_at(
    tables: torch.Tensor, positions: torch.Tensor, page_tokens: int = PAGE_TOKENS
) -> torch.Tensor:
    """Return the slots of positions int64 (b, t) of sequences whose pages are int32 (b, pages)."""
    pages = tables.gather(1, positions // page_tokens)
    return pages.long() * page_tokens + positions % page_tokens
