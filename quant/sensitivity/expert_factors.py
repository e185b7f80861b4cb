"""Fisher factors of experts: some are each expert's own, the others its layer's.

Own are the input factor of down and the output factors of gate and up. Experts of a layer read the
same states and add to the same ones, so the input factor of gate and up and the output factor of
down are the layer's, times the trace of the expert's own. Factors of experts that the text seldom
chooses are shrunk towards the layer's mean, as their Hessians are (`quant/rounding/coverage.py`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from exl2flow.core.runtime.background import to_host
from exl2flow.core.store.files import write_tensors
from exl2flow.model import ProjectionSpec, SublayerSpec
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.quant.sensitivity.fisher import (
    CAPTURES_KEY,
    EXPERTS_KEY,
    LAYER_KEY,
    LEAST_TRACE,
    Factors,
    FactorSum,
    OutputFactor,
    StoredFactors,
    Sums,
    block_size,
    pack_symmetric,
    sublayer_tensors,
)

EXPERT_BLOCK = 128  # out-features per block of gate's and up's output factors
WIDEST_INNER = 8192  # in-features of down; above, its input factor is the layer's, too
INPUT, INNER, OUTPUT = "layer.input", "layer.inner", "layer.output"
TRACES, COUNTS, SIZE = "layer.traces", "layer.counts", "layer.size"


class LayerSums:
    """Sums over all experts of a layer, to which they are added from the last one to the first."""

    def __init__(self) -> None:
        self.inputs: dict[str, torch.Tensor] = {}  # by role: Σ |g|² x xᵀ, fp32 (k, k)
        self.sizes: list[torch.Tensor] = []  # traces of down's
        self.output: torch.Tensor | None = None  # of down: Σ g gᵀ in blocks
        self.squares: dict[str, dict[str, torch.Tensor]] = {}  # role → projection → Σ |g|²
        self.counts: dict[str, int] = {}  # projection of role down → tokens

    def add(self, p: ProjectionSpec, total: FactorSum) -> None:
        """Add an expert's projection; its sums may become the layer's."""
        self.squares.setdefault(p.role, {})[p.name] = total.squares
        if _shares_input(p):
            self.inputs[p.role] = _added(self.inputs.get(p.role), total.input)
        if p.role == "down":
            self.sizes.append(total.input.diagonal().mean())
            self.counts[p.name] = int(total.count)
            self.output = _added(self.output, total.blocks)

    def tensors(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return what is stored."""
        by_role = {role: torch.stack([*found.values()]) for role, found in self.squares.items()}
        totals = {role: found.sum().clamp(min=LEAST_TRACE) for role, found in by_role.items()}
        first = [self.inputs[role] / totals[role] for role in by_role if role != "down"]
        assert self.output is not None
        tensors = {
            INPUT: pack_symmetric(torch.stack(first).mean(0)),
            OUTPUT: pack_symmetric(self.output / totals["down"]),
            COUNTS: torch.tensor([*self.counts.values()]),
            SIZE: (torch.stack(self.sizes).sum() / totals["down"])[None],
            **{f"{TRACES}.{role}": found / tokens for role, found in by_role.items()},
        }
        if "down" in self.inputs:
            tensors[INNER] = pack_symmetric(self.inputs["down"] / totals["down"])
        return tensors

    def places(self) -> dict[str, tuple[str, int]]:
        """Return projection → role and place among those of this role."""
        return {
            name: (role, place)
            for role, found in self.squares.items()
            for place, name in enumerate(found)
        }


def _shares_input(p: ProjectionSpec) -> bool:
    return p.role != "down" or p.in_features > WIDEST_INNER


