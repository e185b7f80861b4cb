"""The source of plans."""

from pathlib import Path

import pytest
from tiny import make_tiny


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")
