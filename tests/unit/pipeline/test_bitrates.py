"""Results of a sweep: what `sweep.json` says about its bitrates."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.core.options.sweep import SWEEP_FILE, SweepConfig
from exl2flow.core.reports import RowSums, Score
from exl2flow.core.store.files import write_json
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.inference.scoring.intervals import intervals
from exl2flow.inference.validate.stage import REPORT_FILE
from exl2flow.pipeline import bitrates
from exl2flow.pipeline.bitrates import REPORTED, conclude_sweep
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import STAGES

ROWS = 8


def score(kl: float, size: int) -> Score:
    """Return a score of rows that diverge by `kl` on average."""
    sums = RowSums(
        tokens=(100,) * ROWS,
        losses=(200.0,) * ROWS,
        divergences=tuple(100 * kl * (0.8 + 0.4 * row / (ROWS - 1)) for row in range(ROWS)),
        agreements=(90,) * ROWS,
    )
    return Score(
        model="",
        perplexity=7.4,
        reference_perplexity=7.0,
        kl_divergence=kl,
        kl_median=kl,
        kl_p99=kl,
        top1_agreement=0.9,
        tokens=100 * ROWS,
        bytes=size,
        text="digest",
        rows=sums,
        intervals=intervals(sums),
    )


def test_results_of_a_sweep_have_the_differences_between_its_bitrates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitrates, "write_up", lambda out: "")
    source, out = make_tiny("llama", tmp_path / "model"), tmp_path / "out"
    config = SweepConfig.model_validate({"source": source, "out": out, "bpw": (3, 4)})
    found = {"3.0bpw": score(0.5, 1000), "4.0bpw": score(0.1, 2000)}
    for name, conversion in config.models().items():
        folder = conversion.out
        folder.mkdir(parents=True)
        write_json(folder / RECORD_FILE, {"fingerprint": "x", "options": {"quality": "fast"}})
        write_json(folder / SCORE_FILE, {"fingerprint": "x", "score": asdict(found[name])})
        report = open_pipeline(conversion, STAGES).path("validate") / REPORT_FILE
        report.parent.mkdir(parents=True)
        write_json(report, dict.fromkeys(REPORTED, ""))

    conclude_sweep(config, {})

    (difference,) = json.loads((out / SWEEP_FILE).read_text())["differences"]
    assert (difference["model"], difference["minus"]) == ("4.0bpw", "3.0bpw")
    low, high = difference["intervals"]["kl_divergence"]
    assert low < 0.1 - 0.5 < high < 0
