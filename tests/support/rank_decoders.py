"""Decoders whose maps stay packed, as a GPU holds them: whole, or a rank's share."""

import torch

from exl2flow.model import (
    CanonicalTensors,
    Decoder,
    ModelSpec,
    build_embedding,
    build_head,
    build_sublayer,
)
from exl2flow.model.tensor_parallel.ranks import Ranks
from exl2flow.model.tensor_parallel.shards import HeadShare, join_sublayer, share_of, shared_spec


def packed(spec: ModelSpec, ranks: Ranks | None) -> Decoder:
    """Return a model as a GPU holds it, or a rank's share of it."""
    tensors, place = CanonicalTensors(spec), {"dtype": torch.float16, "device": "cpu"}
    if ranks is None:
        sublayers = [build_sublayer(spec, s, tensors, packed=True, **place) for s in spec.sublayers]
        head = build_head(spec, tensors, packed=True, **place)
    else:
        shares = [share_of(spec, s, tensors, ranks) for s in spec.sublayers]
        sublayers = [
            join_sublayer(
                spec,
                build_sublayer(spec, share.sublayer, tensors, packed=True, cut=share, **place),
                ranks,
            )
            for share in shares
        ]
        of_head = HeadShare(ranks)
        head = of_head.joined(build_head(spec, tensors, packed=True, cut=of_head, **place))
    return Decoder(
        spec if ranks is None else shared_spec(spec, ranks),
        embedding=build_embedding(spec, tensors, **place),
        sublayers=sublayers,
        head=head,
    )
