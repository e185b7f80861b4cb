"""A flipped bit that neither size nor times show: a named error, or the file is made again."""

import errno
from pathlib import Path

import pytest
import torch
from flipped_bits import flip_unseen
from toy_conversions import RAN, STAGES, begun, convert, other

from exl2flow.core.errors import CorruptCheckpoint, ReadFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store import damage
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import StageFolder

FILE = "sublayers/1.safetensors"


def test_damaged_input_is_a_named_error_and_made_again_once_it_is_deleted(
    config: ConversionConfig,
) -> None:
    folder = convert(config).path("quantize")
    whole = (folder / FILE).read_bytes()
    flip_unseen(folder, FILE, 4000)
    damage.distrust()
    elsewhere = other(config, out=config.out.with_name("b"))

    with pytest.raises(CorruptCheckpoint, match=f"`{folder / FILE}`: not what stage `quantize`"):
        convert(elsewhere)

    (folder / FILE).unlink()
    convert(elsewhere)
    assert (folder / FILE).read_bytes() == whole


def test_inputs_are_read_once_per_process(config: ConversionConfig) -> None:
    folder = convert(config).path("quantize")
    damage.distrust()
    convert(other(config, out=config.out.with_name("b")))
    flip_unseen(folder, FILE, 4000)

    convert(other(config, out=config.out.with_name("c")))  # no error

    damage.distrust()
    with pytest.raises(CorruptCheckpoint):
        convert(other(config, out=config.out.with_name("d")))


def test_stage_that_was_just_finished_is_trusted(config: ConversionConfig) -> None:
    pipeline = Pipeline(config, STAGES, device="cpu")
    for name in ("measure", "allocate", "quantize"):
        pipeline.run(name, progress=silent)
    flip_unseen(pipeline.path("quantize"), FILE, 4000)
    folder = StageFolder.load(pipeline.path("quantize"))
    assert folder is not None

    assert damage.altered(folder) == []
    damage.distrust()
    assert damage.altered(folder) == [FILE]


def test_damaged_result_of_a_stage_that_resumes_is_made_again(
    config: ConversionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(config, "allocate").path("allocate")
    flip_unseen(folder, "note", 3)
    RAN.clear()

    convert(config)

    assert RAN[0] == "allocate"
    assert (folder / "note").read_text() == "allocate"
    assert f"`{folder / 'note'}` is damaged and made again" in caplog.text


def test_damaged_result_is_no_longer_recorded(config: ConversionConfig) -> None:
    pipeline = convert(config)
    flip_unseen(pipeline.path("quantize"), FILE, 4000)
    folder = StageFolder.load(pipeline.path("quantize"))
    assert folder is not None
    damage.distrust()

    damage.forget_damaged(folder)

    assert FILE not in folder.manifest.files
    assert folder.valid("sublayers/0.safetensors")


def test_files_without_a_digest_or_changed_visibly_are_not_compared(
    config: ConversionConfig,
) -> None:
    folder = StageFolder.load(convert(config).path("quantize"))
    assert folder is not None
    damage.distrust()
    (folder.path / FILE).unlink()
    record = folder.manifest.files["note"]
    folder.manifest.files["note"] = record.model_copy(update={"sha256": None})

    assert damage.altered(folder) == []


def test_file_that_cannot_be_read_is_a_named_error(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StageFolder.load(convert(config).path("quantize"))
    assert folder is not None
    damage.distrust()

    def failing(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(damage, "digest", failing)

    with pytest.raises(ReadFailed, match="Input/output error"):
        damage.altered(folder)


def test_damaged_output_is_found_before_it_is_published(config: ConversionConfig) -> None:
    pipeline = convert(config)
    convert(other(config, bpw=2.5, out=config.out.with_name("b")))
    file = config.out / "1.safetensors"
    flip_unseen(pipeline.path("compile"), str(file), 5)
    damage.distrust()

    damage.check_output(config.out.with_name("b"), config.work_dir_root)
    damage.check_output(config.out.with_name("unknown"), config.work_dir_root)
    with pytest.raises(CorruptCheckpoint, match=f"`{file}`: not what stage `compile` wrote"):
        damage.check_output(config.out, config.work_dir_root)


def test_damaged_states_are_not_loaded(
    config: ConversionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StageFolder.load(begun(config, "quantize").path("quantize"))
    assert folder is not None
    states = torch.ones(10)
    folder.save_states(states, 3)
    loaded = folder.load_states()
    assert loaded is not None
    assert torch.equal(loaded[1], states)

    flip_unseen(folder.path, "states-a.safetensors", 8 * 100)

    found = StageFolder.load(folder.path)
    assert found is not None
    assert found.load_states() is None
    assert f"the saved states in `{folder.path}` are damaged" in caplog.text
