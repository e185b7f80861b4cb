"""Checks that need only the safetensors headers."""

import re

from exl2flow.core.errors import MissingTensor
from exl2flow.core.store.files import Layout
from exl2flow.model.config.spec import ModelSpec, expected_tensors
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.model.files.gptq import gptq_names
from exl2flow.model.files.weights import TensorFiles


def check_layers(spec: ModelSpec, tensors: TensorFiles) -> None:
    """Compare the number of layers in the config with that in the files.

    Raises:
        MissingTensor: the config implies more.
    """
    layer = re.compile(re.escape(spec.layers_key) + r"(\d{1,9})\.")
    layers = {int(match[1]) for name in tensors.names if (match := layer.match(name))}
    count = 1 + max(layers, default=-1)
    if spec.num_layers > count:
        raise MissingTensor(
            f"`num_hidden_layers` in `{spec.source_dir / 'config.json'}` is {spec.num_layers}, the "
            f"files hold {count} layers; fetch what is missing, or correct the config"
        )


def unclaimed(spec: ModelSpec, tensors: TensorFiles) -> tuple[str, ...]:
    """Return the names of tensors that no part of the model reads, in the order of the files.

    Those that the family carries or leaves out are not among them, nor are layers that draft.
    """
    known = {*expected_tensors(spec), f"{spec.head.key}.weight"}  # perhaps a tied head's, too
    for projection in (*spec.projections, spec.head):
        known.update(tensor_names(projection.key), gptq_names(projection.key))
        if f"{projection.key}.weight" not in tensors:
            known.add(f"{projection.key}.bias")  # zeros, where the config implies none
    behind = range(spec.num_layers, spec.num_layers + spec.drafting_layers)
    drafting = tuple(f"{spec.layers_key}{layer}." for layer in behind)
    family = spec.family
    return tuple(
        name
        for name in tensors.names
        if name not in known
        and not name.startswith((*family.carried, *family.apart, *drafting))
        and not name.endswith(family.left_out)
    )


def carried(spec: ModelSpec, tensors: TensorFiles) -> Layout:
    """Return name → (dtype, shape) of what an EXL2 file keeps as it is stored: towers."""
    names = [name for name in tensors.names if name.startswith(spec.family.carried)]
    return {name: (tensors.dtype(name), tensors.shape(name)) for name in names}
