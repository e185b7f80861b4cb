"""Which GPUs a conversion fits: the least of every stage, verdicts, and refusals."""

import logging
import sys
from pathlib import Path

import pytest

from exl2flow.core.errors import StoreError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.memory import usable
from exl2flow.model import ModelSpec, resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.gpu_fit import (
    CARD_SIZES,
    GpuFit,
    check_gpu,
    fit_on,
    gpu_fits,
    in_words,
)
from exl2flow.quant.forecast.least import StageWork, stage_works

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from shapes import write_config

SHAPES = ("1b", "7b", "14b", "32b", "70b", "command-r7b")
GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    for shape in SHAPES:
        write_config(folder / shape, shape)
    return folder


def model(folder: Path, shape: str, **values: object) -> tuple[ConversionConfig, ModelSpec]:
    source = folder / shape
    given = {"source": source, "out": folder / "out", "bpw": 4.0, **values}
    return ConversionConfig.model_validate(given), resolve(source)


def fits_of(folder: Path, shape: str) -> tuple[GpuFit, ...]:
    config, spec = model(folder, shape)
    return gpu_fits(config, STAGES, spec)


def works(
    folder: Path, shape: str, memory: int = 24 * GB, **values: object
) -> dict[str, StageWork]:
    config, spec = model(folder, shape, **values)
    found = stage_works(config, STAGES, spec, memory)
    return {work.stage: work for work in found}


@pytest.mark.parametrize(
    ("shape", "verdicts"),
    [
        ("1b", "yes yes yes yes yes yes"),
        ("7b", "yes yes yes yes yes yes"),
        ("14b", "yes yes yes yes yes yes"),
        ("32b", "no no no yes yes yes"),
        ("70b", "no no no yes yes yes"),
        ("command-r7b", "perhaps yes yes yes yes yes"),
    ],
)
def test_verdicts_of_usual_shapes(folder: Path, shape: str, verdicts: str) -> None:
    fits = fits_of(folder, shape)

    assert [fit.gigabytes for fit in fits] == list(CARD_SIZES)
    assert [fit.verdict for fit in fits] == verdicts.split()


def test_least_of_an_mlp_is_what_factoring_holds(folder: Path) -> None:
    hidden, mlp, block = 5120, 27648, 512
    weights = 3 * hidden * mlp
    hessians = 4 * (hidden**2 + mlp**2)
    fisher = hessians + 4 * block * (2 * mlp + hidden)

    least = works(folder, "32b")["quantize"]

    # weights as fp16 and fp32; a Hessian that is being factored, and its factor
    assert least.least_bytes == 6 * weights + hessians + fisher + 2 * 4 * mlp**2
    assert least.part == "model.layers.0.mlp"


def test_a_head_counts_as_in_main_memory(folder: Path) -> None:
    numel, hidden, block = 4096 * 256000, 4096, 512

    least = works(folder, "command-r7b")["measure"]

    # as in the file, codes, decoded values; Hessian, Fisher factor and Cholesky factor
    assert least.part == "lm_head"
    assert least.least_bytes == 5 * numel + 3 * 4 * hidden**2 + 4 * block * 256000


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quality", ["standard", "exllamav2"])
def test_the_least_is_below_the_bound(folder: Path, shape: str, quality: str) -> None:
    for memory in (6 * GB, 24 * GB):
        found = works(folder, shape, memory, quality=quality)

        assert "quantize" in found
        for work in found.values():
            assert 0 < work.least_bytes < work.bound_bytes, work


@pytest.mark.parametrize(
    ("shape", "limit", "peaks"),  # GB, docs/benchmarks.md, "Layers of a 7B model on one GPU"
    [
        ("7b", 10, {"sensitivity": 5.2, "measure": 8.5, "quantize": 7.9}),
        ("70b", 24, {"sensitivity": 17.5, "measure": 21.9, "quantize": 21.8}),
    ],
)
def test_the_least_is_below_measured_peaks(
    folder: Path, shape: str, limit: int, peaks: dict[str, float]
) -> None:
    found = works(folder, shape, usable(limit * GB))

    assert found.keys() == peaks.keys()
    for stage, peak in peaks.items():
        assert found[stage].least_bytes < peak * GB, stage


def test_without_fisher_factors_codes_of_all_candidates_are_held(folder: Path) -> None:
    found = works(folder, "70b", quality="exllamav2")

    assert "sensitivity" not in found
    assert found["measure"].least_bytes > found["quantize"].least_bytes


def test_a_stage_that_holds_the_whole_model_cannot_be_reduced(folder: Path) -> None:
    composing = works(folder, "7b", calibration={"text": "self"})["compose"]

    assert composing.least_bytes == composing.bound_bytes > 2 * 6.7 * GB
    config, spec = model(folder, "7b", calibration={"text": "self"})
    assert "no (compose needs " in in_words([fit_on(config, STAGES, spec, 12)])


def test_less_is_reduced_on_a_larger_gpu(folder: Path) -> None:
    config, spec = model(folder, "14b")

    reduced = [fit_on(config, STAGES, spec, gigabytes).reductions for gigabytes in (8, 16, 24)]

    assert reduced == [
        ("fewer rows at a time", "states and head in main memory"),
        ("states in main memory",),
        (),
    ]


def test_sizes_with_one_verdict_are_told_together(folder: Path) -> None:
    assert in_words(fits_of(folder, "32b")) == (
        "8, 12, 16 GB no (quantize needs 16.9 GB for model.layers.0.mlp); "
        "24 GB yes (states in main memory); 32, 80 GB yes"
    )


def test_a_gpu_below_the_least_is_refused_with_what_would_suffice(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, spec = model(folder, "32b")
    least = works(folder, "32b")["quantize"].least_bytes

    with pytest.raises(
        StoreError,
        match=r"^the stage `quantize` needs at least 15\.11 GB .* of `model\.layers\.0\.mlp`, "
        r"15\.11 GB may be used; .*`--max-memory 16\.9GB` or more",
    ):
        check_gpu(config, STAGES, spec, least - 1, ["measure", "quantize"])
    check_gpu(config, STAGES, spec, usable(int(16.9 * GB)), ["measure", "quantize"])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    check_gpu(config, STAGES, spec, 24 * GB, ["measure", "quantize"])
    assert len(caplog.records) == 1


def test_only_stages_that_are_left_count(folder: Path) -> None:
    config, spec = model(folder, "32b")
    memory = works(folder, "32b")["measure"].least_bytes

    check_gpu(config, STAGES, spec, memory, ["measure"])
    check_gpu(config, STAGES, spec, 1, ["compile"])
    with pytest.raises(StoreError, match="`quantize`"):
        check_gpu(config, STAGES, spec, memory, ["measure", "quantize"])
