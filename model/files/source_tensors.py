"""Check that a source has the tensors that its config implies, and that EXL2 can store them."""

from collections.abc import Sequence
from typing import Literal

import torch

from exl2flow.core.errors import SourceModelError, TensorShapeError
from exl2flow.model.config.experts_spec import implying_keys
from exl2flow.model.config.foreign import quantized_form
from exl2flow.model.config.gptq_label import GptqLabel
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.config.sublayer_spec import ProjectionSpec
from exl2flow.model.files.canonical import CanonicalTensors
from exl2flow.model.files.exl2 import MAX_ROWS, is_quantized
from exl2flow.model.files.gptq import GptqMatrix, gptq_names, is_gptq, zero_offset
from exl2flow.model.files.group_table import ROW_MULTIPLE
from exl2flow.model.files.headers import check_layers, expected_here, unclaimed, unused
from exl2flow.model.files.weights import TensorFiles

SourceForm = Literal["floats", "fp8", "mxfp4", "gptq"]
MOST_NAMES = 8  # that a message lists
LEFT_OVER = "; the config ties the head, so remove this tensor if it is left over"


def check_storable(spec: ModelSpec) -> None:
    """Refuse matrices that cannot be packed.

    Raises:
        TensorShapeError: naming them.
    """
    projections = (*spec.projections, spec.head)
    bad = [p for p in projections if p.in_features % ROW_MULTIPLE or p.in_features > MAX_ROWS]
    if bad:
        names = ", ".join(f"`{p.key}` ({p.in_features})" for p in bad[:4])
        raise TensorShapeError(
            f"in-features must be a multiple of {ROW_MULTIPLE} and at most {MAX_ROWS}: {names}"
            f"{' …' if len(bad) > 4 else ''}; EXL2 cannot store this model"
        )


def has_all_layers(spec: ModelSpec) -> bool:
    """Return True if the files hold as many layers as the config says.

    Raises:
        SourceModelError: they do not.
    """
    check_layers(spec, CanonicalTensors(spec))
    return True


def check_tensors(spec: ModelSpec, *, lossy: bool = False) -> None:
    """Compare names and shapes in the files with the config.

    Args:
        spec: of the source.
        lossy: accept matrices in GPTQ form.

    Raises:
        SourceModelError: the model is quantized already.
        TensorShapeError: a line for each difference, and for each matrix that cannot be decoded.
    """
    tensors = CanonicalTensors(spec)
    in_gptq = gptq_projections(spec, tensors)
    _check_form(spec, tensors, in_gptq, lossy=lossy)
    lines = tensors.undecodable()
    readable = in_gptq if tensors.has_values else ()
    lines += [line for p in readable if (line := _gptq_problem(p, tensors, spec.gptq_label))]
    expected = expected_here(spec, tensors)
    if not lines:
        tensors.check_floating(name for name in expected if name in tensors)
    decoded = {f"{p.key}.weight" for p in in_gptq}
    for name, shape in expected.items():
        if name in decoded:
            continue
        if name not in tensors:
            keys = _implying_keys(name, spec)
            why = f", although {keys} imply it" if keys else ""
            lines.append(f"`{name}` {shape} is missing in `{spec.source_dir}`{why}")
        elif not _fits(tensors.shape(name), shape, spec):
            found = f"{tensors.origin(name)} has shape {tensors.shape(name)}"
            keys = _implying_keys(name, spec)
            line = f"{found}, {f'{keys} imply' if keys else 'the config implies'} {shape}"
            is_left = spec.tied_head and name == f"{spec.head.key}.weight"
            lines.append(line + LEFT_OVER * is_left)
    if lines:
        shown = lines[:8] + ([f"… and {len(lines) - 8} more"] if len(lines) > 8 else [])
        remedy = f"; get the model's files in `{spec.source_dir}` again, complete"
        raise TensorShapeError("\n".join(shown) + remedy)


def check_claimed(spec: ModelSpec) -> None:
    """Refuse tensors that the model would need if it has them, and that nothing here reads.

    Raises:
        SourceModelError: naming some.
    """
    names = unclaimed(spec, CanonicalTensors(spec))
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise SourceModelError(
            f"`{spec.source_dir}` holds tensors that `{spec.family.architecture}` does not have: "
            f"{shown}{more}; the output would be another model: correct `architectures` in its "
            "`config.json`, or remove them if they belong to no part of the model"
        )


