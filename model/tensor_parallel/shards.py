"""A rank's share of a model: cut from what is loaded, sublayer by sublayer.

Queries, keys, values, gate, up and head are cut by columns. The rows of down belong to groups that
share scales, in an order of their own: a rank takes whole groups, and of gate and up the columns
that these rows read, in that order. o stays whole behind a gather of what attention gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.kernels import PANEL_ROWS
from exl2flow.model.config.family import HeadNorms
from exl2flow.model.config.spec import AttentionSpec, ModelSpec
from exl2flow.model.config.sublayer_spec import Role
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.model.files.gptq import GptqMatrix
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.decoder import Head
from exl2flow.model.layers.linear import DenseLinear, Linear, QuantizedLinear
from exl2flow.model.layers.parallel import ParallelSublayer
from exl2flow.model.layers.sublayer import Sublayer
from exl2flow.model.tensor_parallel.ranks import Ranks

TILE = 32  # columns of the head that stay together


@dataclass(frozen=True, slots=True)
class RowGroup:
    """In-features that lie in one group of a matrix; size: bytes of their codes per column."""

    rows: torch.Tensor
    size: float


class Gathered:
    """A linear that reads the columns of all ranks."""

    def __init__(self, linear: Linear, ranks: Ranks, widths: Sequence[int]) -> None:
        self._linear, self._ranks, self._widths = linear, ranks, widths
        self.weight, self.bias = linear.weight, linear.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(self._ranks.gather(x, self._widths))


class Columns(Gathered):
    """A linear whose columns are shared out; every rank gets all of them."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ranks.gather(self._linear(x), self._widths)


class Summed:
    """A linear whose rows are shared out; every rank gets the sum, and adds the bias to it."""

    def __init__(self, linear: Linear, bias: torch.Tensor | None, ranks: Ranks) -> None:
        self._linear, self._ranks = linear, ranks
        self.weight, self.bias = linear.weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = self._ranks.sum(self._linear(x))
        return total if self.bias is None else total + self.bias


