"""What an MTP block reads of calibration rows: pairs of a token and the model's state before it."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from exl2flow.core.runtime.interrupt import look
from exl2flow.model import CanonicalTensors, Linear, NormSpec, build_embedding
from exl2flow.model.config.mtp import MtpSpec
from exl2flow.model.layers.decoder import Embedding
from exl2flow.model.layers.linear import made_linear, read_part
from exl2flow.model.layers.norms import Norm, load_norm
from exl2flow.quant.rounding.hessian import HessianSum
from exl2flow.quant.walk.source_model import DTYPE, SourceModel, StatesCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSource:
    """The block of a source model.

    layer: its one layer, as a model; joint: its weights; norms: of the embedding and of the state;
    final_norm: the model's, before the block's own norm of the state; None: states as they are.
    """

    spec: MtpSpec
    layer: SourceModel
    embedding: Embedding
    norms: tuple[Norm, Norm]
    final_norm: Norm | None
    joint: Linear

    @classmethod
    def open(cls, model: SourceModel, found: MtpSpec) -> Self:
        """Read what comes before the layer."""
        layer = replace(model, spec=found.layer, tensors=CanonicalTensors(found.layer))
        stored = model.tensors.dtype(f"{model.spec.embedding_key}.weight")
        dtype, device = model.dtype, model.device
        gptq = found.layer.gptq_label
        joint = read_part(layer.tensors, found.joint, dtype=dtype, device=device, gptq=gptq)

        def norm(source: SourceModel, spec: NormSpec) -> Norm:
            return load_norm(source.tensors, spec, dtype=DTYPE, device=model.device)

        return cls(
            spec=found,
            layer=layer,
            embedding=build_embedding(model.spec, model.tensors, dtype=stored, device=model.device),
            norms=(norm(layer, found.embedding_norm), norm(layer, found.state_norm)),
            final_norm=norm(model, model.spec.final_norm) if found.reads_normed else None,
            joint=made_linear(joint, dtype=dtype, device=device),
        )

    def joined(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return what the joint reads of a row, (1, t - 1, 2 · hidden).

        Args:
            states: the model's behind its last layer, fp32 (t, hidden).
            ids: the row's tokens, int64 (t,).
        """
        before = states[None, :-1].to(self.layer.device, non_blocking=True)
        before = before if self.final_norm is None else self.final_norm(before)
        embedded = self.embedding(ids[None, 1:], dtype=DTYPE)
        parts = zip(self.norms, (embedded, before), strict=True)
        return torch.cat([norm(x) for norm, x in parts], dim=-1)

    def hessian(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the Hessian of what the joint reads, fp32 (2 · hidden, 2 · hidden)."""
        total = HessianSum(self.spec.joint.in_features, device=self.layer.device)
        for row, tokens in zip(states, ids, strict=True):
            look()
            total.add(self.joined(row, tokens))
        return total.mean()

    def entering(self, states: torch.Tensor, ids: torch.Tensor, joint: Linear) -> torch.Tensor:
        """Return the states that enter the block's layer, fp32 (rows, t - 1, hidden).

        Args:
            states: the model's behind its last layer, fp32 (rows, t, hidden).
            ids: the rows, int64 (rows, t).
            joint: the source's, or rounded.
        """
        rows, tokens, hidden = states.shape
        entered = self.layer.room((rows, tokens - 1, hidden))
        check = StatesCheck(self.spec.joint.key)
        for row, (own, its) in enumerate(zip(states, ids, strict=True)):
            look()
            output = joint(self.joined(own, its))
            check.add([row], output)
            entered[row].copy_(output[0], non_blocking=True)
        check.finish(entered)
        return entered
