"""What the headers of a model's files tell about it, before any tensor is read."""

import re
from collections.abc import Iterator

from exl2flow.core.errors import MissingTensor
from exl2flow.model.exl2 import tensor_names
from exl2flow.model.gptq import gptq_names
from exl2flow.model.spec import ModelSpec, expected_tensors
from exl2flow.model.weights import TensorFiles, check_floating

DERIVED = ("rotary_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")  # once stored
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def check_layers(spec: ModelSpec, tensors: TensorFiles) -> None:
    """Compare the number of layers in the config with that in the files.

    Raises:
        MissingTensor: the config implies more.
    """
    found = {int(match[1]) for name in tensors.names if (match := _LAYER.match(name))}
    count = 1 + max(found, default=-1)
    if spec.num_layers > count:
        raise MissingTensor(
            f"`num_hidden_layers` in `{spec.source_dir / 'config.json'}` is {spec.num_layers}, the "
            f"files hold {count} layers; fetch what is missing, or correct the config"
        )


def check_dtypes(spec: ModelSpec, tensors: TensorFiles) -> None:
    """Check that a dense model's weights can be read as floating-point numbers.

    Raises:
        SourceModelError: a dtype is unknown or an integer.
    """
    check_floating(tensors, [name for name in expected_tensors(spec) if name in tensors])


def unclaimed(spec: ModelSpec, tensors: TensorFiles) -> tuple[str, ...]:
    """Return the names of tensors that no part of the model reads, in the order of the files.

    Buffers that older programs stored beside the weights are left out.
    """
    known = {*expected_tensors(spec), *_quantized(spec)}
    return tuple(n for n in tensors.names if n not in known and not n.endswith(DERIVED))


def _quantized(spec: ModelSpec) -> Iterator[str]:
    """Yield the names that a model's linears have in quantized forms, and a tied head's weight."""
    yield f"{spec.head.key}.weight"
    for projection in (*(p for s in spec.sublayers for p in s.projections), spec.head):
        yield from (*tensor_names(projection.key), *gptq_names(projection.key))
        yield f"{projection.key}.bias"  # zeros, where the config implies none
