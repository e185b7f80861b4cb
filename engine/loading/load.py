"""Load a model folder for inference: EXL2, plain, or a mixture, decided by tensor names.

For a GPU, several threads read files and copy their contents to it.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch

from exl2flow.core.errors import BackendUnavailable, ConfigError
from exl2flow.core.requests.request import check_integer
from exl2flow.engine.loading.layer_split import Split, split_model
from exl2flow.engine.loading.team import ModelTeam, places
from exl2flow.kernels import Threads, get_ops, resolve_device
from exl2flow.model import (
    CanonicalTensors,
    Decoder,
    Embedding,
    Head,
    ModelSpec,
    Placement,
    Sublayer,
    SublayerSpec,
    Tokenizer,
    build_embedding,
    build_head,
    check_layers,
    check_tied_head,
    resolve,
)
from exl2flow.model.layers.stream import StreamedSublayers
from exl2flow.model.memory.host_embedding import host_bytes
from exl2flow.model.tensor_parallel.ranks import Ranks
from exl2flow.model.tensor_parallel.shards import (
    HeadShare,
    check_ranks,
    join_sublayer,
    share_of,
    shared_spec,
)

log = logging.getLogger(__name__)
THREADS = {"cpu": 1, "cuda": 4}  # that load; decoding on a CPU uses all its cores anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run; `max_tokens` is the longest text that it reads.

    ranks: the processes that share it; None: it is whole. team: the followers of this process.
    """

    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer
    max_tokens: int
    ranks: Ranks | None = None
    team: ModelTeam | None = None

    def __repr__(self) -> str:
        """Return the model's folder, kind and place, not all of its parts."""
        spec, used = self.spec, self.decoder.placement.devices
        devices = ", ".join(map(str, used if self.team is None else self.team.devices))
        return (
            f"LoadedModel({str(spec.source_dir)!r}, {spec.family.architecture}, "
            f"{spec.num_layers} layers, {self.max_tokens} tokens, {devices})"
        )


