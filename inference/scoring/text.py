"""Token rows to validate on: the built-in held-out text or a user's own."""

import logging
from pathlib import Path

import pyarrow.parquet as pq
import torch

from exl2flow import calibration_data
from exl2flow.core import words
from exl2flow.core.errors import CalibrationError, NotEnoughRows
from exl2flow.model import Tokenizer

log = logging.getLogger(__name__)


def text_rows(
    path: Path | None, tokenizer: Tokenizer, *, rows: int, row_tokens: int
) -> torch.Tensor:
    """Cut a text, tokenized as a whole without BOS, into consecutive rows.

    Args:
        path: a UTF-8 text file; None: the held-out text that comes with exl2flow.
        tokenizer: tokenizer of the model to validate.
        rows: most rows; fewer if the text ends earlier.
        row_tokens: tokens per row.

    Returns:
        int64 (rows, row_tokens).

    Raises:
        CalibrationError: the file is not readable as text.
        NotEnoughRows: the text is shorter than one row.
    """
    ids = tokenizer.encode(_read(path))
    count = min(rows, len(ids) // row_tokens)
    if not count:
        raise NotEnoughRows(
            f"`{path or 'the held-out text'}` has {len(ids)} tokens, fewer than one row of "
            f"{row_tokens}; give a longer text or set `--row-tokens` to {len(ids)} or less"
        )
    if count < rows:
        log.info("text has %d rows of %d tokens, %d were requested", count, row_tokens, rows)
    return torch.tensor(ids[: count * row_tokens], dtype=torch.int64).view(count, row_tokens)


def _read(path: Path | None) -> str:
    if path is None:
        table = pq.read_table(calibration_data.heldout(), columns=["text"])
        return "\n\n".join(table.column("text").to_pylist())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"cannot read `{path}` as UTF-8 text: {words.cause(error)}; give a plain text file"
        ) from error
