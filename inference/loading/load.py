"""Load a model folder for inference: EXL2, plain, or a mixture, decided by tensor names.

For a GPU, several threads read files and copy their contents to it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import overload

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.runtime.memory import available_memory, free_memory
from exl2flow.inference.loading.layer_split import Split, placed
from exl2flow.kernels import Threads, get_ops, resolve_device
from exl2flow.model import (
    CanonicalTensors,
    Decoder,
    Embedding,
    Head,
    ModelSpec,
    Placement,
    Sublayer,
    TensorFiles,
    Tokenizer,
    build_embedding,
    build_head,
    build_sublayer,
    check_layers,
    resolve,
)
from exl2flow.model.config.spec import expected_tensors
from exl2flow.model.memory.footprint import Footprint, exact_format
from exl2flow.model.tensor_parallel.ranks import Ranks
from exl2flow.model.tensor_parallel.shards import (
    check_ranks,
    share_head,
    share_sublayer,
    shared_spec,
)

SAMPLE_PROMPT_TOKENS = 512  # of a sample, to estimate memory
THREADS = {"cpu": 1, "cuda": 4}  # that load; decoding on a CPU uses all its cores anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run; `max_tokens` is the longest text that it reads.

    ranks: the processes that share it; None: it is whole.
    """

    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer
    max_tokens: int
    ranks: Ranks | None = None


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
        return self.read(index, self.device)

    def read(self, index: int, device: torch.device) -> Sublayer:
        """Return a sublayer on a device."""
        return build_sublayer(
            self.spec,
            self.spec.sublayers[index],
            self.tensors,
            dtype=self.dtype,
            device=device,
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
    placement: Placement | Split | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load a model folder.

    Args:
        model_dir: folder with config.json, a tokenizer and *.safetensors; index files are ignored.
        device: auto, cpu, cuda, or cuda:1 for one of several GPUs. The CPU computes in fp32, CUDA
            in fp16.
        max_tokens: longest text, prompt included; None: what the model was trained for.
        rope_scale: divides positions.
        rope_alpha: NTK factor, which stretches the base of the rotation.
        rope_yarn: YaRN factor, in place of the model's own way to stretch its context.
        streamed: read sublayers from disk in every forward pass instead of keeping them.
        placement: where each part goes, or how they are divided among GPUs; None: all on `device`.
        ranks: the processes that share the layers; all load the model and make the same calls, on a
            CPU. The spec of the result has the heads of this one only.
        progress: called with the number of parts loaded, in order, and their total: the embedding,
            the sublayers that are kept, the head.

    Raises:
        SourceModelError: the folder is not a runnable model.
        BackendUnavailable: the device is not available.
        ConfigError: an option is out of range, or the split names devices that are not there.
        OutOfDeviceMemory: the split has too little room.
    """
    folder = Path(model_dir)
    place = placement.head if isinstance(placement, Placement) else resolve_device(device)
    dtype = torch.float16 if place.type == "cuda" else torch.float32
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"`max_tokens` is {max_tokens}; it must be 1 or more")
    if placement is not None and streamed:
        raise ConfigError("a model that is read from disk in each pass needs one device: no split")
    if ranks is not None and (placement is not None or streamed or place.type != "cpu"):
        raise ConfigError('ranks share a model on CPUs, neither split nor streamed: `device="cpu"`')
    spec = resolve(folder).with_rope(scale=rope_scale, alpha=rope_alpha, yarn=rope_yarn)
    tensors = CanonicalTensors(spec)
    check_layers(spec, tensors)
    if ranks is not None:
        check_ranks(spec, ranks.count)
    packed = place.type == "cuda" and not streamed  # matrices used once are not laid out
    limit = max_tokens or spec.max_positions
    if spec.has_learned_positions and limit > spec.max_positions:
        raise ConfigError(
            f"`max_tokens` is {limit}; `{folder}` has learned positions, {spec.max_positions} of "
            "them: give no more"
        )
    if isinstance(placement, Split):
        placement = placed(placement, spec, tensors, device=place, context=limit)
    where = placement or Placement.on(place, spec.num_layers)
    sublayers = StreamedSublayers(spec, tensors, dtype=dtype, device=place, packed=packed)
    with ExitStack() as stack:
        threads = {d: stack.enter_context(Threads(THREADS[d.type], d)) for d in where.devices}
        for each in threads if packed else ():
            with torch.cuda.device(each):
                get_ops(each).prepare()
        tokenizer = threads[where.head].begin(partial(Tokenizer.load, folder))
        decoder = _decoder(
            threads, sublayers, where, ranks=ranks, streamed=streamed, progress=progress
        )
        return LoadedModel(
            spec=decoder.spec,
            decoder=decoder,
            tokenizer=tokenizer.result(),
            max_tokens=limit,
            ranks=ranks,
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
    threads: Mapping[torch.device, Threads],
    source: StreamedSublayers,
    where: Placement,
    *,
    ranks: Ranks | None,
    streamed: bool,
    progress: Callable[[int, int], None] | None,
) -> Decoder:
    """Load the parts of a model concurrently; raise the first error in part order."""
    spec, tensors, dtype = source.spec, source.tensors, source.dtype
    embedding = threads[where.embedding].begin(
        partial(build_embedding, spec, tensors, dtype=dtype, device=where.embedding)
    )
    is_shared = spec.tied_head and where.head == where.embedding
    head = threads[where.head].begin(  # second, because it takes long
        lambda: build_head(
            spec,
            tensors,
            dtype=dtype,
            device=where.head,
            packed=source.packed,
            embedding=embedding.result() if is_shared else None,
        )
    )

    def read(index: int, device: torch.device) -> Sublayer:
        sublayer = source.read(index, device)
        return sublayer if ranks is None else share_sublayer(spec, sublayer, ranks)

    kept = [
        threads[device].begin(partial(read, sublayer.index, device))
        for sublayer in (() if streamed else spec.sublayers)
        for device in (where.layers[sublayer.layer_index],)
    ]
    parts: list[Future[Embedding] | Future[Sublayer] | Future[Head]] = [embedding, *kept, head]
    for done, part in enumerate(parts, 1):
        part.result()
        if progress is not None:
            progress(done, len(parts))
    return Decoder(
        spec if ranks is None else shared_spec(spec, ranks),
        embedding=embedding.result(),
        sublayers=source if streamed else [sublayer.result() for sublayer in kept],
        head=head.result() if ranks is None else share_head(head.result(), ranks),
        placement=where if where.is_split else None,
    )
