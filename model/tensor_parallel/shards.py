"""A rank's share of a model: cut from what is stored, projection by projection.

Queries, keys, values, gate, up and head are cut by columns. The rows of down belong to groups that
share scales, in an order of their own: a rank takes whole groups, and of gate and up the columns
that these rows read, in that order. o stays whole behind a gather of what attention gives. Experts
that a router chooses are dealt out whole; a shared one, which all tokens pass, is cut as an MLP is,
so that all ranks have a part of its work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.kernels import PANEL_ROWS, Group, get_ops
from exl2flow.model.config.family import HeadNorms
from exl2flow.model.config.spec import AttentionSpec, ModelSpec
from exl2flow.model.config.sublayer_spec import (
    ExpertGroup,
    ProjectionSpec,
    Role,
    SublayerPart,
    SublayerSpec,
)
from exl2flow.model.files.exl2 import (
    COLUMN_MULTIPLE,
    QuantizedMatrix,
    is_quantized,
    stored_rows,
    tensor_names,
)
from exl2flow.model.files.gptq import BITS, GptqMatrix, gptq_names, is_gptq
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.decoder import Head
from exl2flow.model.layers.experts import SHARED, ExpertsSublayer, Total
from exl2flow.model.layers.linear import DenseLinear, Linear, Part, SharedLinear, read_part
from exl2flow.model.layers.parallel import ParallelSublayer
from exl2flow.model.layers.sublayer import Sublayer
from exl2flow.model.tensor_parallel.ranks import Ranks

TILE = 32  # columns of the head that stay together


class RowGroup(NamedTuple):
    """In-features that lie in one group of a matrix; size: bytes of their codes per column."""

    rows: torch.Tensor
    size: float


class Gathered(SharedLinear):
    """A linear that reads the columns of all ranks."""

    def __init__(self, linear: Linear, ranks: Ranks, widths: Sequence[int]) -> None:
        super().__init__(linear)
        self.gather = partial(ranks.gather, widths=widths)
        self.boxes = None if ranks.peers is None else ranks.peers.boxes
        self.guard = ranks.guard


class Columns(SharedLinear):
    """A linear whose columns are shared out; every rank gets all of them, fp32."""

    def __init__(self, linear: Linear, ranks: Ranks, widths: Sequence[int]) -> None:
        super().__init__(linear)
        self.columns = partial(ranks.gather, widths=widths)


class Summed(SharedLinear):
    """A linear whose rows are shared out; every rank gets the sum, of fp32 parts."""

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        super().__init__(linear)
        self.total, self.added = ranks.sum, ranks.added
        self.boxes = None if ranks.peers is None else ranks.peers.boxes
        self.guard = ranks.guard


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a sublayer: columns by role, and groups of down's rows.

    sublayer: with the rank's own experts only, which it takes whole.
    has_bias: whether it adds down's bias to the sum.
    """

    sublayer: SublayerSpec
    columns: Mapping[Role, torch.Tensor]
    groups: Sequence[int] = ()
    has_bias: bool = True

    def __call__(self, projection: ProjectionSpec, part: Part) -> Part:
        """Return the rank's part of a projection."""
        if projection.is_routed:
            return part
        if projection.role in self.columns:
            return cut_columns(part, self.columns[projection.role])
        if projection.role == "down" and self.groups:
            return cut_groups(part, self.groups, has_bias=self.has_bias)
        return part


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
    experts = [held for held in map(spec.experts_of, range(spec.num_layers)) if held]
    if experts and min(experts) < count:
        raise ConfigError(
            f"{count} ranks are more than the {min(experts)} experts of a layer of "
            f"`{spec.source_dir}`; give fewer"
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


def share_of(spec: ModelSpec, sublayer: SublayerSpec, tensors: TensorFiles, ranks: Ranks) -> Share:
    """Return what a rank takes of a sublayer.

    Raises:
        ConfigError: an MLP's down has fewer groups than there are ranks. If a shared expert's has
            fewer, some ranks have no part of it.
    """
    columns, groups = dict[Role, torch.Tensor](), list[int]()
    by_role = {p.role: p for p in sublayer.projections if not p.is_routed}
    if "o" in by_role:
        whole = spec.attention(sublayer.layer_index)
        heads: dict[Role, int] = {"q": whole.num_heads, "k": whole.num_kv_heads}
        heads["v"] = heads["k"]
        for role, count in heads.items():
            width, mine = by_role[role].out_features // count, max(1, count // ranks.count)
            first = ranks.rank * count // ranks.count
            columns[role] = torch.arange(first * width, (first + mine) * width)
    if "down" in by_role:
        found = groups_of(tensors, by_role["down"], spec)
        if len(found) < ranks.count and sublayer.group is None:
            raise ConfigError(
                f"`{sublayer.name}` has {len(found)} groups for {ranks.count} ranks; give fewer"
            )
        groups = dealt([group.size for group in found], ranks.count)[ranks.rank]
        if groups:
            rows = torch.cat([found[index].rows for index in groups])
            columns |= {role: rows for role in ("gate", "up") if role in by_role}
    if sublayer.group is not None:
        sublayer = _with_own_experts(sublayer, sublayer.group, tensors, ranks, shared=bool(groups))
    return Share(sublayer, columns, groups, has_bias=ranks.rank == 0)


def _with_own_experts(
    sublayer: SublayerSpec, group: ExpertGroup, tensors: TensorFiles, ranks: Ranks, *, shared: bool
) -> SublayerSpec:
    """Return a sublayer with a rank's experts, dealt out for equal bytes.

    Layers begin with a rank each, so what is left over does not add up on one of them. shared:
    whether the rank has a part of the shared expert.
    """
    sizes = dict.fromkeys(map(str, group.experts), 0)
    for p in sublayer.projections:
        if p.is_routed:
            sizes[sublayer.unit(p)] += _bytes(p.key, tensors)
    turn = (ranks.rank + sublayer.layer_index) % ranks.count
    own = [group.experts[index] for index in dealt([*sizes.values()], ranks.count)[turn]]
    units = {*map(str, own), *([SHARED] if shared else [])}

    def kept(part: SublayerPart) -> SublayerPart:
        of_rank = (p for p in part.projections if sublayer.unit(p) in units)
        return replace(part, projections=tuple(of_rank))

    parts = tuple(map(kept, sublayer.parts))
    return replace(sublayer, parts=parts, group=replace(group, experts=own, has_shared=shared))


def _bytes(key: str, tensors: TensorFiles) -> int:
    """Return the bytes of a linear in files, in whichever form."""
    names = {*tensor_names(key), *gptq_names(key), f"{key}.weight", f"{key}.bias"}
    return sum(tensors.nbytes(name) for name in names if name in tensors)


def join_sublayer(spec: ModelSpec, sublayer: Sublayer, ranks: Ranks) -> Sublayer:
    """Let a rank's share of a sublayer exchange what others need."""
    if isinstance(sublayer, ExpertsSublayer):
        if ranks.count > 1:
            boxes = None if ranks.peers is None else ranks.peers.boxes
            sublayer.total = Total(ranks.sum, ranks.added, boxes, ranks.guard)
        return sublayer
    linears = sublayer.linears
    names = {p.role: p.name for p in sublayer.spec.projections}
    if "o" in names:
        local = _local(spec.attention(sublayer.spec.layer_index), ranks)
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
        linears[names["down"]] = Summed(linears[names["down"]], ranks)
    return sublayer


class HeadShare:
    """A rank's tiles of the vocabulary."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._ends = ranks, list[tuple[int, int]]()

    def __call__(self, part: Part) -> Part:
        """Return the rank's part of the head's projection."""
        count = part.out_features
        tiles = spans(-(-count // TILE), self._ranks.count)
        self._ends = [(TILE * tile.start, min(TILE * tile.stop, count)) for tile in tiles]
        return cut_columns(part, torch.arange(*self._ends[self._ranks.rank]))

    def joined(self, head: Head) -> Head:
        """Return a head whose logits are those of all ranks."""
        widths = [end - begin for begin, end in self._ends]
        return head.with_linear(Columns(head.linear, self._ranks, widths))


def cut_columns(part: Part, columns: torch.Tensor) -> Part:
    """Return some columns of a linear, int64 (c,), in memory of their own."""
    stored, count = part.stored, len(columns)
    if isinstance(stored, DenseLinear):
        columns = columns.to(stored.weight.device)
        bias = None if stored.bias is None else stored.bias[columns]
        return Part(DenseLinear(stored.weight[columns], bias), count)
    padded = -(-count // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    columns = columns[torch.arange(padded).clamp(max=count - 1)].to(stored.packed.device)
    bias = None if stored.bias is None else stored.bias[columns]
    packed, ops = stored.packed[:, columns], get_ops(stored.packed.device)

    def nibbles(words: torch.Tensor) -> torch.Tensor:
        return ops.pack_scales(ops.unpack_scales(words)[:, columns])

    if isinstance(stored, QuantizedMatrix):
        codes = nibbles(stored.scale_codes)
        return Part(replace(stored, packed=packed, scale_codes=codes, bias=bias), count)
    zeros, scales = nibbles(stored.zeros), stored.scales[:, columns]
    return Part(replace(stored, packed=packed, zeros=zeros, scales=scales, bias=bias), count)


def cut_groups(part: Part, groups: Sequence[int], *, has_bias: bool) -> Part:
    """Return the rows of some groups of a linear, in their order, with its bias or without."""
    stored = part.stored
    bias = stored.bias if has_bias else None
    if isinstance(stored, DenseLinear):
        rows = torch.cat([_dense_groups(stored.weight.shape[1])[index].rows for index in groups])
        weight = stored.weight[:, rows.to(stored.weight.device)]
        return Part(DenseLinear(weight, bias), part.out_features)
    if isinstance(stored, QuantizedMatrix):
        return Part(replace(_cut_exl2(stored, groups), bias=bias), part.out_features)
    return Part(replace(_cut_gptq(stored, groups), bias=bias), part.out_features)


def _cut_exl2(matrix: QuantizedMatrix, groups: Sequence[int]) -> QuantizedMatrix:
    chosen = [matrix.groups[index] for index in groups]
    starts = matrix.group_table.tolist()[1::2]
    words = [
        torch.arange(starts[index], starts[index] + group.rows * group.bits // PANEL_ROWS)
        for index, group in zip(groups, chosen, strict=True)
    ]
    begins = [0, *torch.tensor([len(part) for part in words]).cumsum(0).tolist()]
    table = [x for group, begin in zip(chosen, begins, strict=False) for x in (group.bits, begin)]
    device, taken = matrix.packed.device, torch.tensor(groups)
    return replace(
        matrix,
        packed=matrix.packed[torch.cat(words).to(device)],
        scale_codes=matrix.scale_codes[taken.to(device)],
        max_scales=matrix.max_scales[taken.to(matrix.max_scales.device)],
        group_table=torch.tensor(table, dtype=matrix.group_table.dtype),
        inverse_perm=torch.arange(sum(group.rows for group in chosen)).int(),
    )


def _cut_gptq(matrix: GptqMatrix, groups: Sequence[int]) -> GptqMatrix:
    rows = [torch.nonzero(matrix.group_of == index)[:, 0] for index in groups]
    counts = torch.tensor([len(part) for part in rows])
    device, taken = matrix.packed.device, torch.tensor(groups)
    codes = matrix.codes()[torch.cat(rows).to(device)]
    whole = Group(bits=BITS, start=0, rows=len(codes))
    return replace(
        matrix,
        packed=get_ops(device).pack(codes, [whole]),
        zeros=matrix.zeros[taken.to(device)],
        scales=matrix.scales[taken.to(device)],
        group_of=torch.arange(len(groups)).repeat_interleave(counts),
    )


def groups_of(tensors: TensorFiles, projection: ProjectionSpec, spec: ModelSpec) -> list[RowGroup]:
    """Return the in-features of a linear by group, as they are stored; 32 each if it is dense."""
    key = projection.key
    if is_quantized(key, tensors):
        groups, order = stored_rows(key, tensors)
        return [RowGroup(order[g.start : g.start + g.rows], g.bits * g.rows) for g in groups]
    if not is_gptq(key, tensors):
        return _dense_groups(projection.in_features)
    matrix = read_part(tensors, projection, gptq=spec.gptq_label).stored
    assert isinstance(matrix, GptqMatrix)
    rows = torch.bincount(matrix.group_of).tolist()
    return [RowGroup(part, len(part)) for part in torch.split(matrix.order, rows)]


def _dense_groups(count: int) -> list[RowGroup]:
    return [RowGroup(part, len(part)) for part in torch.split(torch.arange(count), PANEL_ROWS)]


def _local(attention: AttentionSpec, ranks: Ranks) -> AttentionSpec:
    """Return an attention with a rank's heads; key-value heads are repeated if there are fewer."""
    return replace(
        attention,
        num_heads=attention.num_heads // ranks.count,
        num_kv_heads=max(1, attention.num_kv_heads // ranks.count),
    )
