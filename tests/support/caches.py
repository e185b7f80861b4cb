"""Sequences of equal length in a paged cache, read part after part through its views."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tiny import tiny_spec

from exl2flow.engine.cache.paged import PagedCache, pages_of
from exl2flow.engine.cache.views import PromptView, Segment, StepView
from exl2flow.kernels import CACHE_FORMATS, AttentionRule
from exl2flow.model import KvCache, ModelSpec, RopeTable, RopeTables

FORMATS = [  # one name for each
    name
    for name, form in CACHE_FORMATS.items()
    if name == next(other for other, same in CACHE_FORMATS.items() if same == form)
]
GPU_FORMATS = [name for name in FORMATS if name != "fp32"]

Work = Callable[[torch.Tensor, KvCache, RopeTables], torch.Tensor]


class Sequences:
    """Sequences whose pages are shuffled; `length` positions of each are stored.

    Parts of several tokens are read as prompts unless `is_step`; single tokens are steps.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        batch: int = 1,
        tokens: int,
        name: str = "fp32",
        device: torch.device | str = "cpu",
    ) -> None:
        each = pages_of(tokens)
        self.cache = PagedCache(
            spec,
            pages=batch * each,
            form=CACHE_FORMATS[name],
            device=torch.device(device),
            slots=batch,
        )
        pages = torch.randperm(batch * each, dtype=torch.int32)
        self.tables = pages.view(batch, each).to(device)
        self.angles = RopeTables.of(spec, tokens, torch.device(device))
        self.length = 0

    def read(self, work: Work, x: torch.Tensor, *, is_step: bool = False) -> torch.Tensor:
        """Return what `work(x, view, table)` makes of the next tokens: (b, t, …) → (b, t, …)."""
        batch, count = x.shape[:2]
        if is_step or count == 1:
            lengths = self.tables.new_full((batch,), self.length)
            step = StepView(self.cache, self.tables, lengths, count=count)
            found = work(x, step, self.angles.at(step.positions))
        else:
            begin, end = self.length, self.length + count
            view = PromptView(
                self.cache,
                [
                    Segment(pages=pages, begin=begin, end=end, slot=slot)
                    for slot, pages in enumerate(self.tables.tolist())
                ],
            )
            found = work(x.flatten(0, 1)[None], view, self.angles.at(view.positions))
        self.length += count
        return found.view(batch, count, *found.shape[2:])


def assert_near(found: torch.Tensor, expected: torch.Tensor, *note: object) -> None:
    """Compare (b, t, heads, d) token by token: weights and sums are rounded to fp16."""
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).flatten(2).norm(dim=2)
    assert (error <= 2e-3 * expected.float().flatten(2).norm(dim=2)).all(), note


def ends_of_prompts(
    name: str, window: int | None, folder: Path, *, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield attention for the last tokens of six prompts: read behind what is stored, and in whole.

    name: of a cache format. folder: for a model's config. Both results are (1, t, heads, d).
    """
    spec = tiny_spec("llama", folder, hidden_size=512, num_attention_heads=8, num_hidden_layers=1)
    heads, kv_heads, dim = 8, spec.attentions[0].num_kv_heads, spec.attentions[0].head_dim
    counts, ends = (30, 261, 300, 41, 259, 50), (3, 8, 3, 1, 8, 9)
    cache = PagedCache(spec, pages=12, form=CACHE_FORMATS[name], device=device)
    pages = torch.randperm(12).view(6, 2).tolist()
    new = [
        torch.randn(1, h, sum(counts), dim, device=device).half()
        for h in (heads, kv_heads, kv_heads)
    ]
    angles = torch.rand(max(counts), dim // 2, device=device)

    def read(begins: Sequence[int], stops: Sequence[int]) -> list[torch.Tensor]:
        segments = [
            Segment(pages=p, begin=b, end=e) for p, b, e in zip(pages, begins, stops, strict=True)
        ]
        view = PromptView(cache, segments)
        of_pass = [
            torch.cat(
                [
                    whole[:, :, s.begin : s.end]
                    for whole, s in zip(x.split(counts, dim=2), segments, strict=True)
                ],
                dim=2,
            )
            for x in new
        ]
        at = angles[view.positions]
        table = RopeTable(cos=at.cos(), sin=at.sin())
        rule = AttentionRule(scale=dim**-0.5, window=window)
        found = view.layer(0).attend(*of_pass, table=table, rule=rule)
        return list(found.split([s.count for s in segments], dim=2))

    begins = [count - end for count, end in zip(counts, ends, strict=True)]
    expected = [x[:, :, b:] for x, b in zip(read([0] * 6, counts), begins, strict=True)]
    for rows in (cache.stores[0].keys, cache.stores[0].values):
        rows.data.fill_(255)
        rows.scales.fill_(torch.nan)
    read([0] * 6, begins)

    for found, whole in zip(read(begins, counts), expected, strict=True):
        yield found.transpose(1, 2), whole.transpose(1, 2)
