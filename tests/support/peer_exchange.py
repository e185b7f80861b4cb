"""One of two processes whose GPUs exchange rows: `python peer_exchange.py RANK FOLDER`.

It ends with an error unless all results are bit for bit those of torch, and a rank that does not
come is an error of the other.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import checkout  # noqa: F401  # the package in a bare checkout
import pytest
import torch
from expert_banks import bank, packed, some_of

from exl2flow.core.errors import InferenceError
from exl2flow.kernels import FusedLinear, RouterRule, get_ops
from exl2flow.kernels.cuda.compiler import build
from exl2flow.kernels.cuda.graphs import CudaGraph
from exl2flow.kernels.reference.ops import Ops
from exl2flow.model.tensor_parallel.peers import PeerExchange
from exl2flow.model.tensor_parallel.ranks import Ranks

COUNT, REPLAYS = 2, 100
ROWS, WIDTHS = (1, 2, 3, 5, 16, 33, 64), (1, 31, 64, 1000, 8192)
LOGITS = 16, 38_000  # rows and columns of a rank
EXPERTS, SIZE, READ, FEW = 8, 256, 2048, (1, 3, 16)  # READ: in-features of a product
KERNELS = (
    ("experts.cu", "experts"),
    ("batched.cu", "batched<16, false, true>"),
    ("product.cu", "product<4, false, true>"),
    ("product.cu", "product<1, false, true>"),
)
PATIENCE, SHORT = 20.0, 0.3
NEAR = 2e-3  # products whose sums are in another order


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Return the same numbers on all ranks, fp32."""
    draws = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=draws, device="cuda")


def repeat(given: torch.Tensor, x: torch.Tensor, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the results of recorded work for each of `given`, which is copied to x before."""
    graph = CudaGraph(work)
    results = []
    for one in given:
        x.copy_(one)
        results.append(graph.replay().clone())
    return torch.stack(results)


def check_sums(peers: PeerExchange, rank: int, rows: int, width: int) -> None:
    """Compare sums with and without hidden states to those of torch."""
    parts = drawn(rows * width, COUNT, REPLAYS, rows, width)
    hidden = drawn(width, rows, width).half()
    x = torch.empty_like(parts[0, 0])
    sums = repeat(parts[rank], x, lambda: peers.added(x))
    assert torch.equal(sums, (parts[0] + parts[1]).half()), (rows, width)
    sums = repeat(parts[rank], x, lambda: peers.added(x, hidden, 0.3))
    assert torch.equal(sums, (hidden + (parts[0] + parts[1]) * 0.3).half()), (rows, width)


def check_columns(peers: PeerExchange, rank: int, rows: int, width: int) -> None:
    """Compare gathered columns, fp32 of two widths, and fp16 in an order, to those of torch."""
    widths = (width, width + 7)
    parts = [drawn(rows * n, REPLAYS, rows, n) for n in widths]
    x = torch.empty_like(parts[rank][0])
    found = repeat(parts[rank], x, lambda: peers.gather(x, widths))
    assert torch.equal(found, torch.cat(parts, dim=2)), (rows, width)
    even = tuple(2 * n for n in widths)
    halves = [drawn(rows * n, REPLAYS, rows, n).half() for n in even]
    y = torch.empty_like(halves[rank][0])
    to = torch.argsort(drawn(3, sum(even))).int()
    found = repeat(halves[rank], y, lambda: peers.gather(y, even, to))
    whole = torch.cat(halves, dim=2)
    assert torch.equal(found, torch.empty_like(whole).index_copy_(2, to.long(), whole)), rows


def check_launches(peers: PeerExchange, rank: int, rows: int) -> None:
    """Compare launches that exchange to those of one rank: experts, and a product of columns."""
    ops = get_ops("cuda")
    torch.manual_seed(rows)
    whole = bank(
        RouterRule(experts=EXPERTS, top=2), size=SIZE, inner=128, multiplier=0.3, device="cuda"
    )
    banks = [some_of(whole, range(own, EXPERTS, COUNT)) for own in range(COUNT)]
    matrix = packed(READ, SIZE, 4, bias=False, device="cuda")
    plain = FusedLinear(matrices=(matrix,), is_ordered=True, adds=True)
    product = replace(plain, gathers=peers.boxes)
    columns, order = drawn(rows, REPLAYS, rows, READ).half(), matrix.order
    hidden = drawn(rows, rows, SIZE).half()
    x = torch.empty_like(columns[0, :, : READ // COUNT])

    def work() -> torch.Tensor:
        at_once = ops.multiply_at_once(x, [product], hidden)
        assert at_once is not None
        states = ops.experts_at_once(at_once[1], banks[rank], peers.boxes)
        assert states is not None
        return torch.cat([at_once[1], states])

    found = repeat(columns.chunk(COUNT, dim=2)[rank].contiguous(), x, work)
    for one, both in zip(columns[:3], found[:, :rows], strict=False):
        expected = Ops.multiply(ops, one[:, order], [plain], hidden)[1]
        assert (both - expected).norm() <= NEAR * expected.norm(), rows
    for before, after in zip(*found.split(rows, dim=1), strict=True):
        parts = [ops.experts(before.contiguous(), each) for each in banks]
        assert torch.equal(after, (before + sum(parts) * 0.3).half()), rows


def check_logits(ranks: Ranks, rank: int) -> None:
    """Compare the logits of many rows, which go through no collective, to those of torch."""
    rows, width = LOGITS
    parts = drawn(0, COUNT, rows, width)
    assert ranks.peers is None or ranks.peers.takes(parts[0].numel())
    assert torch.equal(ranks.gather(parts[rank], (width, width)), torch.cat([*parts], dim=1))


def main(rank: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with ThreadPoolExecutor() as pool:  # each takes some seconds
        for kernel in KERNELS:
            pool.submit(build, *kernel, rank)
        run(rank, device, folder)


def run(rank: int, device: torch.device, folder: Path) -> None:
    with Ranks.join(f"file://{folder / 'meeting'}", rank=rank, count=COUNT, device=device) as ranks:
        print(f"rank {rank}: {'peers' if ranks.peers is not None else 'NCCL'}", flush=True)
        opened = [
            PeerExchange.open(rank, COUNT, device, ranks._all, patience=patience)
            for patience in (PATIENCE, SHORT)
        ]
        peers, short = opened
        assert peers is not None
        assert short is not None
        for rows, width in product(ROWS, WIDTHS):
            check_sums(peers, rank, rows, width)
            check_columns(peers, rank, rows, width)
        for rows in FEW:
            check_launches(peers, rank, rows)
        check_logits(ranks, rank)
        peers.check()
        x = drawn(0, 8, 64)
        if rank == 0:
            for _ in range(3):  # the first one waits, the others do not
                short.added(x)
            torch.cuda.synchronize()
            with pytest.raises(InferenceError, match=r"waited 0\.3 s"):
                short.check()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
