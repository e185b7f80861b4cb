"""A model's own block that drafts tokens (MTP) in a converted model: what becomes of its tensors.

The model's spec does not include the block: its matrices have a bit budget of their own.
"""

import torch

from exl2flow.core import words
from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.store.files import Layout, safetensors_header
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.config.mtp import TOKEN_COUNTS, MtpSpec, carrying_block, mtp_of, without_block
from exl2flow.model.files.exl2 import QuantParams, padded_columns, quantized_layout
from exl2flow.model.layers.mtp import block_in
from exl2flow.quant.allocate.layout import FORMAT_METADATA, Choice, plain_layout, tensor_bytes
from exl2flow.quant.walk.working_memory import stored_elements

EXAMPLE = QuantParams.uniform(4, 32)  # whose tensors stand for any others of a matrix


def quantized_block(config: RunOptions, spec: ModelSpec | None = None) -> MtpSpec | None:
    """Return the block that a run quantizes; None: it has none, or is kept or dropped.

    Args:
        config: the run.
        spec: of its source; None: read it. A source that cannot be read has none.
    """
    if config.block is None or config.block.block != "quantize":
        return None
    try:
        return block_in(spec or resolve(config.source))
    except Exl2FlowError:  # who reads the source says so
        return None


def stored_spec(config: RunOptions, spec: ModelSpec) -> ModelSpec:
    """Return the spec of a source that carries of its block what the output keeps as stored."""
    if config.block is None or mtp_of(spec) is None:
        return spec
    form = config.block.block
    if form == "quantize" and block_in(spec) is None:
        return spec  # as much of it as the family carries
    return carrying_block(spec) if form == "keep" else without_block(spec)


def block_options(config: RunOptions) -> dict[str, object]:
    """Return an entry for the fingerprint of what an output holds; empty without a block."""
    if config.block is None:
        return {}
    try:
        spec = resolve(config.source)
        has_block = block_in(spec) is not None
        if config.block.block != "quantize":  # of a part of one, too
            has_block = mtp_of(spec) is not None
    except Exl2FlowError:  # who reads the source says so
        return {}
    return {"mtp": config.block.block} if has_block else {}


def block_layout(found: MtpSpec, choice: Choice) -> Layout:
    """Return name → (dtype, shape) of a quantized block's tensors, plain ones first."""
    layout = {**plain_block_layout(found)}
    for p in found.projections:
        columns = padded_columns(p.out_features)
        layout |= quantized_layout(
            p.key, choice[p.key], p.in_features, columns, has_bias=p.has_bias
        )
    return layout


def plain_block_layout(found: MtpSpec) -> Layout:
    """Return name → (dtype, shape) of a block's tensors that are not quantized.

    One of them says how often ids occurred in the calibration rows: drafts leave out rare ones.
    """
    quantized = {p.key for p in found.projections}
    known = plain_layout(found.layer)
    layout = {
        name: known.get(name, (torch.float16, shape))
        for name, shape in found.tensors.items()
        if name.rpartition(".")[0] not in quantized
    }
    return {**layout, TOKEN_COUNTS: (torch.int32, (found.layer.vocab_size,))}


def block_bytes(config: RunOptions, spec: ModelSpec) -> int:
    """Return about how many bytes a quantized block takes in the output, 0 if there is none."""
    found = quantized_block(config, spec)
    if found is None or config.block is None:
        return 0
    header = len(
        safetensors_header(
            block_layout(found, dict.fromkeys((p.key for p in found.projections), EXAMPLE)),
            FORMAT_METADATA,
        )
    )
    plain = sum(map(tensor_bytes, plain_block_layout(found).values()))
    return header + plain + int(block_numel(found) * config.block.bpw / 8)


def block_numel(found: MtpSpec) -> int:
    """Return the weights of a block's matrices, padding included."""
    return sum(map(stored_elements, found.projections))


def block_in_words(config: RunOptions, spec: ModelSpec) -> str:
    """Return what a run makes of a source's block; empty if there is none."""
    if config.block is None or block_in(spec) is None:
        return ""
    match config.block.block:
        case "quantize":
            size = words.size(block_bytes(config, spec))
            return f"{config.block.bpw:g} bits per weight, counted apart, about {size}"
        case "keep":
            return "kept as it is"
        case "drop":
            return "left out"
