"""An EXL2 model and the model it was made from: check that they match, and combine the norms and
embedding of the one with the weights of the other, or with refined matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from exl2flow.core.errors import ConfigError, SourceModelError, TensorShapeError
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.store.source import WANTED
from exl2flow.model import (
    CanonicalTensors,
    ModelSpec,
    ProjectionSpec,
    QuantizedMatrix,
    TensorFiles,
    resolve,
)
from exl2flow.model.files.exl2 import is_quantized, padded_columns, tensor_names
from exl2flow.quant.walk.source_model import SourceModel

NAMED = 4  # most problems of one kind that a message lists


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """An EXL2 model to refine, and its reference."""

    folder: Path
    reference: Path
    spec: ModelSpec
    tensors: TensorFiles
    device: torch.device

    @classmethod
    def open(cls, config: RefinementConfig, device: str) -> "StoredModel":
        """Open both; reads headers only."""
        rope = config.rope
        spec = resolve(config.model, wanted="an EXL2 model")
        return cls(
            folder=config.model,
            reference=config.source,
            spec=spec.with_rope(scale=rope.scale, alpha=rope.alpha),
            tensors=TensorFiles(config.model),
            device=torch.device(device),
        )

    @property
    def projections(self) -> tuple[ProjectionSpec, ...]:
        """All projections of the decoder in order, then the head if stored in EXL2 form."""
        decoder = self.spec.projections
        return (*decoder, self.spec.head) if self.has_head else decoder

    @property
    def has_head(self) -> bool:
        """Tell whether the head is stored in EXL2 form, not dense or as the embedding."""
        return is_quantized(self.spec.head.key, self.tensors)

    def matrix(self, projection: ProjectionSpec) -> QuantizedMatrix:
        """Read a stored matrix, on the CPU.

        Raises:
            MissingTensor: one of its tensors is absent.
            TensorShapeError: its tensors contradict each other or the config, or are damaged.
        """
        key = projection.key
        names = [name for name in (*tensor_names(key), f"{key}.bias") if name in self.tensors]
        matrix = QuantizedMatrix.from_tensors(key, {n: self.tensors.read(n) for n in names})
        k, n = matrix.shape
        wanted = padded_columns(projection.out_features)
        if k != projection.in_features or n < wanted or (n > wanted and key != self.spec.head.key):
            raise TensorShapeError(
                f"`{key}` in `{self.folder}` has {k} rows and {n} columns, its `config.json` "
                f"implies {projection.in_features} and {wanted}; fetch the model again"
            )
        return matrix

    def as_stored(self) -> SourceModel:
        """Return the model as its files store it."""
        return self._model(self.tensors)

    def with_reference(self) -> SourceModel:
        """Return the model with the reference's weights instead of its EXL2 matrices."""
        weights = CanonicalTensors(resolve(self.reference))
        instead = {f"{p.key}.weight": (weights, f"{p.key}.weight") for p in self.projections}
        head = f"{self.spec.head.key}.weight"
        if head in instead and head not in weights:  # tied
            instead[head] = (weights, f"{self.spec.embedding_key}.weight")
        stored = [name for p in self.projections for name in tensor_names(p.key)]
        return self._model(self.tensors.overlaid(instead, without=stored))

    def with_matrices(self, folder: Path) -> SourceModel:
        """Return the model with the matrices in a folder's files instead of its own."""
        return self._model(self.replaced(folder))

    def replaced(self, folder: Path) -> TensorFiles:
        """Return the model's tensors with the matrices from a folder's files."""
        replacements = TensorFiles(folder)
        names = [name for p in self.projections for name in tensor_names(p.key)]
        return self.tensors.overlaid({name: (replacements, name) for name in names})

    def _model(self, tensors: TensorFiles) -> SourceModel:
        return SourceModel(spec=self.spec, tensors=tensors, device=self.device)


def check_refinement(config: RefinementConfig) -> None:
    """Check that the model is an EXL2 model and was made from a model like the reference.

    Reads all its matrices, to find a damaged one before hours of work.

    Raises:
        ConfigError: the output is the model, rounds or rows are too few, or vocabularies differ.
        SourceModelError: matrices are not stored in EXL2 form.
        MissingTensor: a tensor of the model is absent.
        TensorShapeError: matrices differ in shape, or the tensors of one contradict each other.
    """
    model = config.model.resolve()
    if config.out.resolve() == model:
        raise ConfigError("`--out` is the model that is refined; choose another folder")
    if not config.rounding.rounds:
        raise ConfigError("`--rounds` is 0, which leaves nothing to refine; give 1 or more")
    if config.calibration.rows < 2:
        raise ConfigError("`--rows` is 1, and one row must judge; give 2 or more")
    stored = StoredModel.open(config, "cpu")
    _check_quantized(stored)
    reference = resolve(config.source, wanted=WANTED)
    if stored.spec.vocab_size != reference.vocab_size:
        raise ConfigError(
            f"`{config.model}` has {stored.spec.vocab_size} tokens, `{config.source}` "
            f"{reference.vocab_size}; give the model that it was made from as `--reference`"
        )
    _check_alike(stored, reference)
    for projection in stored.projections:
        stored.matrix(projection)


def _check_quantized(stored: StoredModel) -> None:
    decoder = stored.spec.projections
    dense = [p.key for p in decoder if not is_quantized(p.key, stored.tensors)]
    if len(dense) == len(decoder):
        raise SourceModelError(
            f"`{stored.folder}` holds no EXL2 matrices; convert it with `exl2flow convert`"
        )
    if dense:
        raise SourceModelError(
            f"{_listed(dense)} of `{stored.folder}` are not stored in EXL2 form; fetch what is "
            "missing"
        )


def _check_alike(stored: StoredModel, reference: ModelSpec) -> None:
    """Compare the shapes of the decoders' matrices, as both configs imply them."""
    shapes, expected = (
        {p.key: (p.in_features, p.out_features) for p in spec.projections}
        for spec in (stored.spec, reference)
    )
    unlike = [key for key in {**shapes, **expected} if shapes.get(key) != expected.get(key)]
    if unlike:
        raise TensorShapeError(
            f"{_listed(unlike)} differ in shape between `{stored.folder}` and "
            f"`{reference.source_dir}`; give the model that it was made from as `--reference`"
        )


def _listed(keys: Sequence[str]) -> str:
    shown = ", ".join(f"`{key}`" for key in keys[:NAMED])
    return shown + (f" and {len(keys) - NAMED} more" if len(keys) > NAMED else "")
