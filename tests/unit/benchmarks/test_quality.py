"""What the quality benchmark counts and shares."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from quality import Conversion, lend, planned, row, stage_seconds

PEER = {"bytes": 1000, "perplexity": 20.0, "kl_divergence": 0.4, "top1_agreement": 0.5}


def write_stage(root: Path, stage: str, seconds: float, inputs: dict[str, str]) -> Path:
    folder = root / "model-0123" / stage / f"{stage:0<16}"
    folder.mkdir(parents=True)
    manifest = {"stage": stage, "seconds": seconds, "inputs": inputs}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_seconds_count_every_stage_that_a_result_came_from_once(tmp_path: Path) -> None:
    fingerprints = {name: f"{name:0<16}and more" for name in ("tokenize", "measure", "quantize")}
    write_stage(tmp_path, "tokenize", 1.0, {})
    write_stage(tmp_path, "measure", 2.0, {"tokenize": fingerprints["tokenize"]})
    write_stage(tmp_path, "compile", 100.0, {})
    last = write_stage(
        tmp_path, "quantize", 4.0, {k: fingerprints[k] for k in ("tokenize", "measure")}
    )

    assert stage_seconds(last) == {"tokenize": 1.0, "measure": 2.0, "quantize": 4.0}


def test_only_what_does_not_depend_on_the_bitrate_is_lent(tmp_path: Path) -> None:
    for stage in ("tokenize", "sensitivity", "measure", "allocate", "quantize"):
        write_stage(tmp_path / "first", stage, 1.0, {})

    for _ in range(2):
        lend(tmp_path / "first", tmp_path / "second")

    lent = {path.parents[1].name for path in (tmp_path / "second").rglob("manifest.json")}
    assert lent == {"tokenize", "sensitivity", "measure"}


def test_a_row_has_ratios_beside_a_peer_only() -> None:
    found = {**PEER, "bytes": 900, "kl_divergence": 0.1, "seconds": 12.34, "peak": 1234.5}

    assert row("fast", 3.0, found, PEER) == (
        "| fast | 3 | 900 | 0.90000 | 20.00 | 0.10000 | 0.250 | 0.5000 | 12.3 | 1,234 |"
    )
    assert row("fast", 3.0, found, None) == (
        "| fast | 3 | 900 |  | 20.00 | 0.10000 |  | 0.5000 | 12.3 | 1,234 |"
    )


def test_totals_are_the_peers_bytes_for_presets_that_measure_the_head() -> None:
    arguments = Namespace(quality=["fast", "exllamav2"], bpw=[2.5], total=[])

    conversions = planned(arguments, {3.0: PEER})

    assert [(c.name, c.target) for c in conversions] == [
        ("fast-2.5bpw", ("--bpw", 2.5)),
        ("exllamav2-2.5bpw", ("--bpw", 2.5)),
        ("fast-3bpw-total", ("--target-bytes", 1000)),
    ]


def test_totals_need_the_peers_figures() -> None:
    arguments = Namespace(quality=["fast"], bpw=[], total=[4.0])

    with pytest.raises(SystemExit, match=r"4\.0"):
        planned(arguments, {3.0: PEER})


def test_conversions_have_folders_of_their_own() -> None:
    conversions = [
        Conversion(quality=quality, bpw=bpw, target_bytes=target)
        for quality in ("fast", "best")
        for bpw in (2.5, 3.0)
        for target in (None, 1000)
    ]

    assert len({conversion.name for conversion in conversions}) == 8
