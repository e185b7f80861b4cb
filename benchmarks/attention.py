"""Time attention of one new token to a paged cache: `python benchmarks/attention.py`.

Layers take turns so that nothing stays in the chip's cache. Prints a table for
`docs/benchmarks.md`.
"""

import argparse
from itertools import product

import torch
from timing import copy_rate, milliseconds

from exl2flow.kernels import CACHE_FORMATS, PAGE_TOKENS, LayerStore, get_ops

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


def measured(heads: tuple[int, int], batch: int, context: int, name: str) -> tuple[float, float]:
    """Return the megabytes that a layer's attention reads, and its microseconds."""
    queries, kv_heads = heads
    pages = -(-context // PAGE_TOKENS)
    layers = layers_of(name, pages=batch * pages, kv_heads=kv_heads)
    tables = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    lengths = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, 1, queries, HEAD_DIM, device="cuda").half()
    k, v = torch.randn(2, batch, 1, kv_heads, HEAD_DIM, device="cuda").half()
    ops = get_ops("cuda")

    def step() -> None:
        for layer in layers:
            ops.paged_attention(q, k, v, layer, tables, lengths, scale=HEAD_DIM**-0.5)

    share = context / (pages * PAGE_TOKENS)
    return 1e-6 * layers[0].nbytes * share, 1e3 * milliseconds(step) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 32768])
    parser.add_argument("--heads", nargs="+", default=["32/32", "32/8"], help="query/key heads")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    arguments = parser.parse_args()
    peak = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {peak:.0f} GB/s\n")
    print("| heads | batch | context | cache | MB | µs | GB/s | of copies |")
    print("|---|---|---|---|---|---|---|---|")
    chosen = product(arguments.heads, arguments.batch, arguments.context, FORMATS)
    for heads, batch, context, name in chosen:
        queries, kv_heads = map(int, heads.split("/"))
        size, taken = measured((queries, kv_heads), batch, context, name)
        speed = 1e3 * size / taken
        print(
            f"| {heads} | {batch} | {context} | `{name}` | {size:.1f} | {taken:.1f} "
            f"| {speed:.0f} | {speed / peak:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
