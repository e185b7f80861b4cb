"""Time a step's attention to a paged cache: `python benchmarks/attention.py`.

Rotating and storing the new tokens is included. Layers take turns so that nothing stays in the
chip's cache. Prints a table for `docs/benchmarks.md`.
"""

import argparse
from itertools import product

import torch

from exl2flow.inference.bench import copy_rate, milliseconds
from exl2flow.kernels import (
    CACHE_FORMATS,
    PAGE_TOKENS,
    AttentionRule,
    LayerStore,
    StepCache,
    get_ops,
    slots_at,
)

FORMATS = [name for name in CACHE_FORMATS if name != "fp32"]  # which only a CPU has
LAYERS = 8
HEAD_DIM = 128


def layers_of(name: str, *, pages: int, kv_heads: int) -> list[LayerStore]:
    """Return layers with random contents."""
    layers = [
        LayerStore.empty(
            CACHE_FORMATS[name], pages=pages, kv_heads=kv_heads, head_dim=HEAD_DIM, device="cuda"
        )
        for _ in range(LAYERS)
    ]
    for rows in (rows for layer in layers for rows in (layer.keys, layer.values)):
        rows.data.random_(0, 100)
        rows.scales.fill_(0.01)
    return layers


def measured(
    heads: tuple[int, int], batch: int, context: int, name: str, counts: list[int]
) -> tuple[float, list[float]]:
    """Return the megabytes of a layer's context, and microseconds for each count of new tokens."""
    queries, kv_heads = heads
    pages = -(-context // PAGE_TOKENS)
    layers = layers_of(name, pages=batch * pages, kv_heads=kv_heads)
    tables = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    size = queries * HEAD_DIM
    orders = [torch.randperm(size, device="cuda").int() for _ in layers]  # as o of each reads them
    ops = get_ops("cuda")

    def microseconds(count: int) -> float:
        lengths = torch.full((batch,), context - count, dtype=torch.int32, device="cuda")
        slots = slots_at(tables, lengths.long()[:, None] + torch.arange(count, device="cuda"))
        q = torch.randn(batch, count, queries, HEAD_DIM, device="cuda").half()
        k, v = torch.randn(2, batch, count, kv_heads, HEAD_DIM, device="cuda").half()
        angles = torch.rand(2, batch, 1, count, HEAD_DIM // 2, device="cuda")

        rule = AttentionRule(scale=HEAD_DIM**-0.5)

        def step() -> None:
            for layer, to in zip(layers, orders, strict=True):
                cache = StepCache(store=layer, tables=tables, lengths=lengths, slots=slots, to=to)
                ops.attend_step(q, k, v, cache, *angles, rule=rule)

        return 1e3 * milliseconds(step) / LAYERS

    share = context / (pages * PAGE_TOKENS)
    return 1e-6 * layers[0].nbytes * share, [microseconds(count) for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 32768])
    parser.add_argument("--heads", nargs="+", default=["32/32", "32/8"], help="query/key heads")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1], help="new per sequence")
    arguments = parser.parse_args()
    peak = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {peak:.0f} GB/s\n")
    columns = " | ".join(f"µs, {count} new" for count in arguments.tokens)
    print(f"| heads | batch | context | cache | MB | {columns} | GB/s | of copies |")
    print("|---" * (7 + len(arguments.tokens)) + "|")
    chosen = product(arguments.heads, arguments.batch, arguments.context, FORMATS)
    for heads, batch, context, name in chosen:
        queries, kv_heads = map(int, heads.split("/"))
        size, times = measured((queries, kv_heads), batch, context, name, arguments.tokens)
        speed, taken = 1e3 * size / times[0], " | ".join(f"{time:.1f}" for time in times)
        print(
            f"| {heads} | {batch} | {context} | `{name}` | {size:.1f} | {taken} "
            f"| {speed:.0f} | {speed / peak:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
