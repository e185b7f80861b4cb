"""Checks that need only the safetensors headers."""

import re

from exl2flow.core.errors import MissingTensor, TensorShapeError
from exl2flow.core.store.files import Layout
from exl2flow.model.config.spec import ModelSpec, expected_tensors
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.model.files.fp8 import ACTIVATIONS, CACHE
from exl2flow.model.files.gptq import gptq_names
from exl2flow.model.files.weights import TensorFiles

TRAINING_HEADS = ("v_head.", "value_head.", "reward_head.", "score.")  # trl, RLHF, classifiers
NEEDLESS_ENDINGS = (  # buffers that can be computed, and what other programs leave behind
    ".inv_freq",
    ".cos_cached",
    ".sin_cached",
    ".masked_bias",
    ".position_ids",
    ".weight._scale",
    *(f".{suffix}" for suffix in (*ACTIVATIONS, *CACHE)),
)


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


def expected_here(spec: ModelSpec, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
    """Return name → shape of `expected_tensors`, and of a tied head that the files hold."""
    expected, head = expected_tensors(spec), f"{spec.head.key}.weight"
    if head in tensors:  # of its own although the config ties it
        expected[head] = (spec.head.out_features, spec.head.in_features)
    return expected


def check_tied_head(spec: ModelSpec, tensors: TensorFiles) -> None:
    """Refuse a head that was left over beside the embedding to which the config ties it.

    Raises:
        SourceModelError: its weights are integers.
        TensorShapeError: it has fewer rows than the vocabulary, or another width.
    """
    name, shape = f"{spec.head.key}.weight", (spec.head.out_features, spec.head.in_features)
    if not spec.tied_head or name not in tensors:
        return
    tensors.check_floating([name])
    stored = tensors.shape(name)
    if len(stored) != 2 or stored[0] < shape[0] or stored[1] != shape[1]:
        raise TensorShapeError(
            f"`{name}` has shape {stored}, `config.json` implies {shape}; the config ties the "
            "head, so remove this tensor if it is left over"
        )


def unclaimed(spec: ModelSpec, tensors: TensorFiles) -> tuple[str, ...]:
    """Return the names of tensors that nothing here reads, but the model may need."""
    return tuple(n for n in _unread(spec, tensors) if not _is_needless(n, spec, tensors))


def unused(spec: ModelSpec, tensors: TensorFiles) -> tuple[str, ...]:
    """Return the names of tensors that the model does not need, in the order of the files."""
    return tuple(n for n in _unread(spec, tensors) if _is_needless(n, spec, tensors))


def _unread(spec: ModelSpec, tensors: TensorFiles) -> list[str]:
    """Return the names of tensors that no part of the model reads and the family does not carry."""
    known = {*expected_here(spec, tensors)}
    for projection in (*spec.projections, spec.head):
        known.update(tensor_names(projection.key), gptq_names(projection.key))
        if f"{projection.key}.weight" not in tensors:
            known.add(f"{projection.key}.bias")  # zeros, where the config implies none
    carried = spec.family.carried
    return [n for n in tensors.names if n not in known and not n.startswith(carried)]


def _is_needless(name: str, spec: ModelSpec, tensors: TensorFiles) -> bool:
    """Tell whether a model computes the same without a tensor that nothing reads."""
    family = spec.family
    behind = range(spec.num_layers, spec.num_layers + spec.drafting_layers)
    drafting = tuple(f"{spec.layers_key}{layer}." for layer in behind)
    if name.startswith((*family.apart, *drafting, *TRAINING_HEADS)):
        return True
    if name.endswith((*family.left_out, *NEEDLESS_ENDINGS)):
        return True
    if name.endswith(".bias") and len(tensors.shape(name)) == 1:
        return not tensors.has_values or not tensors.read(name).any()
    is_inside = spec.layers_key in name or name.startswith((family.prefix, f"{spec.head.key}."))
    return not is_inside and family.text_type is None  # else it may be part of a tower


def carried(spec: ModelSpec, tensors: TensorFiles) -> Layout:
    """Return name → (dtype, shape) of what an EXL2 file keeps as it is stored: towers."""
    names = [name for name in tensors.names if name.startswith(spec.family.carried)]
    return {name: (tensors.dtype(name), tensors.shape(name)) for name in names}