def check_loaded(name: str, model: object) -> None:
    """Raise `ConfigError` if an argument is not a loaded model."""
    if isinstance(model, str | Path):
        raise ConfigError(f"`{name}` is a folder, `{model}`; give `load_model({str(model)!r})`")
    if not isinstance(model, LoadedModel):
        kind = type(model).__name__
        raise ConfigError(f"`{name}` is of type `{kind}`; give what `load_model` returns")


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
    tensor_parallel: int | str | Sequence[int] | None = None,
    embedding: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load a model folder.

    Args:
        model_dir: folder with config.json, a tokenizer and *.safetensors; index files are ignored.
        device: auto, cpu (fp32), cuda (fp16), or cuda:1 for one of several GPUs.
        max_tokens: longest text, prompt included; None: what the model was trained for.
        rope_scale: divides positions.
        rope_alpha: NTK factor, which stretches the base of the rotation.
        rope_yarn: YaRN factor, instead of the model's own way to stretch its context.
        streamed: read sublayers from disk in every forward pass instead of keeping them.
        placement: where each part goes, or how they are divided among GPUs; None: all on `device`.
        ranks: the processes that share the layers; all load the model and make the same calls. The
            spec of the result has the heads of this one only.
        tensor_parallel: GPUs that share each layer, by number, `all`, or their indexes; each but
            the first has a process, which this one starts and leads. None: this process alone.
        embedding: `gpu`: in the GPU's memory; `cpu`: in host memory, where the GPU reads its rows;
            `auto`: in host memory if it is large, and neither the head as well nor unpinnable.
        progress: called with numbers of loaded parts and of all: embedding, kept sublayers, head.

    Raises:
        SourceModelError: the folder is not a runnable model.
        BackendUnavailable: the device is not available, or no host memory for `embedding="cpu"`.
        ConfigError: an option is out of range, or devices are named that are not there.
        InferenceError: another rank is lost.
        OutOfDeviceMemory: there is too little room.
    """
    _check_kinds(model_dir, max_tokens, placement)
    folder, texts = Path(model_dir), _Texts(max_tokens, rope_scale, rope_alpha, rope_yarn)
    if tensor_parallel is not None:
        if ranks is not None or placement is not None or streamed:
            raise ConfigError("`tensor_parallel` goes without ranks, a split, and streaming")
        devices = places(tensor_parallel, device)
        if len(devices) > 1:
            return _load_led(folder, devices, texts, embedding, progress)
        device = str(devices[0])
    place = placement.head if isinstance(placement, Placement) else resolve_device(device)
    _check_places(place, placement, ranks, is_streamed=streamed)
    source, limit = _source(folder, place, texts, is_streamed=streamed)
    if ranks is not None:
        check_ranks(source.spec, ranks.count)
    whole = _placed(source, placement, place, embedding=embedding, context=limit)
    decoder, tokenizer = _load(source, whole, ranks, is_streamed=streamed, progress=progress)
    return LoadedModel(
        spec=decoder.spec, decoder=decoder, tokenizer=tokenizer, max_tokens=limit, ranks=ranks
    )


class _Texts(NamedTuple):
    """The longest text; see `load_model`."""

    max_tokens: int | None
    rope_scale: float | None
    rope_alpha: float | None
    rope_yarn: float | None


def _source(
    folder: Path, device: torch.device, texts: _Texts, *, is_streamed: bool
) -> tuple[StreamedSublayers, int]:
    """Return what reads a model's parts, and the longest text; nothing is read yet."""
    spec = resolve(folder).undivided()
    spec = spec.with_rope(scale=texts.rope_scale, alpha=texts.rope_alpha, yarn=texts.rope_yarn)
    limit, on_gpu = _checked_limit(texts.max_tokens, spec), device.type == "cuda"
    source = StreamedSublayers(
        spec=spec,
        tensors=CanonicalTensors(spec),
        dtype=torch.float16 if on_gpu else torch.float32,
        device=device,
        packed=on_gpu and not is_streamed,  # matrices used once are not repacked
    )
    check_layers(spec, source.tensors)
    check_tied_head(spec, source.tensors)
    return source, limit


def _load_led(
    folder: Path,
    devices: Sequence[torch.device],
    texts: _Texts,
    embedding: str,
    progress: Callable[[int, int], None] | None,
) -> LoadedModel:
    """Load a model that this process shares with others, which it starts."""
    check_ranks(resolve(folder).undivided(), len(devices))
    team = ModelTeam(devices)

    def note(done: int, total: int) -> None:
        team.check()
        if progress is not None:
            progress(done, total)

    try:
        ranks = team.join()
        options = {**texts._asdict(), "embedding": embedding}
        loaded = team.begin("load", str(folder.absolute()), options)
        model = load_model(folder, device=str(devices[0]), ranks=ranks, progress=note, **options)
        loaded()
    except BaseException:
        team.close()
        raise
    return replace(model, team=team)


def _check_kinds(model_dir: object, max_tokens: object, placement: object) -> None:
    """Raise `ConfigError` for an argument of a type that cannot be used."""
    if not isinstance(model_dir, str | PathLike):
        raise ConfigError(f"`model_dir` is {model_dir!r}; give the path of a model's folder")
    if max_tokens is not None:
        check_integer("max_tokens", max_tokens)
    if placement is not None and not isinstance(placement, Placement | Split):
        raise ConfigError(f"`placement` is {placement!r}; give `Split.parse({str(placement)!r})`")


def _check_places(
    device: torch.device,
    placement: Placement | Split | None,
    ranks: Ranks | None,
    *,
    is_streamed: bool,
) -> None:
    """Raise `ConfigError` if a model cannot be read from disk, divided and shared as given."""
    if placement is not None and is_streamed:
        raise ConfigError("a model that is read from disk in each pass needs one device: no split")
    if ranks is not None and (placement is not None or is_streamed):
        raise ConfigError("ranks share a model that is neither split nor streamed")


