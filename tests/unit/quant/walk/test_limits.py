"""What a limit of a GPU's memory changes is in fingerprints, and nothing else of it."""

from pathlib import Path

import pytest
from conversions import small_config
from pydantic import ByteSize
from tiny import make_tiny

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.runtime.memory import usable
from exl2flow.core.store.stage import Pipeline
from exl2flow.model.layers.stream import CALIBRATION_TENSORS, rows_together
from exl2flow.pipeline.stages import REFINE_STAGES, STAGES
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.pinned import BYTES

TIGHT = "1GiB"  # nothing of it is left for tensors
AMPLE = "24GB"
WALKS = {"sensitivity", "measure", "allocate", "quantize"}
REFINING = {"sensitivity", "refine", "tune", "judge"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source") / "model")


def fingerprints(source: Path, device: str, max_memory: str | None) -> dict[str, str]:
    config = small_config(source, source.parent / "out", max_memory=max_memory)
    return {n: r.fingerprint for n, r in Pipeline(config, STAGES, device=device).refs.items()}


@pytest.mark.parametrize("rounds", [0, 1])
def test_every_stage_that_passes_rows_through_sublayers_knows_the_limit(
    source: Path, rounds: int
) -> None:
    values = {"max_memory": TIGHT, "allocate": {"rounds": rounds}}
    config = small_config(source, source.parent / "out", **values)

    knowing = {s.name for s in STAGES if s.enabled(config) and s.gpu_options(config)}

    assert knowing == (WALKS if rounds else WALKS - {"allocate"})


def test_every_stage_of_a_refinement_that_walks_knows_the_limit(source: Path) -> None:
    out = source.parent / "out"
    config = RefinementConfig(source=source, model=source, out=out, max_memory=ByteSize(2**30))

    assert {stage.name for stage in REFINE_STAGES if stage.gpu_options(config)} == REFINING


@pytest.mark.parametrize(("limit", "rows"), [(0, 1), (2, 2), (3.9, 3), (4, 4), (100, 4)])
def test_rows_together_follow_the_limit_up_to_four(limit: float, rows: int) -> None:
    row = 2048 * 11008 * 4

    assert rows_together(11008, 2048, int(limit * CALIBRATION_TENSORS * row)) == rows


def test_effect_names_rows_and_matrices_that_the_limit_changes(source: Path) -> None:
    config = small_config(source, source.parent / "out", max_memory=TIGHT)

    found = effect_of_limit(config, 64)["limit"]

    assert usable(config.max_memory) < BYTES * 64 * 64
    assert isinstance(found, dict)
    assert found["rows_together"] == {"64": 1, "96": 1}  # attention, MLP
    assert {64 * 64, 64 * 96, 2 * 64 * 96, 64 * 301, 64 * 320} <= set(found["tall"])


def test_effect_names_rows_that_pass_experts(tmp_path: Path) -> None:
    source = make_tiny("qwen2-moe", tmp_path / "model")
    config = small_config(source, tmp_path / "out", max_memory=TIGHT)

    found = effect_of_limit(config, 64)["limit"]

    assert isinstance(found, dict)
    assert found["rows_together"] == {"64": 1, "64 of experts": 1}


def test_fingerprints_on_a_gpu_follow_a_limit_that_changes_the_walk(source: Path) -> None:
    free, tight = (fingerprints(source, "cuda", limit) for limit in (None, TIGHT))

    changed = {name for name in free if free[name] != tight[name]}
    assert changed >= WALKS
    assert "tokenize" not in changed


def test_fingerprints_do_not_follow_a_limit_without_effect(source: Path) -> None:
    assert fingerprints(source, "cuda", AMPLE) == fingerprints(source, "cuda", None)
    assert fingerprints(source, "cpu", TIGHT) == fingerprints(source, "cpu", None)
    assert fingerprints(source, "cuda", None) == fingerprints(source, "cpu", None)
