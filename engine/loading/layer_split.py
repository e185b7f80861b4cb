"""Layer split: which GPU takes which layers, computed from sizes before anything is loaded.

Parts are dealt out in order, each to the device of the one before it if there is room, else to the
next one. What a device needs never falls when it gets more parts, so this uses the fewest devices,
and more room never moves a layer to a later one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypedDict, Unpack

import torch

from exl2flow.core.errors import ConfigError, OutOfDeviceMemory
from exl2flow.core.runtime.memory import free_memory
from exl2flow.core.words import size
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import CanonicalTensors, ModelSpec, Placement, TensorFiles, resolve
from exl2flow.model.layers.linear import is_packed
from exl2flow.model.memory.footprint import DeviceNeed, Texts, exact_format
from exl2flow.model.memory.footprint import pages as page_count
from exl2flow.model.memory.host_embedding import is_head
from exl2flow.model.memory.plan import held_bytes

GB = 10**9
EXAMPLES = {
    "gpu-split": "`20,24` in GB, nor `auto`",
    "reserve": "`200000000,0` in bytes",
    "devices": "`0,2`",
}
# bytes kept free on each device: its kernels (150 MB measured), workspaces, recordings
RESERVE = (256 << 20,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a model's parts in memory, before growth in GPU layout.

    shared: of `head`, what it takes over from the embedding where both are on one device; packed:
    whether matrices are quantized; draft: another model that lies with the head.
    """

    embedding: int
    layers: tuple[int, ...]
    head: int
    shared: int = 0
    packed: bool = True
    draft: "tuple[ModelSpec, Sizes] | None" = None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        tensors: TensorFiles,
        dtype: torch.dtype,
        draft: "tuple[ModelSpec, Sizes] | None" = None,
    ) -> Self:
        """Read sizes from the headers of files; floating-point numbers are kept in `dtype`."""
        layers, apart = [0] * spec.num_layers, spec.family.learned_positions
        embedding = head = 0
        inside = re.compile(rf"{re.escape(spec.layers_key)}(\d+)\.")
        for name in tensors.names:
            nbytes = held_bytes(tensors, name, dtype)
            if (layer := inside.match(name)) and int(layer[1]) < spec.num_layers:
                layers[int(layer[1])] += nbytes
            elif name.startswith((f"{spec.embedding_key}.", f"{apart}.")):
                embedding += nbytes
            elif name.startswith((f"{spec.head.key}.", f"{spec.final_norm.key}.")):
                head += nbytes
        shared = embedding if is_head(spec, tensors.names) else 0
        return cls(
            embedding=embedding,
            layers=tuple(layers),
            head=head + shared,
            shared=shared,
            packed=any(is_packed(p.key, tensors.names) for p in spec.projections),
            draft=draft,
        )


class SplitOptions(Protocol):
    """Options of commands and runs, as `Split.parse` reads them."""

    @property
    def gpu_split(self) -> str | None:
        """Sizes, or `auto`."""

    @property
    def reserve(self) -> str | None:
        """The bytes that `auto` leaves free."""

    @property
    def devices(self) -> str | None:
        """Which GPUs."""


