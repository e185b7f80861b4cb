"""Time layers with a state between their products: `python benchmarks/delta.py`.

Steps of one new token, of which the previous one has been accepted, and prompts. Layers take turns
so that no state stays in the chip's cache. Prints a table for `docs/benchmarks.md`.
"""

import argparse
from collections.abc import Callable

import torch

from exl2flow.inference.bench import milliseconds, seconds
from exl2flow.kernels import DeltaArgs, DeltaSegment, DeltaSlots, get_ops

SHAPES = {"35b": (16, 32, 2048), "27b": (16, 48, 5120)}  # key heads, value heads, hidden
DIM, LAYERS = 128, 8


def layer_of(key_heads: int, value_heads: int, hidden: int) -> DeltaArgs:
    """Return a layer of random weights."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    return DeltaArgs(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=DIM,
        value_dim=DIM,
        conv=drawn((2 * key_heads + value_heads) * DIM, 4),
        decay=-drawn(value_heads).exp(),
        step=drawn(value_heads),
        maps=drawn(2 * value_heads, hidden) * hidden**-0.5,
        norm=drawn(DIM),
        eps=1e-6,
    )


def states_of(args: DeltaArgs, slots: int) -> DeltaSlots:
    """Return empty states."""
    return DeltaSlots.empty(
        slots,
        value_heads=args.value_heads,
        key_dim=DIM,
        value_dim=DIM,
        channels=len(args.conv),
        taps=4,
        element=torch.float16,
        device="cuda",
    )


def inputs_of(args: DeltaArgs, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what layers read, (*shape, …) each."""
    x, qkv, z = (
        torch.randn(*shape, width, device="cuda").half()
        for width in (args.maps.shape[1], len(args.conv), args.value_heads * DIM)
    )
    return x, qkv, z


def step_of(layers: list[DeltaArgs], rows: int) -> Callable[[], None]:
    """Return a step of all layers for texts that end at other places of a page."""
    states = [states_of(args, rows) for args in layers]
    given, ops = inputs_of(layers[0], rows, 1), get_ops("cuda")
    lengths = torch.arange(rows, device="cuda").int() * 17
    for of_layer in states:
        of_layer.behind.copy_(lengths[:, None])

    def step() -> None:
        for args, of_layer in zip(layers, states, strict=True):
            ops.delta_step(*given, args, of_layer, lengths)
        lengths.add_(1)

    return step


def prompt_of(layers: list[DeltaArgs], tokens: int, texts: int) -> Callable[[], None]:
    """Return a pass of all layers over the beginnings of texts, `tokens` in all."""
    states = [states_of(args, texts) for args in layers]
    given, ops, each = inputs_of(layers[0], 1, tokens), get_ops("cuda"), tokens // texts
    segments = [DeltaSegment(slot=i, begin=0, start=i * each, count=each) for i in range(texts)]

    def read() -> None:
        for args, of_layer in zip(layers, states, strict=True):
            ops.delta_scan(*given, args, of_layer, segments)

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=2048, help="of a pass over prompts")
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 8], help="in such a pass")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| layer | work | microseconds |\n|---|---|---|")
    for name, sizes in SHAPES.items():
        layers = [layer_of(*sizes) for _ in range(LAYERS)]
        works = {f"step, {rows} rows": step_of(layers, rows) for rows in arguments.rows}
        works |= {
            f"prompt, {arguments.tokens} tokens of {texts}": prompt_of(
                layers, arguments.tokens, texts
            )
            for texts in arguments.texts
        }
        for work, run in works.items():
            taken = milliseconds(run) if work.startswith("step") else 1e3 * seconds(run)
            print(f"| {name} | {work} | {1e3 * taken / LAYERS:.1f} |", flush=True)


if __name__ == "__main__":
    main()
