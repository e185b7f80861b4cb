"""`exl2flow bench`: its table, its JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.flows.cli.main import app
from exl2flow.flows.cli.results import _speed_summary, _timing_row
from exl2flow.inference.bench import Memory, Speed, Timing

DEMO = Path(__file__).parents[4] / "demo" / "model"


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
    assert "copy" not in done.stdout
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
    assert set(found["versions"]) == {"exl2flow", "torch", "python"}
    assert done.stderr == ""


def test_a_gpu_has_more_columns() -> None:
    steps = Timing(work="decode", rows=4, context=512, seconds=0.002, read_bytes=3_600_000_000)
    prompt = Timing(work="prompt", rows=1, context=2048, seconds=0.05)
    speed = Speed(
        model="m",
        device="H200, 141 GiB",
        versions={"driver": "570.1"},
        load_seconds=1.2,
        file_bytes=3_600_000_000,
        cache="fp16",
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
