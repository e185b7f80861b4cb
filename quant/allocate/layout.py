"""The tensors and files of a converted model, exact to the byte before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exl2flow.core.store.files import Layout, safetensors_header
from exl2flow.model import CanonicalTensors, ModelSpec, carried, expected_tensors
from exl2flow.model.files.exl2 import QuantParams, padded_columns, quantized_layout

FORMAT_METADATA = {"format": "pt"}
Choice = Mapping[str, QuantParams]  # by key of every projection, including the head


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One output file before it is written."""

    name: str
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]

    @property
    def bytes(self) -> int:
        """The size the file will have."""
        return len(safetensors_header(self.layout, FORMAT_METADATA)) + sum(
            map(tensor_bytes, self.layout.values())
        )


def plain_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the tensors that are not quantized."""
    quantized = {p.key for p in (*spec.projections, spec.head)}
    return {
        name: shape
        for name, shape in expected_tensors(spec).items()
        if name.rpartition(".")[0] not in quantized
    }


KEPT = {"decay", "step"}  # roles of plain tensors that are stored as in the source


def plain_layout(spec: ModelSpec) -> Layout:
    """Return name → (dtype, shape) of the tensors that are not quantized.

    They are fp16, but routers fp32 if the source's are, and corrections of scores as the source
    stores them: both change routes if they are rounded. Decays and steps of layers with a state
    are as stored, too: they become exponents.
    """
    layout = {name: (torch.float16, shape) for name, shape in plain_tensors(spec).items()}
    routers = {s.group.router for s in spec.sublayers if s.group is not None}
    kept = [p for s in spec.sublayers for role, p in s.plain.items() if role in KEPT]
    if not routers and not kept:
        return layout
    source = CanonicalTensors(spec)
    layout |= {name: (source.dtype(name), shape) for name, shape in kept if name in source}
    for router in routers:
        for name, shape in router.tensors(spec.hidden_size).items():
            stored = source.dtype(name) if name in source else torch.float16
            if name == router.correction or stored is torch.float32:
                layout[name] = (stored, shape)
    return layout


def carried_tensors(spec: ModelSpec) -> Layout:
    """Return name → (dtype, shape) of the source's tensors that the output keeps as they are."""
    return carried(spec, CanonicalTensors(spec)) if spec.family.carried else {}


def carried_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the tensors that the output keeps as they are."""
    return sum(map(tensor_bytes, carried_tensors(spec).values()))


def output_layout(spec: ModelSpec, choice: Choice) -> Layout:
    """Return name → (dtype, shape) of all output tensors: plain ones, sublayers in order, head,
    and the carried ones.
    """
    layout = {**plain_layout(spec)}
    for p in (*spec.projections, spec.head):
        columns = padded_columns(p.out_features)
        layout |= quantized_layout(
            p.key, choice[p.key], p.in_features, columns, has_bias=p.has_bias
        )
    return {**layout, **carried_tensors(spec)}


def plan_shards(layout: Layout, shard_size_mb: int) -> list[Shard]:
    """Divide tensors, in order, into files of at most `shard_size_mb` MiB of data.

    A tensor larger than the limit gets a file of its own; 0 or less means one file.
    """
    limit = shard_size_mb * 2**20 if shard_size_mb > 0 else None
    parts: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, entry in layout.items():
        if limit is not None and parts[-1] and filled + tensor_bytes(entry) > limit:
            parts.append({})
            filled = 0
        parts[-1][name] = entry
        filled += tensor_bytes(entry)
    if len(parts) == 1:
        return [Shard(name="model.safetensors", layout=parts[0])]
    return [
        Shard(name=f"model-{i:05d}-of-{len(parts):05d}.safetensors", layout=part)
        for i, part in enumerate(parts, 1)
    ]


def tensor_bytes(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Return the size of a tensor of this dtype and shape."""
    dtype, shape = entry
    return dtype.itemsize * torch.Size(shape).numel()


def output_bytes(spec: ModelSpec, choice: Choice, shard_size_mb: int) -> int:
    """Return the total size in bytes of all output weight files."""
    return sum(s.bytes for s in plan_shards(output_layout(spec, choice), shard_size_mb))