def _added(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    return more if total is None else total.add_(more)


def sums_of(spec: SublayerSpec, *, block: int, device: torch.device) -> Sums:
    """Return empty sums of a group of experts; `block` limits the ones that the layer shares."""
    sums = Sums()
    for p in spec.projections:
        limit = EXPERT_BLOCK if p.is_routed and p.role != "down" else block
        sums[p.name] = FactorSum(p.in_features, p.out_features, block=limit, device=device)
    return sums


def layer_file(layer: int) -> str:
    """Return the name of what experts of a layer share inside the stage folder."""
    return f"factors/layer.{layer:04d}.safetensors"


def storing_group(
    path: Path, spec: SublayerSpec, sums: Sums, layer: LayerSums, tokens: int
) -> Callable[[], str]:
    """Return a function that writes the factors of a group of experts and returns the sha256.

    What its experts share is added to the layer's sums.
    """
    others = tuple(p for p in spec.projections if not p.is_routed)
    tensors, captures = sublayer_tensors(others, sums, tokens)
    for p in reversed([p for p in spec.projections if p.is_routed]):
        total = sums[p.name]
        shared, output = INPUT, f"{p.name}.output"
        if p.role == "down":
            shared, output = INNER if _shares_input(p) else f"{p.capture}.input", OUTPUT
        else:
            tensors[output] = pack_symmetric(total.blocks / tokens)
        if not _shares_input(p):
            tensors[shared] = pack_symmetric(total.input / total.squares.clamp(min=LEAST_TRACE))
        captures[p.name] = (shared, total.columns, output)
        layer.add(p, total)
    waiting = to_host(tensors)
    metadata = {CAPTURES_KEY: json.dumps(captures), LAYER_KEY: layer_file(spec.layer_index)}
    return lambda: write_tensors(path, waiting(), metadata=metadata)


def storing_layer(path: Path, layer: LayerSums, tokens: int) -> Callable[[], str]:
    """Return a function that writes what experts of a layer share and returns the sha256."""
    waiting, metadata = to_host(layer.tensors(tokens)), {EXPERTS_KEY: json.dumps(layer.places())}
    return lambda: write_tensors(path, waiting(), metadata=metadata)


def group_bytes(projections: Sequence[ProjectionSpec]) -> int:
    """Return the approximate size in bytes of the own factors of routed experts on disk."""
    total = 0
    for p in projections:
        if p.role != "down":
            columns = padded_columns(p.out_features)
            total += columns * block_size(columns, EXPERT_BLOCK)
        elif not _shares_input(p):
            total += p.in_features**2
    return 2 * total  # one half of fp32 matrices


def expert_factors(stored: StoredFactors, device: torch.device | str) -> dict[str, Factors]:
    """Return projection → factors of the experts of a file, shrunk where their tokens are few."""
    captures = {n: entry for n, entry in stored.captures.items() if n in stored.experts}
    if not captures:
        return {}
    inputs = {shared: stored.whole(shared, device) for shared, *_ in captures.values()}
    outputs = {OUTPUT: stored.whole(OUTPUT, device)}
    counts, size = stored.tensors[COUNTS].tolist(), float(stored.tensors[SIZE])
    found = {}
    for name, (shared, columns, output) in captures.items():
        role, place = stored.experts[name]
        traces = stored.tensors[f"{TRACES}.{role}"].double()
        own, count, covariance = float(traces[place]), counts[place], inputs[shared]
        k = len(covariance)
        share = count / (count + k) if count < k else 1.0
        trace = share * own + (1 - share) * float(traces.mean())
        if role == "down":
            blocks = outputs[OUTPUT] * trace
        else:
            blocks = _with_trace(stored.whole(output, device), own, trace, columns)
        if shared not in (INPUT, INNER) and share < 1:
            covariance = covariance * share
            covariance.diagonal().add_((1 - share) * size)
        found[name] = Factors(input=covariance, output=OutputFactor(blocks=blocks, columns=columns))
    return found


def _with_trace(blocks: torch.Tensor, own: float, trace: float, columns: int) -> torch.Tensor:
    """Return an output factor with another trace; the identity's if it has none."""
    if own > LEAST_TRACE:
        return blocks * (trace / own)
    identity = torch.eye(blocks.shape[-1], device=blocks.device)
    return identity.expand_as(blocks) * (trace / columns)
