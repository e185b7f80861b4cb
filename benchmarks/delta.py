"""Time layers with a state between their products: `python benchmarks/delta.py`.

Steps of one new token, of which the previous one has been accepted, and prompts. Layers take turns
so that no state stays in the chip's cache. Prints a table for `docs/benchmarks.md`.
"""

import argparse
from collections.abc import Callable

import torch

from exl2flow.inference.bench import milliseconds, seconds
from exl2flow.kernels import DeltaArgs, DeltaSegment, DeltaSlots, get_ops
from exl2flow.model.config.delta_spec import DeltaSpec
from exl2flow.model.memory.footprint import delta_slots

SHAPES = {  # layer, and the size of hidden states
    "35b": (DeltaSpec(key_heads=16, value_heads=32), 2048),
    "27b": (DeltaSpec(key_heads=16, value_heads=48), 5120),
}
LAYERS = 8
DEVICE = torch.device("cuda")


def layer_of(spec: DeltaSpec, hidden: int) -> DeltaArgs:
    """Return a layer of random weights."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    return DeltaArgs(
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        conv=drawn(spec.channels, spec.conv),
        decay=-drawn(spec.value_heads).exp(),
        step=drawn(spec.value_heads),
        maps=drawn(2 * spec.value_heads, hidden) * hidden**-0.5,
        norm=drawn(spec.value_dim),
        eps=1e-6,
    )


def states_of(spec: DeltaSpec, slots: int) -> list[DeltaSlots]:
    """Return empty states of all layers."""
    states = delta_slots(spec, LAYERS, slots, device=DEVICE)
    return [states.layer(index) for index in range(LAYERS)]


def inputs_of(
    spec: DeltaSpec, hidden: int, *shape: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what layers read, (*shape, …) each."""
    x, qkv, z = (
        torch.randn(*shape, width, device=DEVICE).half()
        for width in (hidden, spec.channels, spec.width)
    )
    return x, qkv, z


def step_of(layers: list[DeltaArgs], spec: DeltaSpec, hidden: int, rows: int) -> Callable[[], None]:
    """Return a step of all layers for texts that end at other places of a page."""
    states, given, ops = states_of(spec, rows), inputs_of(spec, hidden, rows, 1), get_ops(DEVICE)
    lengths = torch.arange(rows, device=DEVICE).int() * 17
    for of_layer in states:
        of_layer.behind.copy_(lengths[:, None])

    def step() -> None:
        for args, of_layer in zip(layers, states, strict=True):
            ops.delta_step(*given, args, of_layer, lengths)
        lengths.add_(1)

    return step


def prompt_of(
    layers: list[DeltaArgs], spec: DeltaSpec, hidden: int, tokens: int, texts: int
) -> Callable[[], None]:
    """Return a pass of all layers over the beginnings of texts, `tokens` in all."""
    states, given, ops = states_of(spec, texts), inputs_of(spec, hidden, 1, tokens), get_ops(DEVICE)
    each = tokens // texts
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
        works = {f"step, {rows} rows": step_of(layers, *sizes, rows) for rows in arguments.rows}
        works |= {
            f"prompt, {arguments.tokens} tokens of {texts}": prompt_of(
                layers, *sizes, arguments.tokens, texts
            )
            for texts in arguments.texts
        }
        for work, run in works.items():
            taken = milliseconds(run) if work.startswith("step") else 1e3 * seconds(run)
            print(f"| {name} | {work} | {1e3 * taken / LAYERS:.1f} |", flush=True)


if __name__ == "__main__":
    main()
