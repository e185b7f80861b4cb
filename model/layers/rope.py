"""Rotary position embedding: frequencies of all kinds, tables, and the rotation itself.

Pairs are (i, i + d/2), the NEOX order. The frequency rules are those of transformers.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from exl2flow.kernels import get_ops, halved
from exl2flow.model.config.rope_spec import RopeKind, RopeSpec
from exl2flow.model.config.spec import AttentionSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines, fp32 (t, d/2) each, `d` the rotated dimensions; or (b, 1, t, d/2).

    query_scale: what queries are multiplied by, fp32 (t, 1) or (b, 1, t, 1); None: nothing.
    interleaved: elements (2i, 2i + 1) are pairs; rotated, they stand at (i, i + d/2), in queries as
    in keys.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None = None
    interleaved: bool = False

    def at(self, positions: torch.Tensor) -> "RopeTable":
        """Return the rows of positions: int (t,) as (t, d/2), (b, t) as (b, 1, t, d/2)."""
        rows = positions.long() if positions.dim() == 1 else positions.long()[:, None]
        scale = self.query_scale
        return RopeTable(
            cos=self.cos[rows],
            sin=self.sin[rows],
            query_scale=None if scale is None else scale[rows],
            interleaved=self.interleaved,
        )

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first dimensions of heads (b, h, t, head_dim), in fp32."""
        half = self.cos.shape[-1]
        if not half:
            return x
        x = halved(x, 2 * half) if self.interleaved else x
        return get_ops(x.device).rotate(x, self.cos, self.sin)

    def without_rotation(self) -> "RopeTable":
        """Return a table of the same positions for queries and keys that are ready."""
        return RopeTable(cos=self.cos[..., :0], sin=self.sin[..., :0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTables:
    """The tables of all layers for the same positions; layers of equal ropes share one.

    tables: of the different ropes; of_layer: the index of each layer's table;
    positions: int64 (t,) or (b, t).
    """

    tables: tuple[RopeTable, ...]
    of_layer: tuple[int, ...]
    positions: torch.Tensor

    @classmethod
    def of(cls, spec: ModelSpec, count: int, device: torch.device) -> "RopeTables":
        """Return the tables of a model for `count` positions; see `step_table`."""
        ropes = spec.ropes
        return cls(
            tables=tuple(step_table(rope, count, device) for rope in ropes),
            of_layer=tuple(
                ropes.index(layer.rope) if isinstance(layer, AttentionSpec) else 0
                for layer in spec.attentions
            ),
            positions=torch.arange(count, device=device),
        )

    def layer(self, index: int) -> RopeTable:
        """Return a layer's table."""
        return self.tables[self.of_layer[index]]

    def at(self, positions: torch.Tensor) -> "RopeTables":
        """Return the rows of positions, int64 (t,) or (b, t), in each table."""
        return RopeTables(
            tables=tuple(table.at(positions) for table in self.tables),
            of_layer=self.of_layer,
            positions=positions,
        )


def at_layer(start: int | RopeTables, index: int) -> int | RopeTable:
    """Return what a layer's sublayers take as their start."""
    return start if isinstance(start, int) else start.layer(index)


@lru_cache(maxsize=8)  # layers with the same rope use the same table in a forward pass
@torch.inference_mode(False)  # a table made in inference mode must serve gradients, too
def rope_table(rope: RopeSpec, start: int, count: int, device: torch.device) -> RopeTable:
    """Return the table of positions `start` to `start + count`; shared, so do not write to it."""
    frequencies = inverse_frequencies(rope, start + count)
    positions = torch.arange(start, start + count, dtype=torch.float32)
    angles = torch.outer(positions / rope.position_scale, frequencies)  # (t, d/2)
    factor = attention_factor(rope)
    return RopeTable(
        cos=(angles.cos() * factor).to(device),
        sin=(angles.sin() * factor).to(device),
        query_scale=_query_scale(rope, positions, device),
        interleaved=rope.interleaved,
    )


def step_table(rope: RopeSpec, count: int, device: torch.device) -> RopeTable:
    """Return the table of `count` positions, each rotated as the last position of a call."""
    switch = min(rope.original_max_positions, count)  # no kind changes its frequencies before
    parts = [(0, switch), (switch, count)]
    if rope.kind is RopeKind.DYNAMIC:  # ... and this one at every position from there on
        parts = [(0, switch), *((place, place + 1) for place in range(switch, count))]
    host = torch.device("cpu")  # what `rope_table` keeps takes no memory of a GPU
    tables = [rope_table(rope, start, end - start, host) for start, end in parts if start < end]
    return RopeTable(
        cos=torch.cat([table.cos for table in tables]).to(device),
        sin=torch.cat([table.sin for table in tables]).to(device),
        query_scale=_query_scale(rope, torch.arange(count, dtype=torch.float32), device),
        interleaved=rope.interleaved,
    )


def _query_scale(
    rope: RopeSpec, positions: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """Return what `RopeSpec.query_beta` says, fp32 (t, 1), if it is not 0."""
    if not rope.query_beta:
        return None
    contexts = torch.floor((positions + rope.query_offset) / rope.original_max_positions)
    return (1 + rope.query_beta * torch.log(1 + contexts))[:, None].to(device)


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> torch.Tensor:
    """Return the angle per position of each pair, fp32 (d/2,).

    Args:
        rope: kind and parameters.
        num_positions: one more than the highest position of the call; LongRoPE switches on it,
            dynamic NTK grows with it.
    """
    plain = 1.0 / rope.theta ** _exponents(rope)  # theta^(-2i/d)
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.DYNAMIC:
            return _dynamic(rope, num_positions)
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)
        case RopeKind.YARN:
            return _yarn(rope, plain)
        case RopeKind.LONGROPE:
            return _longrope(rope, num_positions)


def attention_factor(rope: RopeSpec) -> float:
    """Return the factor of cosines and sines.

    YaRN: 0.1 · ln(factor) + 1, or the ratio of that with each `mscale` before the logarithm.
    LongRoPE: sqrt(1 + ln(factor) / ln(original positions)).
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    match rope.kind:
        case RopeKind.YARN if rope.mscale and rope.mscale_all_dim:
            grown = 0.1 * math.log(rope.factor)
            return (grown * rope.mscale + 1.0) / (grown * rope.mscale_all_dim + 1.0)
        case RopeKind.YARN:
            return 0.1 * math.log(rope.factor) + 1.0
        case RopeKind.LONGROPE:
            return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
        case _:
            return 1.0


def _exponents(rope: RopeSpec) -> torch.Tensor:
    """Return 2i / d for each pair, fp32 (d/2,)."""
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / max(rope.rotary_dim, 1)


def _dynamic(rope: RopeSpec, num_positions: int) -> torch.Tensor:
    """(theta · growth^(d / (d - 2)))^(-2i/d), growth = factor · n / original - (factor - 1).

    n counts positions, and is at least the original ones.
    """
    n = max(num_positions, rope.original_max_positions)
    growth = rope.factor * n / rope.original_max_positions - (rope.factor - 1)
    theta: float = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / theta ** _exponents(rope)


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Divide long wavelengths by `factor`, keep short ones, blend those between.

    With r = original positions / wavelength: kept if r > high, divided if r < low, else the blend
    with share (r - low) / (high - low) of the kept one.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    if rope.low_freq_factor == rope.high_freq_factor:
        return torch.where(turns < rope.low_freq_factor, plain / rope.factor, plain)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Blend by pair index i: kept below `low`, divided by `factor` above `high`, linear between.

    The bounds are the indices whose pair turns `beta_fast` and `beta_slow` times within the
    original positions.
    """
    low, high = (_yarn_index(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001  # the published rule's guard against an empty ramp
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    divided = ((index - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * divided + plain * (1 - divided)


def _yarn_index(rope: RopeSpec, turns: float) -> float:
    """Return the pair index that completes `turns` turns within the original positions."""
    wavelength = rope.original_max_positions / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _longrope(rope: RopeSpec, num_positions: int) -> torch.Tensor:
    """theta^(-2i/d) / factor_i, the long factors once the call exceeds the original positions."""
    is_long = num_positions > rope.original_max_positions
    factors = rope.long_factors if is_long else rope.short_factors
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta ** _exponents(rope))
