"""Whether a source has the tensors that its config implies, and whether EXL2 can store them."""

from exl2flow.core.errors import SourceModelError, TensorShapeError
from exl2flow.model.canonical import CanonicalTensors
from exl2flow.model.exl2 import MAX_ROWS
from exl2flow.model.group_table import ROW_MULTIPLE
from exl2flow.model.headers import check_dtypes, check_layers, unclaimed
from exl2flow.model.linear import is_packed
from exl2flow.model.spec import ModelSpec, expected_tensors

MOST_NAMES = 8  # that a message lists


def check_storable(spec: ModelSpec) -> None:
    """Refuse matrices that cannot be packed.

    Raises:
        TensorShapeError: naming them.
    """
    projections = [p for s in spec.sublayers for p in s.projections] + [spec.head]
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


def check_tensors(spec: ModelSpec) -> None:
    """Compare names and shapes in the files with the config.

    Raises:
        SourceModelError: the model is quantized already.
        TensorShapeError: a line for each difference, or fp8 weight that cannot be decoded.
    """
    tensors = CanonicalTensors(spec)
    projections = [p.key for s in spec.sublayers for p in s.projections]
    stored = [key for key in projections if is_packed(key, tensors)]
    if stored:
        raise SourceModelError(
            f"`{spec.source_dir}` is quantized already (`{stored[0]}`, {len(stored)} matrices in "
            "all); convert the model that it was made from"
        )
    lines = tensors.undecodable()
    if not lines:
        check_dtypes(spec, tensors)
    for name, shape in expected_tensors(spec).items():
        if name not in tensors:
            lines.append(f"`{name}` {shape} is missing in `{spec.source_dir}`")
        elif not _fits(tensors.shape(name), shape, spec):
            lines.append(f"`{name}` has shape {tensors.shape(name)}, the config implies {shape}")
    if lines:
        shown = lines[:8] + ([f"… and {len(lines) - 8} more"] if len(lines) > 8 else [])
        raise TensorShapeError("\n".join(shown) + "; get the model's files again, complete")


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


def _fits(found: tuple[int, ...], expected: tuple[int, ...], spec: ModelSpec) -> bool:
    """Embedding and head may have more rows than the vocabulary."""
    if len(found) == len(expected) == 2 and expected[0] == spec.vocab_size:
        return found[0] >= expected[0] and found[1] == expected[1]
    return tuple(found) == expected
