"""Figures that follow from times and bytes."""

import json

import pytest

from exl2flow.inference.bench import DecodePlan, Memory, Speed, Timing
from exl2flow.inference.bench.speed import driver_version
from exl2flow.kernels import CardFacts

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)\n"
    "GCC version:  gcc version 13.3.0\n"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"


def test_a_prompt_has_the_rate_of_its_tokens() -> None:
    timing = Timing(work="prompt", rows=1, context=2048, seconds=0.5)

    assert timing.tokens_per_second == 4096
    assert timing.bytes_per_token is None
    assert timing.share_of_copy(4000.0) is None


@pytest.mark.parametrize("rows", [1, 4])
def test_the_share_of_a_copy_is_that_of_the_bytes_of_a_step(rows: int) -> None:
    timing = Timing(work="decode", rows=rows, context=512, seconds=0.002, read_bytes=3_600_000_000)

    assert timing.tokens_per_second == rows * 500
    assert timing.bytes_per_token == 3.6e9 / rows
    assert timing.share_of_copy(4500.0) == pytest.approx(0.4)  # 3.6 GB in 2 ms: 1,800 GB/s


def test_json_has_tokens_per_second_and_share_of_the_copy_rate() -> None:
    timing = Timing(work="decode", rows=2, context=8, seconds=0.5, read_bytes=10**9)
    speed = Speed(
        model="m",
        device="d",
        versions={"torch": "2"},
        load_seconds=1.0,
        file_bytes=5,
        cache="q4",
        timings=(timing,),
        memory=Memory(weights=1, cache=2, peak=3),
        copy_rate=4.0,
        cards=(CardFacts(capability=90, processors=132, shared=232448),),
        plans=(DecodePlan(rows=64),),
    )

    found = json.loads(json.dumps(speed.to_json()))

    assert found["timings"][0]["tokens_per_second"] == 4
    assert found["timings"][0]["share_of_copy"] == 0.5
    assert found["cards"] == [{"capability": 90, "processors": 132, "shared": 232448}]
    assert found["plans"][0] == {
        "rows": 64,
        "launches": 0,
        "kernels": [],
        "slots": None,
        "ctas": None,
        "shared": None,
        "fill": None,
    }
    assert found["memory"] == {"weights": 1, "cache": 2, "peak": 3}


@pytest.mark.parametrize(
    ("text", "version"), [(OPEN, "570.124.06"), (CLOSED, "550.54.15"), ("", "unknown")]
)
def test_the_driver_is_named_as_the_kernel_knows_it(text: str, version: str) -> None:
    assert driver_version(text) == version