def _checked_limit(max_tokens: int | None, spec: ModelSpec) -> int:
    """Return the longest text; raise `ConfigError` if the model cannot read it."""
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"`max_tokens` is {max_tokens}; it must be 1 or more")
    limit = max_tokens or spec.max_positions
    if spec.family.learned_positions and limit > spec.max_positions:
        raise ConfigError(
            f"`max_tokens` is {limit}; `{spec.source_dir}` has learned positions, "
            f"{spec.max_positions} of them: give no more"
        )
    return limit


class _Placed(NamedTuple):
    """Where parts go; in_host: the embedding stays in host memory, `or_device` if it cannot."""

    placement: Placement
    in_host: bool
    or_device: bool


def _placed(
    source: StreamedSublayers,
    placement: Placement | Split | None,
    device: torch.device,
    *,
    embedding: str,
    context: int,
) -> _Placed:
    """Return where parts go, as `load_model` is asked; context: the longest text."""
    spec, tensors = source.spec, source.tensors
    in_host = host_bytes(spec, tensors.names, wanted=embedding, device=device) > 0
    if isinstance(placement, Split):
        placement = split_model(
            placement, spec, tensors, device=device, context=context, in_host=in_host
        )
    placement = placement or Placement.on(device, spec.num_layers)
    return _Placed(placement, in_host, or_device=embedding == "auto")


def _read_embedding(source: StreamedSublayers, place: _Placed) -> Embedding:
    device = place.placement.embedding
    read = partial(build_embedding, source.spec, source.tensors, dtype=source.dtype, device=device)
    try:
        return read(in_host=place.in_host)
    except BackendUnavailable as error:
        if not place.or_device:
            raise
        log.warning("the embedding takes memory of the GPU: %s", error)
    return read()


def _load(
    source: StreamedSublayers,
    place: _Placed,
    ranks: Ranks | None,
    *,
    is_streamed: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[Decoder, Tokenizer]:
    """Load a model's parts and its tokenizer concurrently; raise the first error in part order."""
    spec, tensors, dtype, placement = source.spec, source.tensors, source.dtype, place.placement
    of_head = None if ranks is None else HeadShare(ranks)

    def read_head(embedding: Future[Embedding]) -> Head:
        is_shared = spec.tied_head and placement.head == placement.embedding
        return build_head(
            spec,
            tensors,
            dtype=dtype,
            device=placement.head,
            packed=source.packed,
            embedding=embedding.result() if is_shared else None,
            cut=of_head or (lambda part: part),
        )

    def read(sublayer: SublayerSpec, device: torch.device) -> Sublayer:
        if ranks is None:
            return source.read(sublayer, device)
        share = share_of(spec, sublayer, tensors, ranks)
        return join_sublayer(spec, source.read(share.sublayer, device, share), ranks)

    with ExitStack() as stack:
        devices = placement.devices
        threads = {d: stack.enter_context(Threads(THREADS[d.type], d)) for d in devices}
        for device in devices if source.packed else ():
            with torch.cuda.device(device):
                get_ops(device).prepare()
        tokenizer = threads[placement.head].begin(partial(Tokenizer.load, spec.source_dir))
        embedding = threads[placement.embedding].begin(partial(_read_embedding, source, place))
        head = threads[placement.head].begin(partial(read_head, embedding))  # early: it takes long
        sublayers = [
            threads[device].begin(partial(read, sublayer, device))
            for sublayer in (() if is_streamed else spec.sublayers)
            for device in (placement.layers[sublayer.layer_index],)
        ]
        parts: list[Future[Embedding] | Future[Sublayer] | Future[Head]]
        parts = [embedding, *sublayers, head]
        for done, part in enumerate(parts, 1):
            part.result()
            if progress is not None:
                progress(done, len(parts))
    torch.cuda.empty_cache()  # of what was read and laid out
    decoder = Decoder(
        spec if ranks is None else shared_spec(spec, ranks),
        embedding=embedding.result(),
        sublayers=source if is_streamed else [sublayer.result() for sublayer in sublayers],
        head=head.result() if of_head is None else of_head.joined(head.result()),
        placement=placement if placement.is_split else None,
    )
    return decoder, tokenizer.result()
