"""Turn text into calibration rows: fixed-length token sequences to measure and quantize on.

The standard set mixes nine kinds of rows in fixed proportions, at any row count; a user's Parquet
file is read from its start. Text that is too short gives overlapping rows rather than fewer
(`cutting.py`), with a note.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from exl2flow.calibration_data import heldout, standard
from exl2flow.core.errors import NotEnoughRows
from exl2flow.core.runtime.interrupt import look
from exl2flow.model import Tokenizer
from exl2flow.quant.tokenize.cutting import Stream, cut, overlaps, row_offsets, shuffled
from exl2flow.quant.tokenize.parquet import records

log = logging.getLogger(__name__)

# Rows of each kind for measuring and for quantizing, in row order; 19 and 115 without noise. The
# proportions are those of the original converter, the text is this project's own.
MIX: Mapping[str, tuple[int, int]] = {
    "web": (2, 10),
    "encyclopedia": (4, 48),
    "code": (3, 15),
    "stories": (2, 10),
    "multilingual": (3, 15),
    "shuffled": (1, 5),
    "random": (2, 2),
    "technical": (2, 10),
    "noise": (5, 30),
}
TEXT_KINDS = ("web", "encyclopedia", "code", "stories", "multilingual", "technical")
NOISE_ID = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """Number of calibration rows, their length and their mix.

    `mix` and `noise` affect the standard set only. Random ids are below `vocab_size`, or below the
    tokenizer's if it is None.
    """

    rows: int
    row_tokens: int
    mix: Literal["measure", "quantize"] = "quantize"
    vocab_size: int | None = None
    noise: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRows:
    """ids: int64 (rows, row_tokens), -1 in noise rows; kinds: one per row; notes: on short text."""

    ids: torch.Tensor
    kinds: tuple[str, ...]
    notes: tuple[str, ...] = ()


def calibration_rows(
    parquet: Path | None, tokenizer: Tokenizer, request: RowRequest
) -> CalibrationRows:
    """Return rows of the standard set, or of the text columns of `parquet`.

    Raises:
        CalibrationError: the file cannot be read or holds no text.
        NotEnoughRows: the text is shorter than one row.
    """
    if parquet is None:
        rows = _standard_rows(standard(), tokenizer, request)
    else:
        rows = _rows_of_file(parquet, tokenizer, request)
    level = logging.INFO if parquet is None else logging.WARNING
    for note in rows.notes:
        log.log(level, "%s", note)
    return rows


def held_out_rows(tokenizer: Tokenizer, *, rows: int, row_tokens: int) -> torch.Tensor:
    """Return the last rows of the built-in held-out text, int64 (at most `rows`, row_tokens).

    Validation reads its first ones; at most half of all judge.
    """
    texts = (text for [text] in records(heldout(), ["text"]))
    ids = tokenizer.encode("\n\n".join(texts))
    whole = len(ids) // row_tokens
    count = min(rows, whole // 2)
    end = whole * row_tokens
    return torch.tensor(ids[end - count * row_tokens : end]).view(count, row_tokens)


def joined(first: CalibrationRows, second: CalibrationRows) -> CalibrationRows:
    """Return the rows of both, those of `first` before; rows are of equal length."""
    return CalibrationRows(
        ids=torch.cat([first.ids, second.ids]),
        kinds=first.kinds + second.kinds,
        notes=first.notes + second.notes,
    )


def row_counts(request: RowRequest) -> dict[str, int]:
    """Distribute the rows over the kinds by largest remainder, ties in table order.

    A single row is text, whatever the remainders: nothing can be measured on noise alone.
    """
    column = ("measure", "quantize").index(request.mix)
    shares = {kind: MIX[kind][column] for kind in MIX if request.noise or kind != "noise"}
    total = sum(shares.values())
    counts = {kind: request.rows * share // total for kind, share in shares.items()}
    possible = TEXT_KINDS if request.rows == 1 else shares
    by_remainder = sorted(possible, key=lambda kind: -(request.rows * shares[kind] % total))
    for kind in by_remainder[: request.rows - sum(counts.values())]:
        counts[kind] += 1
    return counts


def short_notes(kind: str, total: int, offsets: Sequence[int], length: int) -> list[str]:
    """Describe how a kind with too few tokens was handled."""
    size = f"{kind}: {total} tokens for {len(offsets)} rows of {length}"
    notes = []
    if total < length:
        notes.append(f"{size}; text of other kinds follows it")
    if overlaps(offsets, length):
        same = "rows overlap" if len(set(offsets)) == len(offsets) else "some rows are equal"
        notes.append(f"{size}; {same}")
    return notes


def _standard_rows(path: Path, tokenizer: Tokenizer, request: RowRequest) -> CalibrationRows:
    texts: dict[str, list[str]] = {kind: [] for kind in TEXT_KINDS}
    for kind, text in records(path, ["kind", "text"]):
        texts[kind].append(text)
    streams = cache(lambda kind: _stream(kind, texts[kind], tokenizer))
    generator = torch.Generator().manual_seed(request.seed)
    length = request.row_tokens
    counts = {kind: count for kind, count in row_counts(request).items() if count}
    blocks: list[torch.Tensor] = []  # each int64 (count, row_tokens)
    notes: list[str] = []
    for kind, count in counts.items():
        if kind == "noise":
            blocks.append(torch.full((count, length), NOISE_ID))
        elif kind == "random":
            below = request.vocab_size or tokenizer.vocab_size
            blocks.append(torch.randint(below, (count, length), generator=generator))
        elif kind == "shuffled":
            stream = _long_enough("multilingual", streams, length)
            blocks.append(shuffled(stream.ids, count, length, generator))
        else:
            stream = _long_enough(kind, streams, length)
            offsets = row_offsets(stream, count, length)
            blocks.append(cut(stream, offsets, length, bos=tokenizer.bos_token_id))
            notes += short_notes(kind, len(streams(kind).ids), offsets, length)
    kinds = tuple(kind for kind, count in counts.items() for _ in range(count))
    return CalibrationRows(ids=torch.cat(blocks), kinds=kinds, notes=tuple(notes))


def _stream(kind: str, texts: Sequence[str], tokenizer: Tokenizer) -> Stream:
    """Tokenize one kind: articles and stories one by one with BOS and EOS, the rest in one go."""
    if kind not in ("encyclopedia", "stories"):
        between = "\n\n" if kind == "web" else "\n"
        return Stream(tokenizer.encode(between.join(f"{text}\n" for text in texts)))
    stream = Stream()
    for text in texts:
        look()
        body = text.partition("\n")[2].strip() if kind == "encyclopedia" else text
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = bos + tokenizer.encode(body, add_eos=True)
        has_bos = ids[:1] == [tokenizer.bos_token_id]
        stream.starts.append(len(stream.ids) + has_bos)
        stream.ids.extend(ids)
    return stream


def _long_enough(kind: str, streams: Callable[[str], Stream], length: int) -> Stream:
    """Return the kind's stream, extended by other kinds if it is shorter than a row."""
    stream = streams(kind)
    if len(stream.ids) >= length:
        return stream
    ids = list(stream.ids)
    after = TEXT_KINDS.index(kind) + 1
    for other in (*TEXT_KINDS[after:], *TEXT_KINDS[: after - 1]):
        if len(ids) < 2 * length:
            ids += streams(other).ids
    if len(ids) < length:
        raise NotEnoughRows(
            f"the standard calibration set has {len(ids)} tokens with this tokenizer, one row "
            f"needs {length}; lower `row_tokens` or give a longer Parquet file of your own"
        )
    return Stream(ids, stream.starts)


