"""Time the products of one token with all matrices of a quantized model: `python products.py`.

Random codes in the shape of a Llama, with bit widths and groups as our allocator chose them for a
real model (`allocations.json`), or with `--uniform` in groups of 128. Every layer has matrices of
its own so that nothing stays in the chip's cache; launches are recorded as a CUDA graph. Prints a
table for `docs/benchmarks.md`.
"""

import argparse

import torch
from allocations import Allocation, add_allocation, allocation_of

from exl2flow.inference.bench import copy_rate, milliseconds
from exl2flow.kernels import FusedLinear, NormArgs, PackedMatrix, get_ops, pack_blocks
from exl2flow.model import QuantParams

SHAPES = {  # hidden, MLP, keys and values, vocabulary, layers
    "7b": (4096, 11008, 4096, 32000, 32),
    "8b": (4096, 14336, 1024, 128256, 32),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is for tests


def random_matrix(k: int, n: int, params: QuantParams) -> PackedMatrix:
    groups = params.groups(k)
    words = sum(group.bits * group.rows for group in groups)
    scales = torch.randint(0, 1 << 16, (n // 32, len(groups), 8), dtype=torch.int32, device=DEVICE)
    codes = torch.randint(-(2**31), 2**31, (n // 32, words), dtype=torch.int32, device=DEVICE)
    return PackedMatrix(
        words=pack_blocks(codes, scales | (0x0101 << 16), groups),
        groups=groups,
        order=torch.randperm(k, device=DEVICE),
        columns=n,
    )


def chains(shape: str, allocation: Allocation) -> list[list[FusedLinear]]:
    """Return all products for a token: those between two attentions form a chain."""
    hidden, mlp, kv, vocabulary, layers = SHAPES[shape]
    norm = NormArgs(weight=torch.rand(hidden, device=DEVICE).half(), eps=0.0)

    def product(layer: int, rows: int, /, *, adds: bool = False, **columns: int) -> FusedLinear:
        matrices = tuple(
            random_matrix(rows, n, allocation.params(role, layer, layers))
            for role, n in columns.items()
        )
        activation = "silu" if "gate" in columns else None
        return FusedLinear(
            matrices=matrices,
            norm=None if adds else norm,
            activation=activation,
            adds=adds,
            is_ordered="o" in columns,  # attention writes what o reads so
        )

    found: list[list[FusedLinear]] = [[]]
    for layer in range(layers):
        found[-1].append(product(layer, hidden, q=hidden, k=kv, v=kv))
        found.append([product(layer, hidden, o=hidden, adds=True)])
        found[-1].append(product(layer, hidden, gate=mlp, up=mlp))
        found[-1].append(product(layer, mlp, down=hidden, adds=True))
    head = random_matrix(hidden, vocabulary, allocation.params("head"))
    return [*found, [FusedLinear(matrices=(head,), norm=norm)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--bpw", nargs="+", type=float, default=[3.0, 4.0, 5.0])
    add_allocation(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16])
    arguments = parser.parse_args()
    ops, peak = get_ops("cuda"), copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {peak:.0f} GB/s\n")
    print("| matrices | GB | rows | ms | GB/s | of copies | tokens/s at most |")
    print("|---|---|---|---|---|---|---|")
    for bpw in arguments.bpw:
        allocation = allocation_of(bpw, arguments)
        model = chains(arguments.shape, allocation)
        size = 4e-9 * sum(m.words.numel() for chain in model for p in chain for m in p.matrices)
        for rows in arguments.rows:
            x = torch.randn(rows, SHAPES[arguments.shape][0], device=DEVICE).half()

            def token(model: list[list[FusedLinear]] = model, x: torch.Tensor = x) -> None:
                for chain in model:
                    ops.multiply(x, chain, x)

            taken = milliseconds(token)
            speed = 1e3 * size / taken
            print(
                f"| {allocation.name} | {size:.2f} | {rows} | {taken:.3f} | {speed:.0f} "
                f"| {speed / peak:.0%} | {1e3 * rows / taken:.0f} |",
                flush=True,
            )
        del model


if __name__ == "__main__":
    main()
