"""Checks of the calibration before a run: its files, the tokenizer, the number of rows."""

import logging

from exl2flow.core.errors import NotEnoughRows, StoreError
from exl2flow.core.options.config import RunOptions
from exl2flow.model import ModelSpec, Tokenizer
from exl2flow.quant.tokenize.dialogues import check_template, load_template
from exl2flow.quant.tokenize.mix import TEXT_KINDS, RowRequest, row_counts
from exl2flow.quant.tokenize.parquet import check_parquet

log = logging.getLogger(__name__)


def check_files(config: RunOptions) -> None:
    """Check that the files named by the user exist."""
    text = config.validation.text if config.validation else None
    named = (config.calibration.file, config.measurement_file, text)
    missing = [str(path) for path in named if path is not None and not path.is_file()]
    if missing:
        raise StoreError(f"no such file: {', '.join(f'`{name}`' for name in missing)}")
    if config.calibration.file is not None:
        check_parquet(config.calibration.file)


def check_tokenizer(config: RunOptions, spec: ModelSpec) -> None:
    """Encode a sentence and, for `--calibration chat`, render the shortest conversation."""
    tokenizer = Tokenizer.load(spec.source_dir)
    if len(tokenizer.encode("The quick brown fox.")) == 0:
        raise NotEnoughRows(
            f"the tokenizer of `{spec.source_dir}` returns no tokens for plain text"
        )
    if config.calibration.text == "chat":
        check_template(load_template(spec.source_dir, tokenizer))


def check_rows(config: RunOptions, spec: ModelSpec) -> None:
    """Warn about rows too long for the model; refuse a single row of text where some judge."""
    calibration = config.calibration
    judging = config.judges
    count = _rows_of_text(config, spec)
    if judging and count < 2:
        raise NotEnoughRows(
            f"{' and '.join(judging)} set rows of text aside to judge by, but {count} of "
            f"`--rows`, {calibration.rows}, would be text; raise it, or choose another `--quality`"
        )
    longest = max(calibration.row_tokens, calibration.measure_row_tokens)
    if longest > spec.max_positions:
        log.warning("rows of %d tokens exceed the model's %d", longest, spec.max_positions)


def _rows_of_text(config: RunOptions, spec: ModelSpec) -> int:
    """Return how many calibration rows are text; only the standard set has others."""
    asked = config.calibration
    if asked.text not in ("auto", "standard"):
        return asked.rows
    noise = spec.family.noise_rows
    counts = row_counts(RowRequest(rows=asked.rows, row_tokens=asked.row_tokens, noise=noise))
    return sum(counts[kind] for kind in TEXT_KINDS)
