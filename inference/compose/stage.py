"""The compose stage: the source model itself writes texts, which become calibration rows.

The whole model is in memory (fp32 on the CPU, fp16 on CUDA): a token needs a forward pass, far too
many to reread the weights each time; it may be split among GPUs. Overrides of the rotary embedding
do not apply, because the rows should be what the source writes.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Protocol

import torch

from exl2flow.core.errors import InferenceError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.memory import free_memory, limit_memory
from exl2flow.core.store.files import digest, read_tensors, write_json, write_tensors
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import COMPOSED, KINDS_FILE, ROWS_FILE, Stage, StageRun
from exl2flow.engine.cache.paged import whole_pages
from exl2flow.engine.loading.layer_split import Split
from exl2flow.engine.loading.load import load_model
from exl2flow.inference.compose.writer import TextWriter
from exl2flow.model import Composition, ModelSpec, Tokenizer, resolve
from exl2flow.quant.tokenize.openings import Openings, origin
from exl2flow.quant.walk.needs import FLOAT, HALF
from exl2flow.quant.walk.source_model import SourceModel

log = logging.getLogger(__name__)

TELL_EVERY = 128  # tokens between two reports; a multiple of LOOK_EVERY
RUN_TOKENS = 8  # of the runs that tell whether a text repeats itself
LEAST_DISTINCT = 0.5  # share of distinct runs; a text with fewer is a loop, and left out
MOST_WRITTEN = 1.5  # times the texts that are needed; then loops are taken, too


def compose(run: StageRun[RunOptions]) -> None:
    """Write texts, commit each batch, and make rows of the texts that do not repeat themselves.

    Raises:
        ConfigError, OutOfDeviceMemory: the model cannot be split as the options say.
        NonFiniteState, InferenceError: the model's logits are not finite, with or without a weight
            that is not.
    """
    folder = run.folder
    plan = _plan(run)
    folder.manifest.total = plan.texts
    run.tick(0, plan.texts)
    tokenizer = Tokenizer.load(run.config.source)
    openings = Openings(run.config.source, tokenizer, seed=run.config.calibration.seed)
    writer: TextWriter | None = None
    at_once = plan.at_once
    texts: list[torch.Tensor] = []  # int64 (span,) each
    shares: list[float] = []  # of distinct runs, by text
    while (missing := plan.texts - _told(shares)) > 0 and len(texts) < MOST_WRITTEN * plan.texts:
        numbers = range(len(texts), len(texts) + min(at_once, missing))
        if not folder.valid(_file(numbers)):
            writer = writer or _writer(run, texts=at_once, span=plan.span)
            _write(run, writer, openings, numbers)
        written = read_tensors(folder.path / _file(numbers))[COMPOSED]
        if not texts:  # a resumed run may find more or less memory
            at_once = len(written)
        texts += written
        shares += map(distinct_share, written)
        run.tick(min(_told(shares), plan.texts), plan.texts, f"loops={len(shares) - _told(shares)}")
        run.stop_if_asked()
    _conclude(run, plan, openings, texts, shares)


def _plan(run: StageRun[RunOptions]) -> Composition:
    """Return the plan for the memory of the device."""
    config, device = run.config, torch.device(run.device)
    limit_memory(device, config.max_memory)
    free = free_memory(device) if device.type == "cuda" else None
    return Composition.of_run(resolve(config.source), config, free)


def _told(shares: Sequence[float]) -> int:
    """Return how many texts are no loops."""
    return sum(share >= LEAST_DISTINCT for share in shares)


def _writer(run: StageRun[RunOptions], *, texts: int, span: int) -> TextWriter:
    """Load the model, with room for a batch."""
    split = Split.of(run.config, tokens=texts * whole_pages(span), slots=texts)
    longest = None if split is None else span  # room is left for these texts only
    is_gpu = torch.device(run.device).type == "cuda"  # whose memory is planned with all weights
    model = load_model(
        run.config.source,
        device=run.device,
        placement=split,
        max_tokens=longest,
        embedding="gpu" if is_gpu else "auto",
    )
    return TextWriter(model, texts=texts, span=span)


def _write(
    run: StageRun[RunOptions], writer: TextWriter, openings: Openings, numbers: range
) -> None:
    """Write and commit a batch."""
    begun = time.monotonic()
    seed = run.config.calibration.seed
    try:
        written = writer.write(
            list(map(openings.of, numbers)),
            [f"{seed}/{text}" for text in numbers],
            partial(_look, run, numbers),
        )
    except InferenceError:
        SourceModel.open(run.config, run.device).check()
        raise
    name = _file(numbers)
    sha256 = write_tensors(run.folder.path / name, {COMPOSED: written})
    run.folder.commit(name, sha256, cursor=min(numbers.stop, run.folder.manifest.total))
    speed = written.numel() / (time.monotonic() - begun)
    log.info("texts %d-%d tokens/s=%.0f", numbers.start, numbers.stop - 1, speed)


def _look(run: StageRun[RunOptions], numbers: range, position: int) -> None:
    """Stop on a signal; report the progress of some texts from time to time."""
    run.stop_if_asked()
    if position and position % TELL_EVERY == 0:
        detail = f"texts {numbers.start}-{numbers.stop - 1} token {position}"
        total = run.folder.manifest.total
        run.tick(min(numbers.start, total), total, detail)


def _file(numbers: range) -> str:
    return f"texts-{numbers.start:05d}.safetensors"


def _conclude(
    run: StageRun[RunOptions],
    plan: Composition,
    openings: Openings,
    texts: Sequence[torch.Tensor],
    shares: Sequence[float],
) -> None:
    """Write all rows into one file, with their descriptions; loops only if too few texts are not.

    A row is several texts, one after the other.
    """
    folder = run.folder
    loops = [text for text, share in enumerate(shares) if share < LEAST_DISTINCT]
    others = [text for text in range(len(texts)) if text not in loops]
    loops.sort(key=lambda text: -shares[text])
    chosen = sorted([*others, *loops][: plan.texts])
    ids = torch.stack([texts[text] for text in chosen]).view(plan.rows, -1)[:, : plan.tokens]
    note = (
        f"self: {plan.rows} rows of {plan.tokens} tokens written by the model, as texts of "
        f"{plan.span} ({', '.join(openings.kinds)}); "
        f"{mean(shares[text] for text in chosen):.0%} of their {RUN_TOKENS}-token runs distinct"
    )
    if loops:
        note += f"; {len(loops)} of {len(texts)} texts repeated themselves"
    folder.note(note)
    write_json(folder.path / KINDS_FILE, {"kinds": ["self"] * plan.rows, "notes": [note]})
    folder.commit(KINDS_FILE, digest(folder.path / KINDS_FILE))
    folder.commit(ROWS_FILE, write_tensors(folder.path / ROWS_FILE, {COMPOSED: ids.contiguous()}))


def distinct_share(ids: torch.Tensor) -> float:
    """Return the share of distinct runs of `RUN_TOKENS` tokens among all runs in ids (t,)."""
    runs = ids.unfold(0, min(RUN_TOKENS, len(ids)), 1).tolist()
    return len(set(map(tuple, runs))) / len(runs)


def _options(config: RunOptions) -> dict[str, object]:
    calibration = config.calibration
    plan = Composition.of(resolve(config.source), calibration, training=config.training_rows)
    begun = origin(config.source, Tokenizer.load(config.source))
    sizes = {"rows": plan.rows, "tokens": plan.tokens, "span": plan.span}
    return {**sizes, "seed": calibration.seed, "openings": begun}


class _Card(Protocol):
    """A GPU; memory: free bytes."""

    @property
    def memory(self) -> int: ...


class _Sizes(Protocol):
    """The model, and the GPU if there is one."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def card(self) -> _Card | None: ...


def needs(config: RunOptions, sizes: _Sizes) -> Need:
    """Forecast the stage: the whole model, fp16 on a GPU and fp32 on a CPU."""
    free = None if sizes.card is None else sizes.card.memory
    elements = Composition.of_run(sizes.spec, config, free).elements
    if free is None:
        return Need(memory_bytes=FLOAT * elements, holds="model")
    return Need(gpu_memory_bytes=HALF * elements, holds="shards" if config.is_split else "model")


COMPOSE: Stage[RunOptions] = Stage(
    name="compose",
    schema=2,
    inputs=(),
    options=_options,
    run=compose,
    enabled=lambda config: config.writes,
    needs=needs,
    is_shared=True,
)
