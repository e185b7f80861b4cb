"""Calibration text from a pandas DataFrame: written as the Parquet file that `tokenize` reads."""

import hashlib
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from exl2flow.core.errors import CalibrationError
from exl2flow.core.options.config import CalibrationOptions
from exl2flow.core.store.files import replacing
from exl2flow.quant.tokenize.parquet import holds_strings

FOLDER = Path(".exl2flow")  # where checkpoints are by default, too
DIGITS = 12  # of the content's sha256, in the name of the file


def calibrate_on(
    frame: pd.DataFrame, *, folder: Path | str = FOLDER, **options: int
) -> CalibrationOptions:
    """Return calibration options whose text is that of a frame.

    The columns of strings are written to `calibration-<digest>.parquet`; other columns and the
    index are left out. The same text gets the same file, and stages go by its content, as for any
    Parquet file.

    Args:
        frame: a row per record; the strings of a row are joined with blanks, nulls left out.
        folder: where the file goes.
        options: other fields of `CalibrationOptions`, such as `rows`.

    Raises:
        CalibrationError: the frame has no text, or a column that Parquet cannot hold.
        WriteFailed: the file cannot be written.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(_text(frame), sink)
    content = sink.getvalue()
    name = f"calibration-{hashlib.sha256(content).hexdigest()[:DIGITS]}.parquet"
    path = Path(folder).expanduser().resolve() / name
    with replacing(path) as file:
        file.write(content)
    return CalibrationOptions(text=str(path), **options)


def _text(frame: pd.DataFrame) -> pa.Table:
    """Return the columns that hold strings."""
    columns: dict[str, pa.Array] = {}
    for name, column in frame.items():
        try:
            values = pa.array(column, from_pandas=True)
        except pa.ArrowException as error:
            raise CalibrationError(
                f"column `{name}` of the DataFrame cannot be stored as Parquet ({error}); make it "
                "strings, or drop it"
            ) from error
        if holds_strings(values.type):
            unique = str(name) if str(name) not in columns else f"{name}.{len(columns)}"
            columns[unique] = values
    if not any(
        value.as_py() and not value.as_py().isspace() for v in columns.values() for value in v
    ):
        kinds = ", ".join(f"`{name}` ({column.dtype})" for name, column in frame.items())
        raise CalibrationError(
            f"the DataFrame holds no text in {kinds or 'no columns'}; give a column of strings"
        )
    return pa.table(columns)
