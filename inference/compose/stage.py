"""The compose stage: the source model itself writes calibration rows, starting from BOS.

The whole model is in memory (fp32 on the CPU, fp16 on CUDA): a row needs one forward pass per
token, far too many to reread the weights each time; it may be split among GPUs. Overrides of the
rotary embedding do not apply, because the rows should be what the source writes.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from exl2flow.core.errors import InferenceError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.memory import limit_memory
from exl2flow.core.store.files import digest, read_tensors, write_json, write_tensors
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import COMPOSED, KINDS_FILE, ROWS_FILE, Stage, StageRun
from exl2flow.engine.cache.paged import PagedCache, cache_format, pages_of, whole_pages
from exl2flow.engine.generate.passes import Passes, Sequences, SpanPlace
from exl2flow.engine.loading.layer_split import Split
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import Composition, Decoder, ModelSpec, RopeTables, Tokenizer, resolve
from exl2flow.model.memory.footprint import exact_format

log = logging.getLogger(__name__)

TEMPERATURES = (0.7, 0.85, 1.0)  # of rows 0, 1, 2, 0, …
HALF, FLOAT = 2, 4  # bytes of fp16, of fp32
LOOK_EVERY = 64  # tokens between two checks for signals …
TELL_EVERY = 512  # … and between two reports; a multiple of LOOK_EVERY


def compose(run: StageRun[RunOptions]) -> None:
    """Write `rows` and a description of each, and commit after every batch.

    Raises:
        ConfigError, OutOfDeviceMemory: the model cannot be split as the options say.
        InferenceError: the model's logits are not finite.
    """
    folder = run.folder
    limit_memory(torch.device(run.device), run.config.max_memory)
    plan = Composition.of(resolve(run.config.source), run.config.calibration)
    tokens = plan.at_once * whole_pages(plan.span)
    split = Split.of(run.config, tokens=tokens, slots=plan.at_once)
    longest = None if split is None else plan.span  # room is left for these texts only
    model = load_model(run.config.source, device=run.device, placement=split, max_tokens=longest)
    count = folder.manifest.total = plan.rows
    starts = range(0, count, plan.at_once)
    batches = [range(start, min(start + plan.at_once, count)) for start in starts]
    run.tick(sum(len(rows) for rows in batches if folder.valid(_file(rows))), count)
    for rows in batches:
        if folder.valid(_file(rows)):
            continue
        start = time.monotonic()
        ids = write_rows(
            model,
            rows,
            tokens=plan.tokens,
            seed=run.config.calibration.seed,
            look=partial(_look, run, rows),
        )
        sha256 = write_tensors(folder.path / _file(rows), {COMPOSED: ids})
        folder.commit(_file(rows), sha256, cursor=rows.stop)
        speed = ids.numel() / (time.monotonic() - start)
        run.tick(rows.stop, count, f"rows {rows.start}-{rows.stop - 1} tokens/s={speed:.0f}")
        run.stop_if_asked()
    _conclude(run, batches)


def _look(run: StageRun[RunOptions], rows: range, position: int) -> None:
    """Stop on a signal; report the progress of some rows from time to time."""
    run.stop_if_asked()
    if position and position % TELL_EVERY == 0:
        detail = f"rows {rows.start}-{rows.stop - 1} token {position}"
        run.tick(rows.start, run.folder.manifest.total, detail)


def _file(rows: range) -> str:
    return f"rows-{rows.start:05d}.safetensors"


def _conclude(run: StageRun[RunOptions], batches: Sequence[range]) -> None:
    """Write all rows into one file, with their descriptions."""
    folder = run.folder
    ids = torch.cat([read_tensors(folder.path / _file(rows))[COMPOSED] for rows in batches])
    kinds = [f"self T={TEMPERATURES[row % len(TEMPERATURES)]:g}" for row in range(len(ids))]
    note = (
        f"self: {len(ids)} rows of {ids.shape[1]} tokens written by the model, "
        f"{distinct_share(ids):.0%} of their 8-token runs distinct"
    )
    folder.note(note)
    write_json(folder.path / KINDS_FILE, {"kinds": kinds, "notes": [note]})
    folder.commit(KINDS_FILE, digest(folder.path / KINDS_FILE))
    folder.commit(ROWS_FILE, write_tensors(folder.path / ROWS_FILE, {COMPOSED: ids}))


def distinct_share(ids: torch.Tensor, *, run: int = 8) -> float:
    """Return the share of distinct runs of `run` tokens among all runs in ids (rows, t)."""
    runs = ids.unfold(1, run, 1).reshape(-1, run).tolist()
    return len(set(map(tuple, runs))) / len(runs)


@torch.inference_mode()
def write_rows(
    model: LoadedModel, rows: range, *, tokens: int, seed: int, look: Callable[[int], None]
) -> torch.Tensor:
    """Let the model write rows side by side.

    Every row has its own draws, so batching changes nothing beyond the rounding of sums. After an
    end-of-text token, a new text begins with BOS if the model has one; so it does, without any
    context, where the model runs out of positions.

    Args:
        model: the model.
        rows: row numbers; they determine temperatures and draws.
        tokens: length of a row.
        seed: seed of the draws.
        look: called with the position every few tokens; may raise to stop.

    Returns:
        int64 (rows, tokens).

    Raises:
        InferenceError: the logits are not finite.
    """
    spec, device = model.spec, model.decoder.placement.head
    span = min(tokens, spec.max_positions)
    cache, read, passes = _passes(model.decoder, len(rows), span)
    texts = -(-tokens // span)
    chance = _Chance.of(model.tokenizer, rows, device, tokens=tokens, texts=texts, seed=seed)
    below = min(spec.vocab_size, model.tokenizer.vocab_size)
    ids = torch.empty((len(rows), tokens), dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)  # read once: reading waits for the GPU
    token = chance.openings[:, 0]
    for position in range(tokens):
        if position % span == 0:
            read.lengths.zero_()
            if cache.states is not None:
                cache.states.clear()
            token = chance.openings[:, position // span]
        ids[:, position] = token
        read.ids[:, 0] = token
        logits = passes.run((), len(rows), 1)[:, 0, :below]  # (b, v)
        read.lengths.add_(1)
        finite &= logits.isfinite().all()
        token = chance.following(token, logits, position)
        if position % LOOK_EVERY == 0:
            look(position)
    if not finite:
        raise InferenceError(
            f"the logits of `{spec.source_dir}` are not finite while it writes calibration rows; "
            "check its files, or use a calibration other than `self`"
        )
    return ids.cpu()


def _passes(decoder: Decoder, rows: int, span: int) -> tuple[PagedCache, Sequences, Passes]:
    """Return a cache for rows of up to `span` positions, and passes that give logits.

    Between them: what a pass reads of the rows, with the head. No pass is recorded.
    """
    device, layers = decoder.placement.head, decoder.placement.layers
    pages, form = rows * pages_of(span), cache_format(exact_format(device), device)
    cache = PagedCache(
        decoder.spec, pages=pages, form=form, device=device, layers=layers, slots=rows
    )
    read = Sequences(
        torch.arange(pages, dtype=torch.int32, device=device).view(rows, -1),
        torch.zeros(rows, dtype=torch.int32, device=device),
        torch.zeros(rows, 1, dtype=torch.int64, device=device),
    )
    places = []
    for part in decoder.spans:
        graphs = GraphPool(nullcontext, records=False, device=part.device)
        angles = RopeTables.of(decoder.spec, span, part.device)
        places.append(SpanPlace(part, cache.at(part.device), angles, graphs))
    passes = Passes(
        places,
        read,
        decoder=lambda batch: decoder,
        end=lambda decoder, hidden: decoder.head(hidden),
    )
    return cache, read, passes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chance:
    """Temperatures, draws and first tokens of each row.

    heats: temperatures (b,); draws: fp64 (b, tokens) in [0, 1); openings: the first token of each
    text, int64 (b, texts); ends: tokens after which `bos` must follow, int64 (e,).
    """

    heats: torch.Tensor
    draws: torch.Tensor
    openings: torch.Tensor
    ends: torch.Tensor
    bos: int

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        rows: range,
        device: torch.device,
        *,
        tokens: int,
        texts: int,
        seed: int,
    ) -> "_Chance":
        """Draw for each row from its number and the seed."""
        bos, ends = tokenizer.bos_token_id, tokenizer.eos_token_ids
        choice = plausible_openings(tokenizer) if bos is None else [bos]
        openings = []
        for row in rows:
            opening = random.Random(f"{seed}/{row}/opening")
            openings.append([choice[int(opening.random() * len(choice))] for _ in range(texts)])
        sources = [random.Random(f"{seed}/{row}") for row in rows]
        draws = [[source.random() for _ in range(tokens)] for source in sources]
        heats = [TEMPERATURES[row % len(TEMPERATURES)] for row in rows]
        ends = () if bos is None or bos in ends else ends
        return cls(
            heats=torch.tensor(heats, device=device),
            draws=torch.tensor(draws, dtype=torch.float64, device=device),
            openings=torch.tensor(openings, device=device),
            ends=torch.tensor(ends, dtype=torch.int64, device=device),
            bos=bos or 0,
        )

    def following(self, token: torch.Tensor, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Return the tokens int64 (b,) after those at `position`; logits are (b, v)."""
        drawn = draw_tokens(logits, self.heats, self.draws[:, position])
        return torch.where(torch.isin(token, self.ends), self.bos, drawn)


