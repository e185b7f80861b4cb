"""`exl2flow bench`: its table, its JSON, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.cli.output.results import _plan_row, _speed_summary, _timing_row, show_speed
from exl2flow.inference.bench import DecodePlan, Memory, Speed, Timing
from exl2flow.kernels import CardFacts

DEMO = Path(__file__).parents[3] / "demo" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


def run(folder: Path, *options: object) -> Result:
    words = ["bench", str(folder), "--device", "cpu", *map(str, options)]
    return CliRunner().invoke(app, words)


def test_the_table_has_a_line_for_each_piece_of_work(folder: Path) -> None:
    done = run(folder, "--rows", "1,2", "--context", 30)

    assert done.exit_code == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["device", "CPU,"] in [line[:2] for line in lines]
    works = [line[:3] for line in lines if line and line[0] in ("prompt", "decode")]
    assert works == [["prompt", "1", "255"], ["decode", "1", "30"], ["decode", "2", "30"]]
    assert ["path", "torch,", "without", "a", "GPU"] in lines
    assert "copy" not in done.stdout
    assert "slots" not in done.stdout
    assert "decoding 2 rows" in done.stderr


def test_json_is_one_object_for_the_demo_model() -> None:
    done = run(DEMO, "--rows", 2, "--context", 16, "--cache", "q4", "--json")

    found = json.loads(done.stdout)
    assert [(t["work"], t["rows"], t["context"]) for t in found["timings"]] == [
        ("prompt", 1, 512),
        ("prompt", 1, 2047),
        ("decode", 2, 16),
    ]
    assert found["cache"] == "q4"
    assert (found["cards"], found["plans"]) == ([], [])
    assert set(found["versions"]) == {"exl2flow", "torch", "python"}
    assert done.stderr == ""


def test_a_gpu_has_more_columns() -> None:
    steps = Timing(work="decode", rows=4, context=512, seconds=0.002, read_bytes=3_600_000_000)
    prompt = Timing(work="prompt", rows=1, context=2048, seconds=0.05)
    speed = speed_of(
        device="H200, 141 GiB",
        load_seconds=1.2,
        file_bytes=3_600_000_000,
        timings=(prompt, steps),
        memory=Memory(weights=3_900_000_000, cache=10**9, peak=6 * 10**9),
        copy_rate=4500.0,
    )

    assert _timing_row(steps, speed) == {
        "work": "decode",
        "rows": "4",
        "context": "512",
        "ms": "2.000",
        "tokens/s": "2,000.0",
        "share of a copy": "40 %",
    }
    assert _timing_row(prompt, speed)["share of a copy"] == ""
    lines = dict(_speed_summary(speed))
    assert lines["device"] == "H200, 141 GiB, copies at 4,500 GB/s"
    assert lines["load"] == "1.20 s, 3.60 GB, 3.00 GB/s"
    assert lines["memory"] == "weights 3.90 GB, cache at most 1.00 GB, peak 6.00 GB"


CARD = CardFacts(capability=86, processors=82, shared=99 << 10)
CHAIN = DecodePlan(
    rows=1,
    launches=1,
    kernels=("product<1, false>",),
    slots=3,
    ctas=82,
    shared=98 << 10,
    fill=0.914,
)


def test_the_path_names_each_kind_of_gpu_once() -> None:
    newer = CardFacts(capability=90, processors=132, shared=227 << 10)

    assert dict(_speed_summary(speed_of(cards=(CARD, CARD, newer))))["path"] == (
        "sm_86 with cp.async, 82 multiprocessors, 99 KB of shared memory per CTA; "
        "sm_90 with bulk copies, 132 multiprocessors, 227 KB of shared memory per CTA"
    )


@pytest.mark.parametrize(
    ("plan", "cells"),
    [
        (CHAIN, ["1", "chain", "1", "product<1, false>", "3", "82", "98", "91 %"]),
        (
            replace(CHAIN, rows=4, launches=4, shared=1 + (98 << 10)),
            ["4", "one by one", "4", "product<1, false>", "3", "82", "99", "91 %"],
        ),
        (DecodePlan(rows=64), ["64", "decoded", "", "", "", "", "", ""]),
    ],
)
def test_a_plan_says_how_products_run(plan: DecodePlan, cells: list[str]) -> None:
    assert [*_plan_row(plan).values()] == cells


def test_plans_follow_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    step = Timing(work="decode", rows=1, context=512, seconds=0.002)

    show_speed(speed_of(timings=(step,), cards=(CARD,), plans=(CHAIN,)))

    shown = capsys.readouterr().out
    assert shown.index("decode") < shown.index("Products of a layer") < shown.index("91 %")


def speed_of(**known: Any) -> Speed:
    facts: dict[str, Any] = {"model": "m", "device": "d", "versions": {}, "cache": "fp16"}
    return Speed(**facts | {"load_seconds": 1.0, "file_bytes": 10**9, "timings": ()} | known)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rows", "1,x"), "`--rows 1,x` is not a comma-separated list"),
        (("--rows", "0"), "numbers from 1 on"),
    ],
)
def test_bench_options_out_of_range_print_one_message(
    folder: Path, options: tuple[str, ...], words: str
) -> None:
    done = run(folder, *options)

    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_is_no_model_is_one_message(tmp_path: Path) -> None:
    done = run(tmp_path, "--json")

    assert done.exit_code == 1
    assert "config.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1
