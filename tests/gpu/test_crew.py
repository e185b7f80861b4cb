"""On GPUs, several processes write the bytes of one; two may share a GPU."""

from pathlib import Path

import pytest
from conversions import small_config
from tiny import make_tiny
from traces import contents

from exl2flow.core.store import stage
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import STAGES, run_in_order

pytestmark = pytest.mark.gpu

SHARED = ("sensitivity", "measure", "quantize", "compile")
CALIBRATION = {"text": "standard", "rows": 10, "row_tokens": 128, "measure_rows": 4}


def converted(source: Path, folder: Path, gpus: str | None) -> dict[str, dict[str, str]]:
    """Convert, and return the digests of the files of the stages that GPUs share, by stage."""
    config = small_config(
        source,
        folder / "out",
        device="cuda",
        bpw=4.0,
        quality="standard",
        gpus=gpus,
        calibration={**CALIBRATION, "measure_row_tokens": 128},
        sensitivity={"rows": 6},
    )
    pipeline = open_pipeline(config, STAGES)
    run_in_order(pipeline)
    made = {name: contents(pipeline.path(name)) for name in SHARED}
    made["out"] = {k: v for k, v in contents(config.out).items() if k.endswith(".safetensors")}
    return {
        name: {file: digest for file, digest in files.items() if file != "manifest.json"}
        for name, files in made.items()
    }


@pytest.mark.parametrize("family", ["llama", "qwen2-moe"])
@pytest.mark.parametrize(
    "places",
    [
        ["cuda:0", "cuda:0"],
        pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.multigpu),
        pytest.param(["cuda:1", "cuda:0"], marks=pytest.mark.multigpu),
    ],
)
def test_two_processes_write_the_bytes_of_one(
    family: str, places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny(family, tmp_path / "model")
    alone = converted(source, tmp_path / "alone", None)
    monkeypatch.setattr(stage, "places", lambda gpus, device: places)

    together = converted(source, tmp_path / "together", "2")

    assert together == alone
