"""Build sublayers from the files of a model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from exl2flow.core.errors import TensorShapeError
from exl2flow.model.config.delta_spec import DeltaSpec
from exl2flow.model.config.experts_spec import ExpertsSpec, MlpSpec
from exl2flow.model.config.family import HeadNorms
from exl2flow.model.config.spec import AttentionSpec, ModelSpec
from exl2flow.model.config.sublayer_spec import ProjectionSpec, SublayerSpec
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.delta import DeltaSublayer, load_delta
from exl2flow.model.layers.experts import ExpertsSublayer, load_router
from exl2flow.model.layers.linear import Linear, Part, RowOrders, made_linear, read_part
from exl2flow.model.layers.mlp import MlpSublayer
from exl2flow.model.layers.norms import Norm, load_norm
from exl2flow.model.layers.parallel import ParallelSublayer
from exl2flow.model.layers.sublayer import Sublayer

Cut = Callable[[ProjectionSpec, Part], Part]


def build_sublayer(
    spec: ModelSpec,
    sublayer: SublayerSpec,
    tensors: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    packed: bool = False,
    cut: Cut = lambda projection, part: part,
) -> Sublayer:
    """Load one sublayer; `packed` as in `made_linear`, `cut` makes a share of each projection.

    Raises:
        MissingTensor: one of its tensors is absent.
        TensorShapeError: a tensor contradicts the config.
    """
    orders: RowOrders = {}
    linears = dict[str, Linear]()
    for p in sublayer.projections:
        part = read_part(tensors, p, dtype=dtype, device=device, gptq=spec.gptq_label)
        linears[p.name] = made_linear(
            cut(p, part), dtype=dtype, device=device, packed=packed, orders=orders
        )
    norms: dict[str, Norm] = {
        norm.role: load_norm(tensors, norm, dtype=dtype, device=device) for norm in sublayer.norms
    }
    if sublayer.has_attention:
        norms |= bare_norms(spec, spec.attention(sublayer.layer_index), dtype, device)
    own: dict[str, Any] = {
        "norms": norms,
        "linears": linears,
        "multiplier": spec.residual_multiplier,
    }
    match sublayer.kind:
        case "attention":
            attention = read_attention(spec, sublayer, tensors, device=device)
            return AttentionSublayer(sublayer, attention=attention, **own)
        case "delta":
            delta = spec.attentions[sublayer.layer_index]
            assert isinstance(delta, DeltaSpec)
            args = load_delta(sublayer, delta, tensors, eps=spec.norm_eps, device=device)
            return DeltaSublayer(sublayer, delta=delta, args=args, **own)
        case "mlp":
            return _mlp(spec, sublayer, own)
        case "parallel":
            attention = read_attention(spec, sublayer, tensors, device=device)
            beside = AttentionSublayer(sublayer, attention=attention, **own)
            return ParallelSublayer(beside, _mlp(spec, sublayer, own))
        case "experts":
            return _experts(spec, sublayer, tensors, own, device=device)


def _mlp(spec: ModelSpec, sublayer: SublayerSpec, own: Mapping[str, Any]) -> MlpSublayer:
    layer = spec.mlps[sublayer.layer_index]
    assert isinstance(layer, MlpSpec)
    return MlpSublayer(sublayer, activation=layer.activation, **own)


def _experts(
    spec: ModelSpec,
    sublayer: SublayerSpec,
    tensors: TensorFiles,
    own: Mapping[str, Any],
    *,
    device: torch.device | str,
) -> ExpertsSublayer:
    layer = spec.mlps[sublayer.layer_index]
    assert isinstance(layer, ExpertsSpec)
    assert sublayer.group is not None
    router, gate = load_router(spec, sublayer.group, tensors, device=device)
    activation = layer.expert.activation
    return ExpertsSublayer(sublayer, router=router, shared_gate=gate, activation=activation, **own)


def bare_norms(
    spec: ModelSpec, attention: AttentionSpec, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Norm]:
    """Return the norms of queries and keys that no tensor belongs to, by role."""
    if attention.head_norms is not HeadNorms.BARE:
        return {}
    weight = torch.ones(attention.head_dim, dtype=dtype, device=device)
    return dict.fromkeys(
        ("q", "k"), Norm(weight=weight, bias=None, eps=spec.norm_eps, centered=False)
    )


def read_attention(
    spec: ModelSpec, sublayer: SublayerSpec, tensors: TensorFiles, *, device: torch.device | str
) -> AttentionSpec:
    """Return the attention of a layer, its rule with sinks in fp32 if it has any.

    Raises:
        MissingTensor: the sinks are absent.
        TensorShapeError: there is not one for each head.
    """
    attention, name = spec.attention(sublayer.layer_index), sublayer.sinks
    if name is None:
        return attention
    sinks = tensors.read_floating(name)
    if tuple(sinks.shape) != (attention.num_heads,):
        raise TensorShapeError(
            f"`{name}` has shape {tuple(sinks.shape)}, `config.json` implies "
            f"{(attention.num_heads,)}: one for each head; check that both belong to one model"
        )
    rule = replace(attention.rule, sinks=sinks.to(device, torch.float32))
    return replace(attention, rule=rule)
