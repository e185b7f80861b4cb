"""The tokenize stage: calibration text → token rows for measuring and for quantizing."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from exl2flow import calibration_data
from exl2flow.core.errors import NotEnoughRows
from exl2flow.core.options.config import HELD_OUT_ROWS, CalibrationOptions, RunOptions
from exl2flow.core.store.files import (
    digest,
    digest_of,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import COMPOSED, KINDS_FILE, ROWS_FILE, Stage, StageRun
from exl2flow.model import Tokenizer, check_ids, resolve, with_bos
from exl2flow.quant.tokenize.dialogues import chat_rows, dialogue_stream, load_template
from exl2flow.quant.tokenize.mix import (
    CalibrationRows,
    RowRequest,
    calibration_rows,
    further_file_rows,
    held_out_rows,
    joined,
)
from exl2flow.quant.walk.needs import TOKEN, ModelSizes

SHARED_TOKENS = 32  # two rows with a common run of this length share text
JUDGING = "judging "  # before a text's name: its rows, which only judge
FURTHER = "further text"  # rows of a user's file that are only trained on
FURTHER_ROWS = 1024  # of them at most
NO_TEXT = ("random", "noise")  # kinds of rows that are not text


Mix = Literal["measure", "quantize"]
Maker = Callable[[RowRequest], CalibrationRows]


def load_rows(folder: Path, mix: Mix) -> torch.Tensor:
    """Return calibration rows int64 (rows, t) from the stage folder of `tokenize`."""
    return read_tensors(folder / ROWS_FILE)[mix]


def tokenize(run: StageRun[RunOptions]) -> None:
    """Write the rows of both mixes into the stage folder."""
    if all(map(run.folder.valid, (KINDS_FILE, ROWS_FILE))):
        return  # it ended behind its last commit
    options = run.config.calibration
    tokenizer = Tokenizer.load(run.config.source)
    spec = resolve(run.config.source)
    special = _maker(run, tokenizer)
    sizes: dict[Mix, tuple[int, int]] = {
        "measure": (options.measure_rows, options.measure_row_tokens),
        "quantize": (options.rows, options.row_tokens),
    }
    tensors: dict[str, torch.Tensor] = {}
    kinds = {}
    for mix, (rows, row_tokens) in sizes.items():
        request = RowRequest(
            rows=rows,
            row_tokens=row_tokens,
            mix=mix,
            vocab_size=spec.vocab_size,
            noise=spec.family.noise_rows,
            seed=options.seed,
        )
        calibration = _mixed(options, tokenizer, request, special=special)
        check_ids(calibration.ids, spec, noise=True)
        tensors[mix] = with_bos(calibration.ids, spec)
        kinds[mix] = {"kinds": list(calibration.kinds), "notes": list(calibration.notes)}
        for note in calibration.notes:
            run.folder.note(f"{mix} rows: {note}")
    if run.config.judges:
        tensors |= _judging_texts(run, tokenizer) | _further_text(run, tokenizer)
    run.folder.commit(KINDS_FILE, write_json(run.folder.path / KINDS_FILE, kinds))
    sha256 = write_tensors(run.folder.path / ROWS_FILE, tensors)
    run.folder.commit(ROWS_FILE, sha256, cursor=1)
    run.tick(1, 1, f"rows={options.measure_rows}+{options.rows}")


def _judging_texts(run: StageRun[RunOptions], tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Return rows of other texts than the calibration's, by `JUDGING` and the text.

    Of the rows that the source writes, the first ones beyond those of the mixes judge.
    """
    options, spec, count = run.config.calibration, resolve(run.config.source), HELD_OUT_ROWS
    texts = {"held-out": held_out_rows(tokenizer, rows=count, row_tokens=options.row_tokens)}
    if "compose" in run.inputs:
        written = further_rows(run.inputs["compose"], run.config)
        texts["self-written"] = written[: judging_rows(count, len(written))]
    return {f"{JUDGING}{text}": with_bos(x, spec) for text, x in texts.items() if len(x)}