def spans(count: int, ranks: int) -> list[range]:
    """Return consecutive shares of `count` things, of about the same length."""
    ends = [count * rank // ranks for rank in range(ranks + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def dealt(sizes: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the indexes that each rank takes so that sums of sizes are about equal, in order.

    The largest ones go first, each to the rank that has least.
    """
    taken, totals = [list[int]() for _ in range(ranks)], [0.0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min(range(ranks), key=totals.__getitem__)
        taken[rank].append(index)
        totals[rank] += sizes[index]
    return [sorted(mine) for mine in taken]


def check_ranks(spec: ModelSpec, count: int) -> None:
    """Raise `ConfigError` if a model cannot be divided among `count` ranks."""
    if spec.has_experts:
        raise ConfigError(
            f"`{spec.source_dir}` has experts, which ranks cannot share yet; run it in one process"
        )
    if spec.deltas:
        raise ConfigError(
            f"`{spec.source_dir}` has layers with a state, which ranks cannot share; run it in one "
            "process"
        )
    for index, attention in enumerate(spec.attending):
        heads, held = attention.num_heads, attention.num_kv_heads
        if heads % count or (held % count and count % held):
            raise ConfigError(
                f"{count} ranks cannot share layer {index} of `{spec.source_dir}`, which has "
                f"{heads} heads and {held} key-value heads; give a number that divides both"
            )
        if attention.head_norms in (HeadNorms.WHOLE, HeadNorms.HEADS):
            raise ConfigError(
                f"`{spec.source_dir}` has norms over several heads, so ranks cannot share them; "
                "run it in one process"
            )
    if count > -(-spec.vocab_size // TILE):
        raise ConfigError(
            f"{count} ranks are more than the tiles of {TILE} tokens in the vocabulary of "
            f"`{spec.source_dir}`; give fewer"
        )


def shared_spec(spec: ModelSpec, ranks: Ranks) -> ModelSpec:
    """Return a model with a rank's heads only."""
    layers = tuple(_local(attention, ranks) for attention in spec.attending)
    return replace(spec, attentions=layers)


def share_sublayer(spec: ModelSpec, sublayer: Sublayer, ranks: Ranks) -> Sublayer:
    """Cut the linears of a sublayer of the whole model to a rank's share.

    Raises:
        ConfigError: down has fewer groups than there are ranks.
    """
    linears = sublayer.linears
    names = {p.role: p.name for p in sublayer.spec.projections}
    if "o" in names:
        whole = spec.attention(sublayer.spec.layer_index)
        local, dim = _local(whole, ranks), whole.head_dim
        first = ranks.rank * whole.num_kv_heads // ranks.count
        queries = torch.arange(local.width) + ranks.rank * local.width
        keys = torch.arange(local.kv_width) + first * dim
        cuts: dict[Role, torch.Tensor] = {"q": queries, "k": keys, "v": keys}
        for role, columns in cuts.items():
            linears[names[role]] = cut_columns(linears[names[role]], columns)
        widths = [local.width] * ranks.count
        linears[names["o"]] = Gathered(linears[names["o"]], ranks, widths)
        of = sublayer.attention if isinstance(sublayer, ParallelSublayer) else sublayer
        assert isinstance(of, AttentionSublayer)
        sinks = of.attention.rule.sinks
        if sinks is not None:
            own = sinks.view(ranks.count, -1)[ranks.rank].contiguous()
            local = replace(local, rule=replace(local.rule, sinks=own))
        of.attention = local
    if "down" in names:
        down = linears[names["down"]]
        groups = groups_of(down)
        if len(groups) < ranks.count:
            raise ConfigError(
                f"`{sublayer.spec.name}` has {len(groups)} groups for {ranks.count} ranks; give "
                "fewer"
            )
        mine = dealt([group.size for group in groups], ranks.count)[ranks.rank]
        rows = torch.cat([groups[index].rows for index in mine])
        for name in (p.name for p in sublayer.spec.projections if p.role in ("gate", "up")):
            linears[name] = cut_columns(linears[name], rows)
        cut = DenseLinear(down.weight[:, rows].contiguous())
        linears[names["down"]] = Summed(cut, down.bias, ranks)
    return sublayer


def share_head(head: Head, ranks: Ranks) -> Head:
    """Return a head with a rank's tiles of the vocabulary."""
    count = head.linear.weight.shape[0]
    tiles = spans(-(-count // TILE), ranks.count)
    ends = [(TILE * tile.start, min(TILE * tile.stop, count)) for tile in tiles]
    mine = cut_columns(head.linear, torch.arange(*ends[ranks.rank]))
    return head.with_linear(Columns(mine, ranks, [end - begin for begin, end in ends]))


def cut_columns(linear: Linear, columns: torch.Tensor) -> DenseLinear:
    """Return some out-features of a linear, int64 (c,), in memory of their own."""
    bias = linear.bias
    return DenseLinear(linear.weight[columns], None if bias is None else bias[columns])


def groups_of(linear: Linear) -> list[RowGroup]:
    """Return the in-features of a linear by group, as they are stored; 32 each if it is dense."""
    matrix = linear.matrix if isinstance(linear, QuantizedLinear) else None
    if isinstance(matrix, QuantizedMatrix):
        order = matrix.order
        return [RowGroup(order[g.start : g.start + g.rows], g.bits * g.rows) for g in matrix.groups]
    if isinstance(matrix, GptqMatrix):
        rows = torch.bincount(matrix.group_of).tolist()
        return [RowGroup(part, len(part)) for part in torch.split(matrix.order, rows)]
    count = linear.weight.shape[1]
    return [RowGroup(part, len(part)) for part in torch.split(torch.arange(count), PANEL_ROWS)]


def _local(attention: AttentionSpec, ranks: Ranks) -> AttentionSpec:
    """Return an attention with a rank's heads; key-value heads are repeated if there are fewer."""
    return replace(
        attention,
        num_heads=attention.num_heads // ranks.count,
        num_kv_heads=max(1, attention.num_kv_heads // ranks.count),
    )
