"""The projections of MLPs and experts, and how a layer's experts are divided into sublayers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exl2flow.kernels import RouterRule
from exl2flow.model.config.family import Experts
from exl2flow.model.config.sublayer_spec import (
    ROUTED,
    ExpertGroup,
    ProjectionSpec,
    Role,
    RouterSpec,
    SublayerPart,
)

LINEARS: dict[str, str] = {  # where a family has no other name
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
Row = tuple[Role, int, int, bool, str]  # role, in- and out-features, bias, capture


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Shape of the MLP; if `gated`, its activation is multiplied with a second product.

    activation: one of `kernels.ACTIVATIONS`, or if gated of `GATED_ACTIVATIONS`.
    """

    intermediate_size: int
    activation: str
    has_bias: bool
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Experts of a layer: their router's rule, the shape of each one, and of the shared one."""

    rule: RouterRule
    expert: MlpSpec
    shared: MlpSpec | None = None


def mlp_rows(hidden_size: int, mlp: MlpSpec, *, first: str, inner: str) -> tuple[Row, ...]:
    """Return the projections of an MLP that read activations of these names."""
    width, bias = mlp.intermediate_size, mlp.has_bias
    rows: tuple[Row, ...] = (
        ("gate", hidden_size, width, bias, first),
        ("up", hidden_size, width, bias, first),
        ("down", width, hidden_size, bias, inner),
    )
    return rows[not mlp.gated :]


def projections_of(
    start: str, names: Mapping[str, str], rows: Sequence[Row], prefix: str | None = None
) -> tuple[ProjectionSpec, ...]:
    """Return projections; each has its whole name after `prefix`, or only its last without one."""
    return tuple(
        ProjectionSpec(
            name=names[role].rpartition(".")[2] if prefix is None else prefix + names[role],
            key=f"{start}.{names[role]}",
            role=role,
            in_features=in_features,
            out_features=out_features,
            has_bias=has_bias,
            capture=capture,
        )
        for role, in_features, out_features, has_bias, capture in rows
    )


def group_name(start: str, row: Experts, group: ExpertGroup) -> str:
    """Return the name of a group's sublayer: the layer's experts, then which of them it has."""
    members = group.experts
    which = f"{members[0]}-{members[-1]}" if members else "shared"
    return f"{start}.{row.experts}.{which}"


def expert_groups(
    start: str, row: Experts, experts: ExpertsSpec, *, hidden_size: int, most_weights: int | None
) -> list[tuple[tuple[SublayerPart, ...], ExpertGroup]]:
    """Divide a layer's experts into groups of about equal size, which only shapes decide.

    Args:
        start: of the layer's names.
        row: of the family.
        experts: of the layer.
        hidden_size: of a state.
        most_weights: of a group, unless a single expert has more; None: there is one group.

    Returns:
        The parts of each group's sublayer, and the group.
    """
    router = _router(start, row, experts.rule)
    divided, shared = _divided(experts, hidden_size, most_weights), experts.shared
    groups = []
    for place, members in enumerate(divided):
        is_last = place == len(divided) - 1
        parts = []
        if members:
            parts.append(_experts_part(start, row, experts.expert, members, hidden_size))
        if shared is not None and is_last:
            parts.append(_shared_part(start, row, shared, hidden_size))
        group = ExpertGroup(
            router=router,
            experts=members,
            has_shared=shared is not None and is_last,
            shared_gate=f"{start}.{row.shared_gate}" if row.shared_gate and shared else None,
            is_first=place == 0,
            is_last=is_last,
        )
        groups.append((tuple(parts), group))
    return groups


def implying_keys(row: Experts, config: Mapping[str, object]) -> str:
    """Return the config keys that imply the shapes of experts, in backticks."""
    count = next((key for key in row.count_keys if config.get(key) is not None), row.count_keys[0])
    return f"`{count}`, `hidden_size` and `{row.width_key}`"


def _router(start: str, row: Experts, rule: RouterRule) -> RouterSpec:
    return RouterSpec(
        key=f"{start}.{row.router}",
        rule=rule,
        has_bias=row.router_bias,
        correction=None if row.correction is None else f"{start}.{row.correction}",
        correction_shape=(1, rule.experts) if row.has_wide_correction else (rule.experts,),
    )


def _divided(experts: ExpertsSpec, hidden_size: int, most: int | None) -> list[range]:
    """Return the experts of each group; the last group is that of the shared one, too."""
    count = experts.rule.experts
    if most is None:
        return [range(count)]
    weights = _weights(hidden_size, experts.expert)
    groups = -(-count // max(1, most // weights))
    size = -(-count // groups)
    divided = [range(begin, min(begin + size, count)) for begin in range(0, count, size)]
    shared = 0 if experts.shared is None else _weights(hidden_size, experts.shared)
    if shared and len(divided[-1]) * weights + shared > most:
        divided.append(range(count, count))
    return divided


def _weights(hidden_size: int, mlp: MlpSpec) -> int:
    return (3 if mlp.gated else 2) * hidden_size * mlp.intermediate_size


def _experts_part(
    start: str, row: Experts, mlp: MlpSpec, members: range, hidden_size: int
) -> SublayerPart:
    """Return the projections of experts, one after the other."""
    projections: list[ProjectionSpec] = []
    for expert in members:
        names = {role: f"{expert}.{name}" for role, name in row.linears}
        rows = mlp_rows(hidden_size, mlp, first=f"{expert}.input", inner=f"{expert}.inner")
        projections += projections_of(f"{start}.{row.experts}", names, rows, prefix=ROUTED)
    name = f"{start}.{row.experts}.{members[0]}-{members[-1]}"
    return SublayerPart(name=name, projections=tuple(projections))


def _shared_part(start: str, row: Experts, mlp: MlpSpec, hidden_size: int) -> SublayerPart:
    rows = mlp_rows(hidden_size, mlp, first="shared.input", inner="shared.inner")
    names: dict[str, str] = {role: LINEARS[role].rpartition(".")[2] for role, *_ in rows}
    name = f"{start}.{row.shared}"
    projections = projections_of(name, names, rows, prefix="shared.")
    return SublayerPart(name=name, projections=projections)