def further_file_rows(
    path: Path, tokenizer: Tokenizer, *, after: int, rows: int, row_tokens: int
) -> torch.Tensor:
    """Return whole rows of a file behind its first `after` ones, int64 (at most `rows`, t)."""
    ids = _ids_of_file(path, tokenizer, most=(after + rows) * row_tokens)
    count = max(0, min(rows, len(ids) // row_tokens - after))
    begin = after * row_tokens
    return torch.tensor(ids[begin : begin + count * row_tokens], dtype=torch.int64).view(
        count, row_tokens
    )


def _ids_of_file(path: Path, tokenizer: Tokenizer, *, most: int) -> list[int]:
    """Return the records' tokens without BOS and EOS, `most` of them or a record more."""
    ids: list[int] = []
    for values in records(path, None):
        look()
        ids += tokenizer.encode(" ".join(values))
        if len(ids) >= most:
            break
    return ids


def _rows_of_file(path: Path, tokenizer: Tokenizer, request: RowRequest) -> CalibrationRows:
    """Cut the file's tokens into rows."""
    count, length = request.rows, request.row_tokens
    ids = _ids_of_file(path, tokenizer, most=count * length)
    if len(ids) < length:
        raise NotEnoughRows(
            f"`{path}` has {len(ids)} tokens, one row needs {length} and {count} rows need "
            f"{count * length}; add text or lower `row_tokens`"
        )
    stream = Stream(ids)
    offsets = row_offsets(stream, count, length)
    notes = short_notes(path.name, len(ids), offsets, length)
    rows = cut(stream, offsets, length, bos=None)
    return CalibrationRows(ids=rows, kinds=("text",) * count, notes=tuple(notes))
