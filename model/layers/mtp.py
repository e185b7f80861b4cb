"""A block that predicts one token more than its model, in use."""

from collections.abc import Sequence

import torch

from exl2flow.model.config.mtp import PREFIX, MtpSpec, mtp_of
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.files.canonical import CanonicalTensors
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.cache import KvCache
from exl2flow.model.layers.decoder import Embedding, Head
from exl2flow.model.layers.linear import Linear, is_packed, made_linear, read_part
from exl2flow.model.layers.norms import Norm, load_norm
from exl2flow.model.layers.rope import RopeTables
from exl2flow.model.layers.span import Span
from exl2flow.model.layers.sublayer import Sublayer
from exl2flow.model.layers.sublayers import build_sublayer


class MtpBlock:
    """Makes states for tokens that the model has not read, one after the other.

    embedding: the model's; head: the model's, behind the block's own final norm.
    """

    def __init__(
        self,
        spec: MtpSpec,
        *,
        embedding: Embedding,
        norms: tuple[Norm, Norm],
        joint: Linear,
        sublayers: Sequence[Sublayer],
        head: Head,
    ) -> None:
        """Assemble a block; `norms`: of the embedding and of the state."""
        self.spec, self.embedding, self.head = spec, embedding, head
        self._norms, self._joint = norms, joint
        device = embedding.weight.device
        self._span = Span(spec.layer, sublayers, device=device, layers=range(1))

    def states(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: KvCache | None = None,
        table: RopeTables | None = None,
    ) -> torch.Tensor:
        """Return states behind the block's final norm, (b, t, hidden), from which logits follow.

        Args:
            ids: the tokens (b, t).
            hidden: the state before each of them, (b, t, hidden): the model's behind its final
                norm, or what this returned for the token before.
            cache: of the block's layer; receives its keys and values.
            table: rotation of the positions; by default that of positions from 0 on.
        """
        return self.head.normed(
            self._span(self._joined(ids, hidden), start=table or 0, cache=cache)
        )

    def fill(
        self, ids: torch.Tensor, hidden: torch.Tensor, cache: KvCache, table: RopeTables
    ) -> None:
        """Store keys and values only; arguments as in `states`."""
        self._span.fill(self._joined(ids, hidden), start=table, cache=cache)

    def _joined(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids, dtype=hidden.dtype)
        parts = [norm(x) for norm, x in zip(self._norms, (embedded, hidden), strict=True)]
        return self._joint(torch.cat(parts, dim=-1))


def tensors_of(spec: MtpSpec) -> CanonicalTensors:
    """Return the tensors of a block, without those of its model."""
    return CanonicalTensors(spec.layer, start=PREFIX)


def block_in(spec: ModelSpec) -> MtpSpec | None:
    """Return the block that a model's files have, its matrices in any form that is read.

    None: the model has no block, or some of its tensors are missing.
    """
    found = mtp_of(spec)
    if found is None:
        return None
    names = tensors_of(found)
    packed = {f"{p.key}.weight" for p in found.projections if is_packed(p.key, names)}
    return found if all(name in packed or name in names for name in found.tensors) else None


def build_mtp(
    spec: MtpSpec,
    tensors: TensorFiles,
    *,
    embedding: Embedding,
    head: Head,
    dtype: torch.dtype,
    device: torch.device | str,
) -> MtpBlock:
    """Load a block beside the model's embedding and head.

    Raises:
        MissingTensor: one of its tensors is absent.
        TensorShapeError: a tensor contradicts the config.
    """
    layer, packed = spec.layer, torch.device(device).type == "cuda"
    part = read_part(tensors, spec.joint, dtype=dtype, device=device, gptq=layer.gptq_label)
    before = load_norm(tensors, spec.embedding_norm, dtype=dtype, device=device)
    behind = load_norm(tensors, spec.state_norm, dtype=dtype, device=device)
    final = load_norm(tensors, layer.final_norm, dtype=dtype, device=device)
    return MtpBlock(
        spec,
        embedding=embedding,
        norms=(before, behind),
        joint=made_linear(part, dtype=dtype, device=device, packed=packed),
        sublayers=[
            build_sublayer(layer, sublayer, tensors, dtype=dtype, device=device, packed=packed)
            for sublayer in layer.sublayers
        ],
        head=Head(final_norm=final, linear=head.linear, softcap=head.softcap),
    )