class Room(TypedDict, total=False):
    """What there must be room for; see `Split`."""

    tokens: int | None
    cache: str | None
    slots: int
    draft: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Options of a layer split.

    sizes: bytes per device, 0 to skip one; None: what is free less `reserve`, bytes of the first
    devices, the last one for all others; devices: indexes of GPUs; None: all, or as many as there
    are sizes. There must be room for a cache of `tokens` tokens (None: of the longest text, or as
    many as fit) in the format `cache` (None: unquantized), for the logits of `slots` texts, and for
    a `draft` model with as large a cache.
    """

    sizes: tuple[int, ...] | None = None
    reserve: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None
    tokens: int | None = None
    cache: str | None = None
    slots: int = 16
    draft: Path | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` if options contradict each other."""
        devices = self.devices
        if self.sizes is not None and self.reserve is not None:
            raise ConfigError(
                "`--reserve` goes with `--gpu-split auto`; sizes reserve by themselves"
            )
        if self.sizes is not None and not any(self.sizes):
            raise ConfigError("`--gpu-split` skips every device; give at least one a size")
        if devices is not None and len({*devices}) < len(devices):
            raise ConfigError(f"`--devices {','.join(map(str, devices))}` names a device twice")
        if devices is not None and self.sizes is not None and len(self.sizes) != len(devices):
            raise ConfigError(
                f"`--gpu-split` has {len(self.sizes)} sizes, `--devices` {len(devices)} devices; "
                "give as many, 0 to skip one"
            )

    @classmethod
    def parse(
        cls,
        gpu_split: str | None,
        *,
        reserve: str | None = None,
        devices: str | None = None,
        **room: Unpack[Room],
    ) -> Self | None:
        """Parse options such as `20,24` or `auto`; `200000000,0`; `0,2`. None: no split.

        The others are those of `Split`.

        Raises:
            ConfigError: one of them is not such a list, or they contradict each other.
        """
        if gpu_split is None and reserve is None and devices is None:
            return None
        is_auto = gpu_split is None or gpu_split == "auto"
        return cls(
            sizes=None
            if is_auto
            else numbers("gpu-split", gpu_split, lambda word: int(float(word) * GB)),
            reserve=numbers("reserve", reserve, int),
            devices=numbers("devices", devices, int),
            **room,
        )

    @classmethod
    def of(cls, options: SplitOptions, **room: Unpack[Room]) -> Self | None:
        """Return what options say, None without any; errors and all else as in `parse`."""
        return cls.parse(
            options.gpu_split, reserve=options.reserve, devices=options.devices, **room
        )

    def rooms(self, free: Sequence[Callable[[], int]]) -> dict[torch.device, int]:
        """Return the bytes of each CUDA device that a model may take, in order.

        free: returns the free bytes of each visible device; called for used ones only, because
        CUDA takes memory of a device for that.

        Raises:
            ConfigError: a device is not there.
        """
        visible, sizes = range(len(free)), len(self.sizes or self.reserve or ())
        chosen = self.devices if self.devices is not None else visible[: len(self.sizes or free)]
        absent = [index for index in chosen if index not in visible]
        if absent or sizes > len(chosen) or not chosen:
            named = f"`--devices` names {absent[0]}" if absent else f"{sizes} sizes are given"
            seen = ", ".join(map(str, visible)) or "none"
            raise ConfigError(f"{named}, but the GPUs that torch sees are {seen}")
        rooms = dict[torch.device, int]()
        for order, index in enumerate(chosen):
            if self.sizes is None:
                reserve = self.reserve or RESERVE
                room = free[index]() - reserve[min(order, len(reserve) - 1)]
            elif not self.sizes[order]:
                continue
            else:
                room = min(self.sizes[order], free[index]())
            rooms[torch.device("cuda", index)] = max(0, room)
        return rooms


@dataclass(frozen=True, slots=True)
class Load:
    """Parts of a model that lie on one device; `+` adds a part.

    stored: their bytes in files; share: memory to run them; shared: see `Sizes`.
    """

    stored: int = 0
    share: DeviceNeed = field(default_factory=DeviceNeed)
    shared: int = 0
    has_embedding: bool = False
    name: str = ""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.stored + self.share.total

    def __add__(self, part: "Load") -> "Load":
        """Return this load with a part."""
        shared = part.shared if self.has_embedding else 0
        return Load(
            stored=self.stored + part.stored - shared,
            share=self.share + part.share,
            has_embedding=self.has_embedding or part.has_embedding,
        )


def place(
    spec: ModelSpec, sizes: Sizes, rooms: Mapping[torch.device, int], texts: Texts
) -> Placement:
    """Deal the parts of a model out to devices.

    rooms: bytes that it may take on each, in the order in which they are filled.

    Raises:
        OutOfDeviceMemory: it does not fit; the message says what each device takes and has, and
            what would fit.
    """
    parts = parts_of(spec, sizes, texts)
    devices, loads = _dealt(parts, rooms)
    if len(devices) < len(parts):
        raise OutOfDeviceMemory(_refusal(spec, sizes, rooms, texts, parts[len(devices) :], loads))
    return Placement(embedding=devices[0], layers=tuple(devices[1:-1]), head=devices[-1])


def check_split(options: SplitOptions, device: torch.device) -> None:
    """Check, before any work, that the GPUs exist among which models are split.

    Raises:
        ConfigError: options are malformed, the device is not a GPU, or one is not there.
    """
    split = Split.of(options, tokens=None, slots=1)
    if split is not None:
        _check_gpu(device)
        split.rooms([lambda: 0] * torch.cuda.device_count())


