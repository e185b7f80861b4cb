"""Copies of the source's small files: an error names the file that is at fault."""

from pathlib import Path

import pytest

from exl2flow.core.errors import SourceModelError, WriteFailed
from exl2flow.quant.compile.stage import carry

UNREADABLE = Path("/proc/self/mem")  # can be opened; reading its beginning is an I/O error


def test_file_that_cannot_be_read_is_named_not_the_copy(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match=r"cannot read `/proc/self/mem`: Input/output error"):
        carry(UNREADABLE, tmp_path / "copy")

    assert list(tmp_path.iterdir()) == []


def test_copy_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")

    with pytest.raises(WriteFailed, match=r"cannot write `.*/file/copy`"):
        carry(tmp_path / "file", tmp_path / "file" / "copy")
