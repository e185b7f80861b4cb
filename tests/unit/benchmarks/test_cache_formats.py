"""The benchmark of cache formats on a tiny model."""

import sys
from pathlib import Path

import pytest
from tiny import make_tiny

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import cache_formats


def test_every_format_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny("llama", tmp_path / "model")
    options = ["--model", str(model), "--rows", "1", "--row-tokens", "24"]
    monkeypatch.setattr(sys, "argv", ["cache_formats.py", *options, "--formats", "fp16", "q4"])

    cache_formats.main()

    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [cells[0].strip() for cells in lines] == ["none", "fp16", "q4"]
    kl = [float(cells[2]) for cells in lines]
    assert kl[0] == 0
    assert 0 <= kl[1] < kl[2] < 0.1
    assert float(lines[1][4]) > float(lines[2][4])
