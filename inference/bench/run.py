"""Time a model within a time limit; shorten or omit parts that are too slow for the machine.

A short prompt gives the machine's pace, and each result refines the forecast for the next one.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypedDict, Unpack

import torch

from exl2flow.core.errors import OutOfDeviceMemory
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.cache.paged import cache_format, fitting, whole_pages
from exl2flow.engine.loading.layer_split import Split
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.inference.bench.batch import DecodeBatch
from exl2flow.inference.bench.decode_plan import decode_plans
from exl2flow.inference.bench.speed import Memory, Speed, Timing, all_versions, device_name
from exl2flow.inference.bench.stopwatch import copy_rate, seconds
from exl2flow.kernels import get_ops, resolve_device
from exl2flow.model import CanonicalTensors, Decoder
from exl2flow.model.layers.linear import DenseLinear
from exl2flow.model.memory.footprint import exact_format

PROMPTS = (512, 2048)  # tokens
PROBE = 32  # tokens of the first prompt, and the fewest of any other
WHOLE, LEAST = 50.0, 10.0  # seconds: loading and timing, timing at least
NO_ROOM = "no room in memory"
LONGEST = 1.0  # seconds of the repeats of one piece of work
Report = Callable[[str], None]


class Loading(TypedDict, total=False):
    """How a model is loaded; see `load_model`."""

    placement: Split | None
    tensor_parallel: int | str | Sequence[int] | None
    embedding: str


def bench(
    folder: Path,
    *,
    device: str = "auto",
    cache: str | None = None,
    context: int = PROMPTS[0],
    rows: Sequence[int] = (1, 4, 16),
    report: Report = lambda text: None,
    **loading: Unpack[Loading],
) -> Speed:
    """Load a model and time it.

    Args:
        folder: the model.
        device: auto, cpu or cuda.
        cache: its cache's format; None: fp16 on a GPU, fp32 on a CPU.
        context: tokens before the decoded ones, at most.
        rows: numbers of sequences that are decoded at once.
        report: called with what is done next.
        loading: more for `load_model`; memory is that of the first GPU.

    Raises:
        SourceModelError: the folder is not a runnable model.
        BackendUnavailable: the device is not available.
        ConfigError: no such cache format.
    """
    place = resolve_device(device)
    form = cache or exact_format(place)
    cache_format(form, place)
    report("loading")
    start = time.perf_counter()
    model = load_model(folder, device=device, **loading)
    devices = model.decoder.placement.devices  # of this process
    for used in devices if place.type == "cuda" else ():
        torch.cuda.synchronize(used)
    taken = time.perf_counter() - start
    tensors = CanonicalTensors(model.spec)
    session = BenchSession(model, cache=form, seconds=max(LEAST, WHOLE - taken), report=report)
    with torch.cuda.device(devices[-1]) if place.type == "cuda" else nullcontext():  # ends last
        session.run(context, rows)
    cards = [get_ops(used).card(used) for used in devices]
    steps = [timing.rows for timing in session.timings if timing.work == "decode"]
    memory = session.memory()  # the copy needs some of its own
    return Speed(
        model=str(folder),
        device=", ".join(map(device_name, devices if model.team is None else model.team.devices)),
        versions=all_versions(place),
        load_seconds=taken,
        file_bytes=sum(tensors.nbytes(name) for name in tensors.names),
        cache=session.cache,
        timings=tuple(session.timings),
        memory=memory,
        copy_rate=copy_rate() if place.type == "cuda" else None,
        cards=tuple(card for card in cards if card is not None),
        plans=decode_plans(model.decoder, steps) if session.on_gpu and not model.ranks else (),
        omitted=tuple(session.omitted),
    )


class BenchSession:
    """Measures one model until its time is over.

    pace: seconds per token of a prompt, an upper bound.
    """

    def __init__(self, model: LoadedModel, *, cache: str, seconds: float, report: Report) -> None:
        self.model, self.cache, self.report = model, cache, report
        self.device = model.decoder.placement.head
        self._placements = [(model.spec, model.decoder.placement)]
        self.timings: list[Timing] = []
        self.omitted: list[str] = []
        self.pace = 0.0
        self.on_gpu = self.device.type == "cuda"
        self._devices = model.decoder.placement.devices if self.on_gpu else ()
        self._weights = sum(map(torch.cuda.memory_allocated, self._devices))
        self._largest_cache = 0
        self._end = time.perf_counter() + seconds

    @torch.inference_mode()
    def run(self, context: int, rows: Sequence[int]) -> None:
        """Time prompts, then steps of each number of rows."""
        self._probe()
        longest = max(1, self.model.max_tokens - 1)
        lengths = sorted({min(tokens, longest) for tokens in PROMPTS})
        left = len(lengths) + len(rows)
        for tokens in lengths:
            self._prompt(tokens, self._share(left))
            left -= 1
        if context > longest:
            self.omitted.append(f"a context of {context} tokens: more than the model has")
        for count in rows:
            self._decode(count, min(context, longest), self._share(left))
            left -= 1

    def memory(self) -> Memory | None:
        """Return the use of a GPU's memory so far."""
        if not self.on_gpu:
            return None
        peak = sum(map(torch.cuda.max_memory_allocated, self._devices))
        return Memory(weights=self._weights, cache=self._largest_cache, peak=peak)

    def _share(self, parts: int) -> float:
        """Return the seconds for one of the parts that are left."""
        return max(0.0, self._end - time.perf_counter()) / parts

    def _time(self, work: Callable[[], object], share: float) -> float:
        warm_up = 2 if self.on_gpu else 0  # a CPU has nothing to compile
        return seconds(work, warm_up=warm_up, limit=min(LONGEST, share))

    def _batch(self, size: int, context: int) -> DecodeBatch:
        batch = DecodeBatch(self.model, size=size, context=context, cache=self.cache)
        self._largest_cache = max(self._largest_cache, batch.cache.nbytes)
        return batch

    def _probe(self) -> None:
        self.report("compiling kernels" if self.on_gpu else "a short prompt")
        tokens = min(PROBE, self.model.max_tokens - 1)
        self.pace = self._time(self._batch(1, tokens).read, 0.0) / tokens

    def _prompt(self, wanted: int, share: float) -> None:
        tokens = affordable(wanted, self.pace * (3 if self.on_gpu else 1), share)
        if tokens < wanted:
            self.omitted.append(f"a prompt of {wanted} tokens: too slow here")
        if any(timing.context >= tokens for timing in self.timings):
            return

        def prompt() -> Timing:
            taken = self._time(self._batch(1, tokens).read, share)
            self.pace = taken / tokens
            return Timing(work="prompt", rows=1, context=tokens, seconds=taken)

        self._attempt(f"a prompt of {tokens} tokens", prompt)

    def _decode(self, rows: int, wanted: int, share: float) -> None:
        name = f"decoding {rows} rows" if rows > 1 else "decoding a row"
        context = affordable(wanted, self.pace, share / 2)
        steps = [timing for timing in self.timings if timing.work == "decode"]
        needed = rows * whole_pages(context + 1)
        if steps and steps[-1].seconds / steps[-1].rows * rows > share / 2:
            self.omitted.append(f"{name}: too slow here")
        elif fitting(needed, self._placements, self.cache, rows) < needed:
            self.omitted.append(f"{name}: {NO_ROOM}")
        else:
            if context < wanted:
                self.omitted.append(f"{name} behind {wanted} tokens: too slow here")
            self._attempt(name, lambda: self._steps(rows, context, share / 2))

    def _steps(self, rows: int, context: int, share: float) -> Timing:
        batch = self._batch(rows, context)
        batch.fill()
        batch.enter(SamplingSettings.greedy())
        taken = self._time(batch.step, share)
        read = None
        if self.on_gpu:
            read = read_in_step(self.model.decoder, self._weights) + batch.read_bytes
        return Timing(work="decode", rows=rows, context=context, seconds=taken, read_bytes=read)

    def _attempt(self, name: str, work: Callable[[], Timing]) -> None:
        """Add a timing unless memory runs out."""
        self.report(name)
        try:
            self.timings.append(work())
        except (OutOfDeviceMemory, torch.OutOfMemoryError):
            self.omitted.append(f"{name}: {NO_ROOM}")


def read_in_step(decoder: Decoder, weights: int) -> int:
    """Return the bytes of all weights less those of an embedding that is not the head, too."""
    embedding, head = decoder.embedding.weight, decoder.head.linear
    is_head = isinstance(head, DenseLinear) and head.weight.data_ptr() == embedding.data_ptr()
    return weights - (0 if is_head else embedding.nbytes)


def affordable(tokens: int, pace: float, share: float) -> int:
    """Return a number of tokens, halved until they take at most `share` seconds, or are few."""
    while tokens > PROBE and tokens * pace > share:
        tokens = max(PROBE, tokens // 2)
    return tokens