def split_model(
    split: Split,
    spec: ModelSpec,
    tensors: TensorFiles,
    *,
    device: torch.device,
    context: int,
    in_host: bool = False,
) -> Placement:
    """Deal a model in files out to the GPUs that torch sees.

    device: the chosen one; it must be CUDA. context: the longest text. in_host: the embedding takes
    no memory of a GPU.

    Raises:
        ConfigError: the device is not a GPU, or one is not there.
        OutOfDeviceMemory: the model does not fit.
    """
    _check_gpu(device)
    visible = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    rooms = split.rooms([partial(free_memory, device) for device in visible])
    draft = None
    if split.draft is not None:
        other = resolve(split.draft).undivided()
        draft = other, Sizes.of(other, CanonicalTensors(other), torch.float16)
    sizes = Sizes.of(spec, tensors, torch.float16, draft)
    if in_host:
        sizes = replace(sizes, embedding=0)
    texts = Texts(
        context=min(context, split.tokens or context),
        pages=page_count(split.tokens or context),
        cache_format=split.cache or exact_format(device),
        sequences=split.slots,
    )
    if split.tokens is None:
        texts = _shortened(texts, largest(spec, sizes, rooms, texts) or texts.pages)
    return place(spec, sizes, rooms, texts)


def _check_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"a model is split among GPUs, and the device is `{device}`; leave out `--gpu-split`, "
            "`--reserve` and `--devices`"
        )


def parts_of(spec: ModelSpec, sizes: Sizes, texts: Texts) -> list[Load]:
    """Return embedding, layers, and head with draft; each lies on one device as a whole."""
    embedding = DeviceNeed.of_embedding(spec, texts)
    head = DeviceNeed.of_head(spec, texts, packed=sizes.packed)
    draft = sum(parts_of(*sizes.draft, texts), Load()) if sizes.draft else Load()
    layers = [
        Load(
            stored,
            DeviceNeed.of_layer(spec, index, texts, packed=sizes.packed),
            name=f"layer {index}",
        )
        for index, stored in enumerate(sizes.layers)
    ]
    return [
        Load(sizes.embedding, embedding, has_embedding=True, name="the embedding"),
        *layers,
        Load(sizes.head + draft.stored, head + draft.share, shared=sizes.shared, name="the head"),
    ]


def _dealt(
    parts: Sequence[Load], rooms: Mapping[torch.device, int]
) -> tuple[list[torch.device], dict[torch.device, Load]]:
    """Return the devices of the first parts, as many as there is room for, and all loads."""
    devices, loads = list[torch.device](), {device: Load() for device in rooms}
    for device, room in rooms.items():
        for part in parts[len(devices) :]:
            load = loads[device] + part
            if load.total > room:
                break
            loads[device] = load
            devices.append(device)
    return devices, loads


def _refusal(
    spec: ModelSpec,
    sizes: Sizes,
    rooms: Mapping[torch.device, int],
    texts: Texts,
    left: Sequence[Load],
    loads: Mapping[torch.device, Load],
) -> str:
    """Return the message for a model whose parts `left` do not fit, with a remedy."""
    rest = sum(left, Load())
    names = left[0].name if len(left) == 1 else f"{left[0].name} to {left[-1].name}"
    taken = ", ".join(
        f"`{device}` takes {size(loads[device].total)} of {size(room)}"
        for device, room in rooms.items()
    )
    what = f"`{spec.source_dir}` with {texts.pages * PAGE_TOKENS:,} tokens of {texts.cache_format}"
    least = sum(parts_of(spec, sizes, _shortened(texts, 1)), Load())
    remedy = (
        f"with the smallest cache it takes {size(least.total)} on one device; give more devices or "
        "more room, or a model of fewer bits"
    )
    if tokens := PAGE_TOKENS * largest(spec, sizes, rooms, texts):
        remedy = f"a cache of {tokens:,} tokens fits: give `--tokens {tokens}`"
    return (
        f"{what} does not fit: {taken or 'no device has room'}, and {names} "
        f"{'needs' if len(left) == 1 else 'need'} {size(rest.total)} more; {remedy}"
    )


def largest(spec: ModelSpec, sizes: Sizes, rooms: Mapping[torch.device, int], texts: Texts) -> int:
    """Return the most pages of a cache, those of `texts` at most, with which a model fits, or 0."""

    def fits(pages: int) -> bool:
        parts = parts_of(spec, sizes, _shortened(texts, pages))
        return len(_dealt(parts, rooms)[0]) == len(parts)

    low, high = 0, texts.pages + 1  # the first one fits, the last one does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shortened(texts: Texts, pages: int) -> Texts:
    return replace(texts, pages=pages, context=min(texts.context, pages * PAGE_TOKENS))


def numbers(name: str, text: str | None, read: Callable[[str], int]) -> tuple[int, ...] | None:
    """Return the numbers of a comma-separated list."""
    if text is None:
        return None
    try:
        values = tuple(read(word) for word in text.split(","))
        if min(values) < 0:
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigError(f"`--{name} {text}` is not a list such as {EXAMPLES[name]}") from None
    return values
