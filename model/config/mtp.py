"""The block of a model that predicts one token more than the model itself (multi-token prediction).

Of the embedding of a token and of the model's last state before it, it makes a state like the one
that the model will have for that token. The head makes logits of it: draft tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from exl2flow.model.config.spec import ModelSpec, expected_tensors
from exl2flow.model.config.sublayer_spec import NormSpec, ProjectionSpec

PREFIX = "mtp."  # of the names here
TOKEN_COUNTS = "mtp.token_counts"  # how often each id occurred in calibration rows, int32 (v,)


# Draft tokens are chosen among the likeliest ids, and those of texts: tiles of a copy of the head
DRAFT_TILES = 1024, 256


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """A block: what joins embedding and state, and one layer of full attention behind it.

    layer: the model with that layer alone, the block's final norm, and the model's head.
    joint: reads the normed embedding, then the normed state.
    reads_normed: whether that is the state behind the model's final norm.
    """

    layer: ModelSpec
    embedding_norm: NormSpec
    state_norm: NormSpec
    joint: ProjectionSpec
    reads_normed: bool

    @property
    def projections(self) -> tuple[ProjectionSpec, ...]:
        """All matrices: the joint, then those of the layer."""
        return (self.joint, *self.layer.projections)

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
    """Return the block that files of a model may have; None: a model like this has none.

    Names begin with `mtp.`, also of a block that is stored as a layer.
    """
    row = spec.family.mtp
    if row is None or (row.is_layer and not spec.drafting_layers):
        return None
    behind, layer = f"{spec.layers_key}{spec.num_layers}.", f"{PREFIX}layers.0."
    renames = {
        f"{behind}{row.embedding_norm}.": f"{PREFIX}{row.embedding_norm}.",
        f"{behind}{row.state_norm}.": f"{PREFIX}{row.state_norm}.",
        f"{behind}{row.joint}.": f"{PREFIX}{row.joint}.",
        f"{behind}{row.final_norm}.": f"{PREFIX}norm.",
        behind: layer,
    }
    family = replace(
        spec.family,
        prefix=PREFIX,
        renames=(*spec.family.renames, *(renames.items() if row.is_layer else ())),
        carried=(),
        mtp=None,
    )
    alone = replace(
        spec,
        family=family,
        num_layers=1,
        attentions=spec.attending[:1],
        mlps=spec.mlps[-1:],
        drafting_layers=0,
    )
    final, hidden = alone.final_norm, spec.hidden_size
    return MtpSpec(
        layer=alone,
        embedding_norm=replace(final, role="embedding", key=f"{PREFIX}{row.embedding_norm}"),
        state_norm=replace(final, role="state", key=f"{PREFIX}{row.state_norm}"),
        joint=ProjectionSpec(
            name=row.joint,
            key=f"{PREFIX}{row.joint}",
            role="joint",
            in_features=2 * hidden,
            out_features=hidden,
            has_bias=False,
            capture="joined",
        ),
        reads_normed=row.reads_normed,
    )


def without_block(spec: ModelSpec) -> ModelSpec:
    """Return a model whose EXL2 files carry nothing of its block."""
    row = spec.family
    carried = tuple(start for start in row.carried if start != PREFIX)
    return replace(spec, family=replace(row, carried=carried, apart=(PREFIX, *row.apart)))


def carrying_block(spec: ModelSpec) -> ModelSpec:
    """Return a model whose EXL2 files carry its block as stored, also one stored as a layer."""
    row = spec.family
    behind = range(spec.num_layers, spec.num_layers + spec.drafting_layers)
    layers = tuple(f"{spec.layers_key}{layer}." for layer in behind)
    return replace(spec, family=replace(row, carried=(*row.carried, *layers)))
