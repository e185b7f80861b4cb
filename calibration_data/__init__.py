"""Paths of the bundled texts: the standard calibration set and the held-out text."""

from pathlib import Path

__all__ = ["heldout", "standard"]

_HERE = Path(__file__).resolve().parent


def standard() -> Path:
    """Return the Parquet file of the standard calibration set."""
    return _HERE / "standard.parquet"


def heldout() -> Path:
    """Return the Parquet file of the text that only validation reads."""
    return _HERE / "heldout.parquet"
