"""A file that is not what was committed is never used: it is made again."""

from collections.abc import Callable
from pathlib import Path

import pytest
from crash import MANIFEST, STAGES, Conditions, Conversion
from traces import alter, delete, truncate

DAMAGES = [delete, truncate, alter]


@pytest.fixture(scope="module")
def shared(undisturbed: Conversion, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A finished conversion that every test leaves as it was."""
    conversion = undisturbed.after("quantize", tmp_path_factory.mktemp("damaged"))
    conversion.finish()
    return conversion


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name",
    [
        "tokenize/rows.safetensors",
        "sensitivity/factors/0003.safetensors",
        "sensitivity/factors/head.safetensors",
        "measure/sublayers/0003.json",
        "measure/measurement.json",
        "allocate/allocation.json",
        "quantize/sublayers/0004.attention.safetensors",
        "quantize/sublayers/head.safetensors",
        "quantize/manifest.json",
        "compile/manifest.json",
        "validate/report.json",
    ],
)
def test_a_damaged_result_is_noticed_and_made_again(
    undisturbed: Conversion, shared: Conversion, name: str, damage: Callable[[Path], None]
) -> None:
    stage, _, file = name.partition("/")
    damage(shared.stage(stage) / file)

    ended = shared.finish()

    redone = [s for s in STAGES if f"{s} 1/1 cached" not in ended.err]
    assert redone == [stage]
    assert shared.results() == undisturbed.results()
    assert shared.manifest(stage)["status"] == "complete"


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["model-00003-of-00004.safetensors", "config.json", "tokenizer.json"]
)
def test_a_damaged_output_file_is_noticed_and_made_again(
    undisturbed: Conversion, shared: Conversion, name: str, damage: Callable[[Path], None]
) -> None:
    before = shared.finished("compile")
    damage(shared.out / name)

    shared.finish()

    after = shared.finished("compile")
    assert shared.results() == undisturbed.results()
    assert {n for n in after if after[n] != before[n]} <= {str(shared.out / name)}


def test_a_manifest_that_was_edited_is_not_believed(
    undisturbed: Conversion, tmp_path: Path
) -> None:
    conversion = undisturbed.after("allocate", tmp_path)
    conversion.kill("quantize", cursor=5, conditions=Conditions(flush_seconds=0.02))
    path = conversion.stage("quantize") / MANIFEST
    path.write_text(path.read_text().replace('"status": "partial"', '"status": "complete"'))

    conversion.finish()

    assert conversion.results() == undisturbed.results()
