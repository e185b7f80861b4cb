"""The block of a model that predicts one token more than the model itself (multi-token prediction).

Of the embedding of a token and of the model's last state before it, it makes a state like the one
that the model will have for that token. The head makes logits of it: draft tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from exl2flow.model.config.spec import ModelSpec, expected_tensors
from exl2flow.model.config.sublayer_spec import NormSpec, ProjectionSpec


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """A block: what joins embedding and state, and one layer of full attention behind it.

    layer: the model with that layer alone, the block's final norm, and the model's head.
    joint: reads the normed embedding, then the normed state.
    """

    layer: ModelSpec
    embedding_norm: NormSpec
    state_norm: NormSpec
    joint: ProjectionSpec

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape of the block's dense tensors; embedding and head are the model's."""
        hidden = self.layer.hidden_size
        shared = (f"{self.layer.embedding_key}.", f"{self.layer.head.key}.")
        return {
            f"{self.joint.key}.weight": (hidden, 2 * hidden),
            **dict.fromkeys((*self.embedding_norm.names, *self.state_norm.names), (hidden,)),
            **{n: s for n, s in expected_tensors(self.layer).items() if not n.startswith(shared)},
        }


def mtp_of(spec: ModelSpec) -> MtpSpec | None:
    """Return the block that a model of this family may have; None: it has none."""
    row = spec.family.mtp
    if row is None:
        return None
    family = replace(spec.family, prefix=row.prefix, carried=(), mtp=None)
    layer = replace(
        spec,
        family=family,
        num_layers=1,
        attentions=spec.attending[:1],
        mlps=spec.mlps[-1:],
    )
    final, hidden = layer.final_norm, spec.hidden_size
    return MtpSpec(
        layer=layer,
        embedding_norm=replace(final, role="embedding", key=f"{row.prefix}{row.embedding_norm}"),
        state_norm=replace(final, role="state", key=f"{row.prefix}{row.state_norm}"),
        joint=ProjectionSpec(
            name=row.joint,
            key=f"{row.prefix}{row.joint}",
            role="joint",
            in_features=2 * hidden,
            out_features=hidden,
            has_bias=False,
            capture="joined",
        ),
    )
