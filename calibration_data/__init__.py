"""Paths of the bundled texts: the standard calibration set, dialogues, the held-out text."""

from pathlib import Path

__all__ = ["chat", "heldout", "standard"]

_HERE = Path(__file__).resolve().parent


def standard() -> Path:
    """Return the Parquet file of the standard calibration set."""
    return _HERE / "standard.parquet"


def chat() -> Path:
    """Return the Parquet file of the dialogues for calibration `chat`."""
    return _HERE / "chat.parquet"


def heldout() -> Path:
    """Return the Parquet file of the text used only by validation."""
    return _HERE / "heldout.parquet"