def draw_tokens(logits: torch.Tensor, heats: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw a token per row from softmax(logits / temperature), by inverse transform sampling.

    Args:
        logits: (b, v).
        heats: temperatures (b,).
        draws: fp64 (b,), uniform in [0, 1).

    Returns:
        int64 (b,).
    """
    probabilities = torch.softmax(logits.double() / heats[:, None], dim=-1)
    sums = probabilities.cumsum(dim=-1)
    tokens = torch.searchsorted(sums, (draws * sums[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)


def plausible_openings(tokenizer: Tokenizer) -> list[int]:
    """Return tokens that may begin a text: capitalized words, or all tokens if there are none."""
    texts = ((token, tokenizer.decode([token])) for token in range(tokenizer.vocab_size))
    openings = [
        token for token, text in texts if len(text) > 1 and text.isalpha() and text.istitle()
    ]
    return openings or list(range(tokenizer.vocab_size))


def _options(config: RunOptions) -> dict[str, object]:
    calibration = config.calibration
    plan = Composition.of(resolve(config.source), calibration)
    return {"rows": plan.rows, "tokens": plan.tokens, "seed": calibration.seed}


class _Sizes(Protocol):
    """The model, and the GPU if there is one."""

    spec: ModelSpec
    card: object | None


def needs(config: RunOptions, sizes: _Sizes) -> Need:
    """Forecast the stage: the whole model, fp16 on a GPU and fp32 on a CPU."""
    elements = Composition.of(sizes.spec, config.calibration).elements
    if sizes.card is None:
        return Need(memory_bytes=FLOAT * elements, holds="model")
    return Need(gpu_memory_bytes=HALF * elements, holds="shards" if config.is_split else "model")


COMPOSE: Stage[RunOptions] = Stage(
    name="compose",
    schema=1,
    inputs=(),
    options=_options,
    run=compose,
    enabled=lambda config: config.calibration.text == "self",
    needs=needs,
    is_shared=True,
)
