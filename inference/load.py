"""Load a model folder for inference: EXL2, plain, or a mixture, decided by tensor names.

For a GPU, several threads read files and copy their contents to it.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import overload

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.memory import available_memory, free_memory
from exl2flow.kernels import Threads, get_ops, resolve_device
from exl2flow.model import (
    CanonicalTensors,
    Decoder,
    Embedding,
    Head,
    ModelSpec,
    Sublayer,
    TensorFiles,
    Tokenizer,
    build_embedding,
    build_head,
    build_sublayer,
    check_layers,
    resolve,
)
from exl2flow.model.footprint import Footprint, exact_format
from exl2flow.model.spec import expected_tensors

SAMPLE_PROMPT_TOKENS = 512  # of a sample, to estimate memory
THREADS = {"cpu": 1, "cuda": 4}  # that load; decoding on a CPU uses all its cores anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run; `max_tokens` is the longest text that it reads."""

    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer
    max_tokens: int


class StreamedSublayers(Sequence[Sublayer]):
    """Sublayers read from disk on each access: memory does not grow with depth."""

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
    model_dir: Path | str,
    *,
    device: str = "auto",
    max_tokens: int | None = None,
    rope_scale: float | None = None,
    rope_alpha: float | None = None,
    rope_yarn: float | None = None,
    streamed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load a model folder.

    Args:
        model_dir: folder with config.json, a tokenizer and *.safetensors; index files are ignored.
        device: auto, cpu or cuda. The CPU computes in fp32, CUDA in fp16.
        max_tokens: longest text, prompt included; None: what the model was trained for.
        rope_scale: divides positions.
        rope_alpha: NTK factor, which stretches the base of the rotation.
        rope_yarn: YaRN factor, in place of the model's own way to stretch its context.
        streamed: read sublayers from disk in every forward pass instead of keeping them.
        progress: called with the number of parts loaded, in order, and their total: the embedding,
            the sublayers that are kept, the head.

    Raises:
        SourceModelError: the folder is not a runnable model.
        BackendUnavailable: the device is not available.
    """
    folder = Path(model_dir)
    place = resolve_device(device)
    dtype = torch.float16 if place.type == "cuda" else torch.float32
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"`max_tokens` is {max_tokens}; it must be 1 or more")
    spec = resolve(folder).with_rope(scale=rope_scale, alpha=rope_alpha, yarn=rope_yarn)
    tensors = CanonicalTensors(spec)
    check_layers(spec, tensors)
    packed = place.type == "cuda" and not streamed  # matrices used once are not laid out
    sublayers = StreamedSublayers(spec, tensors, dtype=dtype, device=place, packed=packed)
    if packed:
        get_ops(place).prepare()
    with Threads(THREADS[place.type], place) as threads:
        tokenizer = threads.begin(partial(Tokenizer.load, folder))
        decoder = _decoder(threads, sublayers, streamed=streamed, progress=progress)
        return LoadedModel(
            spec=spec,
            decoder=decoder,
            tokenizer=tokenizer.result(),
            max_tokens=max_tokens or spec.max_positions,
        )


def load_for_sample(model_dir: Path, *, device: str, tokens: int) -> LoadedModel:
    """Load a model to generate once: whole if it fits, else each token rereads it from disk.

    Args:
        model_dir: as for `load_model`.
        device: auto, cpu or cuda.
        tokens: generated after a prompt of up to `SAMPLE_PROMPT_TOKENS` tokens.

    Raises:
        SourceModelError, BackendUnavailable: see `load_model`.
    """
    fits = _fits_in_memory(model_dir, resolve_device(device), tokens=SAMPLE_PROMPT_TOKENS + tokens)
    return load_model(model_dir, device=device, streamed=not fits)


def _fits_in_memory(model_dir: Path, place: torch.device, *, tokens: int) -> bool:
    """Return whether a device has room for a whole model and a sequence of `tokens` tokens.

    A GPU holds packed matrices as its kernels read them, a CPU decodes all matrices to fp32.
    """
    spec = resolve(model_dir)
    needs = Footprint.of(spec, context=tokens, cache_format=exact_format(place))
    if place.type == "cuda":
        tensors = CanonicalTensors(spec)
        stored = sum(tensors.nbytes(name) for name in tensors.names)
        return stored + needs.total - needs.device <= free_memory(place)
    room = available_memory()
    numel = sum(math.prod(shape) for shape in expected_tensors(spec).values())
    return room is None or (numel * torch.float32.itemsize + needs.cache) <= room


def _decoder(
    threads: Threads,
    source: StreamedSublayers,
    *,
    streamed: bool,
    progress: Callable[[int, int], None] | None,
) -> Decoder:
    """Load the parts of a model concurrently; raise the first error in part order."""
    spec, tensors, dtype, device = source.spec, source.tensors, source.dtype, source.device
    embedding = threads.begin(partial(build_embedding, spec, tensors, dtype=dtype, device=device))
    head = threads.begin(  # second, because it takes long
        lambda: build_head(
            spec, tensors, dtype=dtype, device=device, packed=source.packed,
            embedding=embedding.result() if spec.tied_head else None,
        )
    )  # fmt: skip
    count = 0 if streamed else len(source)
    kept = [threads.begin(partial(source.__getitem__, index)) for index in range(count)]
    parts: list[Future[Embedding] | Future[Sublayer] | Future[Head]] = [embedding, *kept, head]
    for done, part in enumerate(parts, 1):
        part.result()
        if progress is not None:
            progress(done, len(parts))
    return Decoder(
        spec,
        embedding=embedding.result(),
        sublayers=source if streamed else [sublayer.result() for sublayer in kept],
        head=head.result(),
    )
