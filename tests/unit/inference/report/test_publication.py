"""Which sets of bitrates are refused before publication, because more bits do not help."""

import pytest
from packed_models import make_packed

from exl2flow.core.reports import RowSums, Score
from exl2flow.inference.report.publication import Bitrate, doubts, quality_problems
from exl2flow.model import ModelSpec

ROWS = tuple(0.05 * index for index in range(12))  # their mean is 0.275


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return make_packed("llama", tmp_path_factory.mktemp("model") / "exl2")


def bitrate(spec: ModelSpec, size: int, *divergences: float, has_rows: bool = True) -> Bitrate:
    """Return a model of so many bytes, and the divergence of each row."""
    rows = RowSums(
        tokens=(10,) * len(divergences),
        losses=(20.0,) * len(divergences),
        divergences=tuple(10 * each for each in divergences),
        agreements=(9,) * len(divergences),
    )
    kl = sum(divergences) / len(divergences)
    score = Score(
        model=str(spec.source_dir),
        perplexity=10.0,
        reference_perplexity=9.0,
        kl_divergence=kl,
        kl_median=kl,
        kl_p99=kl,
        top1_agreement=0.9,
        tokens=10 * len(divergences),
        bytes=size,
        text="text",
        rows=rows if has_rows else None,
    )
    return Bitrate(
        folder=spec.source_dir,
        branch=f"{size}bpw",
        bpw=float(size),
        weight_bytes=size,
        record={},
        score=score,
        spec=spec,
    )


def test_a_rise_that_is_sure_is_a_problem(spec: ModelSpec) -> None:
    models = [bitrate(spec, 1, *ROWS), bitrate(spec, 2, *(row + 0.1 for row in ROWS))]

    [problem] = quality_problems(models, max_kl=1.0)

    assert problem.startswith("KL divergence rises with bytes: ")
    assert problem.endswith("95 % interval of the difference 0.10000 to 0.10000")
    assert doubts(models) == []


@pytest.mark.parametrize(("rows", "has_rows"), [(12, False), (7, True)])
def test_without_an_interval_any_rise_is_a_problem(
    spec: ModelSpec, rows: int, has_rows: bool
) -> None:
    smaller = bitrate(spec, 1, *ROWS[:rows], has_rows=has_rows)
    larger = bitrate(spec, 2, *(row + 0.01 for row in ROWS[:rows]), has_rows=has_rows)

    [problem] = quality_problems([smaller, larger], max_kl=1.0)

    assert problem.startswith("KL divergence rises with bytes: ")
    assert problem.endswith("95 % interval of the difference is not known")
    assert doubts([smaller, larger]) == []
    assert quality_problems([bitrate(spec, 1, 0.3), bitrate(spec, 2, 0.2)], max_kl=1.0) == []


def test_a_rise_that_may_be_chance_is_a_doubt_and_no_problem(spec: ModelSpec) -> None:
    other_rows = [row + 0.01 for row in reversed(ROWS)]  # are hard for the larger model
    models = [bitrate(spec, 1, *ROWS), bitrate(spec, 2, *other_rows)]

    assert quality_problems(models, max_kl=1.0) == []
    [doubt] = doubts(models)
    assert "but the 95 % interval of the difference, -" in doubt
    assert doubt.endswith("includes zero")
