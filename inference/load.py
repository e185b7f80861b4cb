"""Load a model folder for inference: EXL2, plain, or a mixture; tensor names decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch

from exl2flow.kernels import resolve_device
from exl2flow.model import (
    Decoder,
    ModelSpec,
    Sublayer,
    TensorFiles,
    Tokenizer,
    build_embedding,
    build_head,
    build_sublayer,
    resolve,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run."""

    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer


class StreamedSublayers(Sequence[Sublayer]):
    """Sublayers read from disk whenever they are asked for: memory does not grow with depth."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: TensorFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool = False,
    ) -> None:
        self.spec = spec
        self.tensors = tensors
        self.dtype = dtype
        self.device = device
        self.packed = packed

    def __len__(self) -> int:
        return len(self.spec.sublayers)

    @overload
    def __getitem__(self, index: int) -> Sublayer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sublayer]: ...
    def __getitem__(self, index: int | slice) -> Sublayer | Sequence[Sublayer]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return build_sublayer(
            self.spec,
            self.spec.sublayers[index],
            self.tensors,
            dtype=self.dtype,
            device=self.device,
            packed=self.packed,
        )


def load_model(
    model_dir: Path | str, *, device: str = "auto", streamed: bool = False
) -> LoadedModel:
    """Load a model folder.

    Args:
        model_dir: folder with config.json, a tokenizer and *.safetensors; index files are ignored.
        device: auto, cpu or cuda. fp32 is computed on the CPU, fp16 on CUDA.
        streamed: read sublayers from disk in every forward pass instead of keeping them.

    Raises:
        SourceModelError: the folder is not a model that can run.
        BackendUnavailable: there is no such device.
    """
    folder = Path(model_dir)
    place = resolve_device(device)
    dtype = torch.float16 if place.type == "cuda" else torch.float32
    spec = resolve(folder)
    tensors = TensorFiles(folder)
    packed = place.type == "cuda" and not streamed  # what is used once is not laid out
    sublayers: Sequence[Sublayer] = StreamedSublayers(
        spec, tensors, dtype=dtype, device=place, packed=packed
    )
    embedding = build_embedding(spec, tensors, dtype=dtype, device=place)
    decoder = Decoder(
        spec,
        embedding=embedding,
        sublayers=sublayers if streamed else list(sublayers),
        head=build_head(
            spec, tensors, dtype=dtype, device=place, embedding=embedding, packed=packed
        ),
    )
    return LoadedModel(spec=spec, decoder=decoder, tokenizer=Tokenizer.load(folder))