def _further_text(run: StageRun[RunOptions], tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Return rows of a user's file behind those of the mixes, to train on, by `FURTHER`."""
    options, spec = run.config.calibration, resolve(run.config.source)
    if options.file is None or not _trains_on_file(run.config):
        return {}
    tokens = options.row_tokens
    used = max(options.rows * tokens, options.measure_rows * options.measure_row_tokens)
    rows = further_file_rows(
        options.file,
        tokenizer,
        after=math.ceil(used / tokens),
        rows=FURTHER_ROWS,
        row_tokens=tokens,
    )
    check_ids(rows, spec)
    return {FURTHER: with_bos(rows, spec)} if len(rows) else {}


def _trains_on_file(config: RunOptions) -> bool:
    """Tell whether more of a user's file is trained on than calibrates."""
    return "training" in config.judges and config.calibration.file is not None


def training_rows(folder: Path, held_out: int) -> torch.Tensor:
    """Return the rows of text to train on, int64 (rows, t): those of `split_rows`, and others.

    Args:
        folder: stage folder of `tokenize`.
        held_out: rows of the calibration text to hold out, at most half of them.

    Raises:
        NotEnoughRows: there are fewer than two rows of text.
    """
    training, judges = split_rows(folder, held_out)
    more = read_tensors(folder / ROWS_FILE).get(FURTHER)
    return training if more is None else torch.cat([training, rows_apart(more, judges)])


def further_rows(folder: Path, config: RunOptions) -> torch.Tensor:
    """Return the rows that the source wrote beyond those of the mixes, int64 (rows, t)."""
    options, written = config.calibration, read_tensors(folder / ROWS_FILE)[COMPOSED]
    return written[options.written_rows :, : options.row_tokens].contiguous()


def judging_texts(folder: Path, held_out: int) -> dict[str, torch.Tensor]:
    """Return text → rows that only judge, int64 (rows, t): the calibration's own, and others.

    Args:
        folder: stage folder of `tokenize`.
        held_out: rows of the calibration text to hold out, at most half of them.

    Raises:
        NotEnoughRows: there are fewer than two rows of text.
    """
    others = {
        name.removeprefix(JUDGING): rows
        for name, rows in read_tensors(folder / ROWS_FILE).items()
        if name.startswith(JUDGING)
    }
    return {"calibration": split_rows(folder, held_out)[1], **others}


def _maker(run: StageRun[RunOptions], tokenizer: Tokenizer) -> Maker | None:
    """Return the maker of rows for `chat` or `self`; None for other texts."""
    match run.config.calibration.text:
        case "chat":
            template = load_template(run.config.source, tokenizer)
            return partial(chat_rows, dialogue_stream(template, tokenizer))
        case "self":
            return partial(composed_rows, run.inputs["compose"])
        case _:
            return None


def text_rows(folder: Path, mix: Mix = "quantize") -> tuple[torch.Tensor, list[int]]:
    """Return the rows of a mix, int64 (rows, t), and the indices of the text rows."""
    ids = load_rows(folder, mix)
    kinds = read_json(folder / KINDS_FILE)[mix]["kinds"]
    return ids, [row for row, kind in enumerate(kinds) if kind not in NO_TEXT]


def judging_rows(held_out: int, rows: int) -> int:
    """Return how many of `rows` rows of text are held out: `held_out`, at most half."""
    return min(held_out, rows // 2)


def split_rows(folder: Path, held_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the text rows of the quantizing mix into training and held-out rows.

    Args:
        folder: stage folder of `tokenize`.
        held_out: rows to hold out, at most half of them.

    Returns:
        Training rows and held-out rows, int64 (rows, t); the latter spread over all kinds, the
        former without rows that share text with them.

    Raises:
        NotEnoughRows: there are fewer than two rows of text.
    """
    ids, text = text_rows(folder)
    if len(text) < 2:
        raise NotEnoughRows(
            f"judging needs two rows of text, the calibration rows have {len(text)}; raise `--rows`"
        )
    judges = _judges(text, held_out)
    others = [row for row in text if row not in judges]
    return rows_apart(ids[others], ids[judges]), ids[judges]


def unjudged_rows(folder: Path, mix: Mix, held_out: int) -> torch.Tensor:
    """Return the rows of a mix, int64 (rows, t), without the judges and text that they share.

    Args:
        folder: stage folder of `tokenize`.
        mix: the mix; judges are rows of the quantizing one.
        held_out: rows that judge.
    """
    ids, text = text_rows(folder, mix)
    quantizing, possible = text_rows(folder)
    judges = _judges(possible, held_out)
    if not judges:
        return ids
    others = [row for row in text if mix != "quantize" or row not in judges]
    left_out = {*text} - {others[i] for i in _apart(ids[others], quantizing[judges])}
    return ids[[row for row in range(len(ids)) if row not in left_out]]


def _judges(text: list[int], held_out: int) -> list[int]:
    """Return those of the rows of text that judge, spread over all of them."""
    count = judging_rows(held_out, len(text))
    return [text[(2 * i + 1) * len(text) // (2 * count)] for i in range(count)]


def rows_apart(training: torch.Tensor, held_out: torch.Tensor) -> torch.Tensor:
    """Return the training rows that share no text with a held-out one.

    Rows of a text that is too short overlap, and text that was trained on cannot judge. If all
    share some, only rows that are equal to a held-out row are left out; if all are equal, none.
    """
    return training[_apart(training, held_out)]


def _apart(training: torch.Tensor, held_out: torch.Tensor) -> list[int]:
    """Return the indices of the rows that `rows_apart` returns."""
    known = {piece for row in held_out for piece in _pieces(row, step=1)}
    rows = range(len(training))
    if apart := [i for i in rows if known.isdisjoint(_pieces(training[i], step=SHARED_TOKENS))]:
        return apart
    judges = {tuple(row.tolist()) for row in held_out}
    return [i for i in rows if tuple(training[i].tolist()) not in judges] or [*rows]


def _pieces(row: torch.Tensor, *, step: int) -> set[tuple[int, ...]]:
    """Return the runs of `SHARED_TOKENS` tokens that start at every `step`-th token of a row."""
    tokens = row.tolist()
    last = max(0, len(tokens) - SHARED_TOKENS)
    return {tuple(tokens[i : i + SHARED_TOKENS]) for i in range(0, last + 1, step)}


def _mixed(
    options: CalibrationOptions, tokenizer: Tokenizer, request: RowRequest, *, special: Maker | None
) -> CalibrationRows:
    """Return the rows of `special`, as many as the options say, then those of the text."""
    count = options.special_rows(request.rows)
    if special is None:
        return calibration_rows(options.file, tokenizer, request)
    first = special(replace(request, rows=count))
    if count == request.rows:
        return first
    rest = replace(request, rows=request.rows - count)
    return joined(first, calibration_rows(None, tokenizer, rest))


def composed_rows(folder: Path, request: RowRequest) -> CalibrationRows:
    """Return the first rows written by the source itself, from the folder of `compose`."""
    ids = read_tensors(folder / ROWS_FILE)[COMPOSED]  # (rows, t) of the larger mix
    described = read_json(folder / KINDS_FILE)
    return CalibrationRows(
        ids=ids[: request.rows, : request.row_tokens].contiguous(),
        kinds=tuple(described["kinds"][: request.rows]),
        notes=tuple(described["notes"]),
    )


def needs(config: RunOptions, sizes: ModelSizes) -> Need:
    """Forecast the stage: the ids of all rows, in memory twice."""
    rows = config.calibration
    further = FURTHER_ROWS if _trains_on_file(config) else 0
    quantizing = (rows.rows + further) * rows.row_tokens
    ids = TOKEN * (quantizing + rows.measure_rows * rows.measure_row_tokens)
    return Need(memory_bytes=2 * ids, kept_bytes=ids)


def _options(config: RunOptions) -> dict[str, object]:
    calibration = config.calibration
    options = calibration.model_dump(mode="json", exclude={"text", "share"})
    file = calibration.file or calibration_data.standard()
    options |= {"file": digest(file), "own": calibration.file is not None}
    if calibration.file is not None:
        options["seed"] = 0  # nothing is drawn
    elif calibration.measure_rows == 1 and resolve(config.source).family.noise_rows:
        options["single"] = "text"  # it was noise
    if calibration.special_rows(1):
        options |= {"text": calibration.text, "share": calibration.share}
    if _trains_on_file(config):
        options["further_text"] = FURTHER_ROWS
    if config.judges:
        options["judging"] = digest(calibration_data.heldout())
        options["further"] = config.training_rows
    if calibration.text == "chat":
        template = load_template(config.source, Tokenizer.load(config.source))
        options["dialogues"] = digest(calibration_data.chat())
        options["template"] = digest_of([template.text, template.special_tokens])
    return options


TOKENIZE: Stage[RunOptions] = Stage(
    name="tokenize",
    schema=2,
    inputs=("compose",),
    options=_options,
    run=tokenize,
    files=lambda config: filter(None, [config.calibration.file]),
    needs=needs,
    is_shared=True,
)