def unused_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of tensors that the model does not need, and that its output leaves out."""
    return unused(spec, CanonicalTensors(spec))


def gptq_projections(spec: ModelSpec, tensors: TensorFiles) -> tuple[ProjectionSpec, ...]:
    """Return the projections that are stored in GPTQ form."""
    return tuple(p for p in (*spec.projections, spec.head) if is_gptq(p.key, tensors))


def source_form(spec: ModelSpec, tensors: TensorFiles) -> SourceForm:
    """Return the form in which a source stores its matrices, those with the fewest bits."""
    if gptq_projections(spec, tensors):
        return "gptq"
    if tensors.in_mxfp4:
        return "mxfp4"
    return "fp8" if tensors.in_fp8 else "floats"


def _check_form(
    spec: ModelSpec, tensors: TensorFiles, in_gptq: Sequence[ProjectionSpec], *, lossy: bool
) -> None:
    """Refuse what is quantized already, GPTQ only unless `lossy`."""
    in_exl2 = [p.key for p in (*spec.projections, spec.head) if is_quantized(p.key, tensors)]
    if in_exl2:
        raise SourceModelError(
            f"`{spec.source_dir}` is quantized already (`{in_exl2[0]}`, {len(in_exl2)} matrices "
            "in all, EXL2); convert the model that it was made from, or improve this one with "
            "`exl2flow refine`"
        )
    found = quantized_form(tensors.names, spec.quant_method)
    if found is not None:
        form, name = found
        raise SourceModelError(
            f"`{spec.source_dir}` is quantized already (`{name}`, {form}), and this form cannot "
            "be decoded; convert the model that it was made from"
        )
    known = {f"{p.key}.qweight" for p in in_gptq}
    others = [n for n in tensors.names if n.endswith(".qweight") and n not in known]
    if others:
        raise SourceModelError(
            f"`{spec.source_dir}` is quantized already, and `{others[0]}` (GPTQ) is not a single "
            "matrix of the text model, so it cannot be decoded; convert the model that it was made "
            "from"
        )
    if in_gptq and not lossy:
        raise SourceModelError(
            f"`{spec.source_dir}` is quantized already (`{in_gptq[0].key}`, {len(in_gptq)} "
            "matrices in all, GPTQ); convert the model that it was made from, or give "
            "`--lossy-source` to round its decoded values once more"
        )


def _gptq_problem(projection: ProjectionSpec, tensors: TensorFiles, label: GptqLabel) -> str | None:
    """Return why a matrix in GPTQ form cannot be decoded; reads all of it but the codes."""
    key = projection.key
    names = [name for name in (*gptq_names(key), f"{key}.bias") if name in tensors]
    try:
        outlines = {name: _outline(name, tensors) for name in names}
        offset = zero_offset(key, outlines, label)
        matrix = GptqMatrix.from_tensors(key, outlines, zero_offset=offset)
    except SourceModelError as error:
        return str(error)
    expected = (projection.in_features, projection.out_features)
    if matrix.shape != expected:
        return (
            f"`{key}` holds {matrix.shape} codes of 4 bits, the config implies {expected}; other "
            "widths cannot be decoded"
        )
    if not matrix.scales.isfinite().all():
        return f"`{key}.scales` holds NaN, infinity or what does not fit fp16"
    if matrix.bias is not None and not projection.has_bias and matrix.bias.any():
        return f"`{key}.bias` is not zero, the config implies none"
    return None


def _outline(name: str, tensors: TensorFiles) -> torch.Tensor:
    """Return a tensor of a GPTQ matrix, codes without content."""
    if name.endswith(".qweight"):
        return torch.empty(tensors.shape(name), dtype=tensors.dtype(name), device="meta")
    return tensors.read(name)


def _implying_keys(name: str, spec: ModelSpec) -> str:
    """Return the config keys that imply a tensor of experts or their router; "": it is another."""
    row = spec.family.experts
    if row is None or not name.startswith(spec.layers_key):
        return ""
    within = name.removeprefix(spec.layers_key).partition(".")[2]
    is_experts = within.startswith((f"{row.experts}.", f"{row.router}.")) or (
        within == row.correction
    )
    return implying_keys(row, spec.text_config) if is_experts else ""


def _fits(stored: tuple[int, ...], expected: tuple[int, ...], spec: ModelSpec) -> bool:
    """Embedding and head may have more rows than the vocabulary."""
    if len(stored) == len(expected) == 2 and expected[0] == spec.vocab_size:
        return stored[0] >= expected[0] and stored[1] == expected[1]
    return tuple(stored) == expected
