"""A conversion that is certain to run out of a GPU's memory is refused before any work."""

from pathlib import Path

import pytest
import torch
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.core.runtime import memory
from exl2flow.quant.forecast import preflight

TOTAL = 80 * 10**9


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free GPU of 80 GB, as plans see it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL, TOTAL))
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    monkeypatch.setattr(memory, "_limits", {})
    monkeypatch.setattr(preflight, "resolve_device", lambda device: torch.device("cuda"))


def convert(tmp_path: Path, limit: str, *more: str) -> Result:
    source = tmp_path / "model"
    if not source.exists():
        make_tiny("llama", source)
    words = ("convert", str(source), "--out", str(tmp_path / "out"), "--bpw", "4", *more)
    sizes = ("--rows", "2", "--row-tokens", "64", "--measure-rows", "1")
    sizes += ("--measure-row-tokens", "64")
    where = ("--device", "cuda", "--max-memory", limit, "--no-prefect")
    return CliRunner().invoke(app, [*words, *sizes, *where])


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_less_than_the_least_is_refused_and_nothing_is_written(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    result = convert(tmp_path, "1.1GB", *more)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: the stage `measure` needs at least ")
    assert " of the GPU's memory for the tensors of `" in result.stderr
    assert "`--max-memory 1.2GB` or more" in result.stderr
    assert "`--device cpu`" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_memory_that_the_error_names_suffices(tmp_path: Path) -> None:
    result = convert(tmp_path, "1.2GB", "--dry-run")

    assert result.exit_code == 0, result.output
    assert "GPU fit      8, 12, 16, 24, 32, 80 GB yes" in result.stdout
