"""Sequences in a paged cache, what it stores of them, and how far codes may move."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from bounds import moved_share, near, terms_of

from exl2flow.engine.cache.paged import PagedCache, pages_of
from exl2flow.engine.cache.views import PromptView, Segment, StepView
from exl2flow.inference import LoadedModel
from exl2flow.kernels import CACHE_FORMATS, PAGE_TOKENS, Element, slots_of
from exl2flow.kernels.interface.cache_formats import CacheRows
from exl2flow.kernels.reference.cache import codes_of, decode, encode
from exl2flow.model import ModelSpec, RopeTables

TOKENS = PAGE_TOKENS + 20
STEPS = {Element.HALF: 2.0**-10, Element.UPPER_BYTE: 2.0**-2}  # relative, of floating point


class Stored(NamedTuple):
    """Keys or values of a text in one layer.

    codes: (t, width), the codes; fp32 if the element is floating point. scales: fp16 (t, runs).
    """

    element: Element
    codes: torch.Tensor
    scales: torch.Tensor


class Text(NamedTuple):
    """The logits (t, v) of the last tokens of a sequence, and what is stored of all its tokens."""

    logits: torch.Tensor
    stored: list[Stored]


class Pool:
    """A cache of a model whose unused pages hold NaN, and sequences that get pages of it."""

    def __init__(self, model: LoadedModel, name: str, *, pages: int = 24) -> None:
        self.decoder, self.spec = model.decoder, model.spec
        self.cache = PagedCache(model.spec, pages=pages, form=CACHE_FORMATS[name], device="cpu")
        for rows in self.rows():
            rows.data.fill_(255)
            rows.scales.fill_(torch.nan)
        self.angles = RopeTables.of(model.spec, 512, torch.device("cpu"))
        self._free = torch.randperm(pages).tolist()

    def rows(self) -> Iterator:
        return (rows for store in self.cache.stores for rows in (store.keys, store.values))

    def pages(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(pages_of(tokens))]

    def read(self, parts: list[tuple[list[int], int, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the logits (t, v) of ids (t,) that begin at a position of each sequence."""
        segments = [Segment(pages=p, begin=b, end=b + len(ids)) for p, b, ids in parts]
        view = PromptView(self.cache, segments)
        ids = torch.cat([ids for *_, ids in parts])[None]
        logits = self.decoder.forward(ids, view, self.angles.at(view.positions))[0]
        return list(logits.split([segment.count for segment in segments]))

    def step(self, sequences: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        """Return the logits (b, t, v) of tokens after so many positions of each sequence."""
        tables = torch.full((len(sequences), 2), self.cache.spare, dtype=torch.int32)
        for table, (pages, *_) in zip(tables, sequences, strict=True):
            table[: len(pages)] = torch.tensor(pages)
        lengths = torch.tensor([length for _, length, _ in sequences], dtype=torch.int32)
        ids = torch.tensor([ids for *_, ids in sequences])
        view = StepView(self.cache, tables, lengths, count=ids.shape[1])
        positions = lengths[:, None] + torch.arange(ids.shape[1])
        return self.decoder.forward(ids, view, self.angles.at(positions))

    def text(self, pages: list[int], tokens: int, logits: torch.Tensor) -> Text:
        """Return logits of the last of a sequence's tokens, with what is stored of all of them."""
        slots = slots_of(torch.tensor(pages, dtype=torch.int32), 0, tokens)
        stored = []
        for rows in self.rows():
            codes = rows.data[slots]
            if not rows.element.has_scales:
                codes = decode(rows, slots).float()
            else:
                codes = codes_of(rows.element, codes).short()  # differences have signs
            stored.append(Stored(rows.element, codes, rows.scales[slots]))
        return Text(logits, stored)

    def prompt(self, ids: torch.Tensor, pages: list[int] | None = None) -> Text:
        """Read a whole prompt alone."""
        pages = pages or self.pages(len(ids))
        [logits] = self.read([(pages, 0, ids)])
        return self.text(pages, len(ids), logits)

    def stored(self, pages: list[int], tokens: int) -> list[torch.Tensor]:
        """Return the bytes of a sequence's keys and values in all layers."""
        slots = slots_of(torch.tensor(pages, dtype=torch.int32), 0, tokens)
        return [rows.data[slots] for rows in self.rows()]


def first_moved(found: Stored, expected: Stored, terms: int) -> int:
    """Return the first token of which an element is stored otherwise; the number of tokens if none.

    An element moves by one step, and few elements do.
    """
    element, codes, scales = expected
    if element is Element.FULL:
        torch.testing.assert_close(found.codes, codes, **near(codes, terms))
        return len(codes)
    if element in STEPS:
        size = float(codes.square().mean().sqrt())
        step = STEPS[element]
        torch.testing.assert_close(found.codes, codes, rtol=step, atol=step * size)
    else:
        torch.testing.assert_close(found.codes, codes, rtol=0, atol=1)
        torch.testing.assert_close(found.scales, scales, rtol=STEPS[Element.HALF], atol=0)
    moved = found.codes != codes
    # and all of one token, whose elements move together: short texts have too few for a share
    assert int(moved.sum()) <= moved_share(element, terms) * moved.numel() + moved.shape[1]
    tokens = moved.any(1) | (found.scales != scales).any(1)
    return int(tokens.nonzero()[0]) if tokens.any() else len(codes)


def assert_same(spec: ModelSpec, found: Text, expected: Text, most: float) -> None:
    """Compare texts of sums in another order, which seldom moves a stored element by a step.

    Up to the first such element only sums differ. Behind it, the few that moved cost less than
    `most`, which storing all elements in steps costs.
    """
    count, tokens = len(expected.logits), len(expected.stored[0].codes)
    terms = terms_of(spec, tokens)
    pairs = zip(found.stored, expected.stored, strict=True)
    first = min(first_moved(*pair, terms) for pair in pairs)
    exact = max(0, first - (tokens - count))
    bound = near(expected.logits, terms)
    torch.testing.assert_close(found.logits[:exact], expected.logits[:exact], **bound)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=bound["atol"] + most)


def lost(element: Element) -> float:
    """Return the mean square of what is lost of normal elements that are stored."""
    x = torch.randn(512, 64)
    data, scales = encode(element, x if element is Element.FULL else x.half())
    rows = CacheRows(element=element, width=x.shape[1], data=data, scales=scales)
    return float((decode(rows, torch.arange(len(x))) - x).double().square().mean())
