"""Calibration text in Parquet files: the bundled ones, and a user's own."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from exl2flow.core import words
from exl2flow.core.errors import CalibrationError


def check_parquet(path: Path) -> None:
    """Read the first record of a user's file, before hours depend on it.

    Raises:
        CalibrationError: the file cannot be read or holds no text.
    """
    next(records(path, None))


def records(path: Path, columns: list[str] | None) -> Iterator[list[str]]:
    """Yield the texts of each record, nulls and blanks left out; None reads every text column.

    Raises:
        CalibrationError: the file cannot be read or holds no text.
    """
    empty = True
    try:
        with pq.ParquetFile(path) as file:
            _check_names(path, file.schema_arrow)
            names = columns or _text_columns(path, file.schema_arrow)
            for batch in file.iter_batches(columns=names):
                for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    if texts := [value for value in values if value and not value.isspace()]:
                        empty = False
                        yield texts
            if empty:
                raise CalibrationError(
                    f"`{path}` holds no text in {_listed(file.schema_arrow)}; fill its records"
                )
    except FileNotFoundError as error:
        raise CalibrationError(f"no calibration file at `{path}`; check the path") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CalibrationError(
            f"`{path}` cannot be read as Parquet ({words.cause(error)}); give a file with a text "
            "column, as pandas.DataFrame.to_parquet writes it"
        ) from error


def holds_strings(kind: pa.DataType) -> bool:
    """Return whether a column of this type is text, plain or dictionary-encoded."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_names(path: Path, schema: pa.Schema) -> None:
    """Refuse columns of one name: which of them holds the text cannot be told."""
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise CalibrationError(
            f"`{path}` has more than one column named `{twice[0]}`; rename or remove the others"
        )


def _text_columns(path: Path, schema: pa.Schema) -> list[str]:
    """Return the names of the columns that hold strings."""
    names = [column.name for column in schema if holds_strings(column.type)]
    if not names:
        raise CalibrationError(
            f"`{path}` has no text column, only {_listed(schema)}; add one of strings"
        )
    return names


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"`{column.name}` ({column.type})" for column in schema) or "no columns"
