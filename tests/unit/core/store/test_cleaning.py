"""What `clean` finds and removes: work roots of toy stages that write real files."""

import shutil
from pathlib import Path

import pytest
from toy_conversions import (
    RAN,
    STAGES,
    begun,
    convert,
    model,
    noted,
    other,
    paths,
    places,
    quantized,
    stage,
    stages_of,
)

from exl2flow.core.errors import ConfigError, WorkDirBusy, WriteFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store import cleaning
from exl2flow.core.store.cleaning import clean, clean_after, unneeded
from exl2flow.core.store.stage import Pipeline

TENSORS = 2 * (1000 * 8)  # bytes of the contents of `quantize`


@pytest.fixture
def config(tmp_path: Path, root: Path) -> ConversionConfig:
    return ConversionConfig(source=model(tmp_path / "model"), out=tmp_path / "out", work_root=root)


def test_of_a_finished_conversion_only_the_quantized_tensors_can_go(
    config: ConversionConfig, root: Path
) -> None:
    made = convert(config)

    (item,) = unneeded(root, STAGES)

    assert (item.path, item.is_tensors) == (made.path("quantize"), True)
    assert TENSORS < item.size < TENSORS + 500  # headers
    assert item.why == "its tensors are in the output, which is complete"


@pytest.mark.parametrize("removable", [True, False])
def test_tensors_that_the_output_has_too_can_go(
    removable: bool, config: ConversionConfig, root: Path
) -> None:
    stages = (
        stage("tune", run=quantized, removable=removable),
        stage("compile", "tune", options=places, run=noted),
        stage("validate", "compile"),
    )
    pipeline = Pipeline(config, stages, device="cpu")
    for each in stages:
        pipeline.run(each.name, progress=silent)

    expected = stages_of(pipeline, "tune") if removable else set()
    assert paths(unneeded(root, stages), tensors=True) == expected


def test_conversion_whose_output_is_forgotten_is_not_finished(
    config: ConversionConfig, root: Path
) -> None:
    made = convert(config)
    shutil.rmtree(made.path("compile"))

    assert unneeded(root, STAGES) == []
    rest = stages_of(made, "measure", "allocate", "quantize", "validate")
    assert paths(unneeded(root, STAGES, partial=True)) == rest


def test_cleaned_conversion_is_complete_and_nothing_runs_again(
    config: ConversionConfig, root: Path
) -> None:
    made = convert(config)
    RAN.clear()

    items = clean(root, STAGES)

    assert paths(items, tensors=True) == stages_of(made, "quantize")
    assert list(root.rglob("*.safetensors")) == []
    assert all(map(made.is_complete, made.stages))
    convert(config)
    assert RAN == []
    assert unneeded(root, STAGES) == clean(root, STAGES) == []


def test_cleaned_stage_is_made_again_when_it_is_needed(
    config: ConversionConfig, root: Path
) -> None:
    made = convert(config)
    clean(root, STAGES)
    RAN.clear()

    (config.out / "1.safetensors").unlink()
    convert(config)

    assert RAN == ["quantize", "compile"]
    assert all(made.work.is_complete(ref) for ref in made.refs.values())


def test_cleaned_stage_may_be_made_again_on_another_device(
    config: ConversionConfig, root: Path
) -> None:
    convert(config)
    clean(root, STAGES)
    (config.out / "1.safetensors").unlink()

    pipeline = Pipeline(config, STAGES, device="cuda")
    pipeline.run("quantize", progress=silent)

    assert pipeline.work.is_complete(pipeline.refs["quantize"])


def test_stages_of_a_replaced_output_can_go_and_what_is_shared_stays(
    config: ConversionConfig, root: Path
) -> None:
    old = convert(config)
    new = convert(other(config, bpw=3.0))

    items = unneeded(root, STAGES)

    assert paths(items) == stages_of(old, "allocate", "quantize", "compile", "validate")
    assert paths(items, tensors=True) == stages_of(new, "quantize")
    assert {i.why for i in items if not i.is_tensors} == {
        "replaced: its output was made anew since then"
    }


def test_as_many_conversions_of_an_output_are_kept_as_wanted(
    config: ConversionConfig, root: Path
) -> None:
    made = [convert(other(config, bpw=bpw)) for bpw in (4.0, 3.0, 2.0)]

    assert paths(unneeded(root, STAGES, keep_latest=2)) == stages_of(
        made[0], "allocate", "quantize", "compile", "validate"
    )
    assert paths(unneeded(root, STAGES, keep_latest=3)) == set()


def test_conversions_into_other_folders_are_kept(config: ConversionConfig, root: Path) -> None:
    one = convert(config)
    two = convert(other(config, bpw=3.0, out=config.out.with_name("other")))

    assert paths(unneeded(root, STAGES)) == set()
    assert paths(unneeded(root, STAGES), tensors=True) == stages_of(one, "quantize") | stages_of(
        two, "quantize"
    )


def test_old_validation_can_go_without_its_model(config: ConversionConfig, root: Path) -> None:
    old = convert(config)
    options = config.validate_options.model_copy(update={"rows": 3})
    convert(other(config, validate_options=options))

    assert paths(unneeded(root, STAGES)) == stages_of(old, "validate")


@pytest.mark.parametrize("last", ["allocate", "quantize", "compile", "validate"])
def test_conversion_that_was_begun_keeps_all_that_it_would_resume_from(
    last: str, config: ConversionConfig, root: Path
) -> None:
    convert(config)
    half = begun(other(config, bpw=3.0, out=config.out.with_name("other")), last)
    mine = [name for name in half.stages if half.path(name).exists() and name != "measure"]
    RAN.clear()

    assert stages_of(half, *half.stages).isdisjoint(
        paths(clean(root, STAGES)) | paths(unneeded(root, STAGES), tensors=True)
    )
    assert paths(unneeded(root, STAGES, partial=True)) == stages_of(half, *mine)
    convert(half.config)
    assert list(half.stages)[list(half.stages).index(last) :] == RAN


def test_replaced_stage_that_is_being_made_again_stays(
    config: ConversionConfig, root: Path
) -> None:
    old = convert(config)
    clean(root, STAGES)
    convert(other(config, bpw=3.0))

    begun(config, "quantize")  # which had been cleared

    assert stages_of(old, *old.stages).isdisjoint(paths(unneeded(root, STAGES)))
    assert old.path("quantize") in paths(unneeded(root, STAGES, partial=True))


def test_measurement_alone_goes_only_with_what_is_not_finished(
    config: ConversionConfig, root: Path
) -> None:
    pipeline = Pipeline(config, STAGES, device="cpu")
    pipeline.run("measure", progress=silent)

    assert unneeded(root, STAGES) == []
    assert paths(unneeded(root, STAGES, partial=True)) == stages_of(pipeline, "measure")


@pytest.mark.parametrize("damage", ["alter", "delete"])
def test_tensors_stay_while_an_output_is_not_complete(
    damage: str, config: ConversionConfig, root: Path
) -> None:
    convert(config)
    path = config.out / "0.safetensors"
    path.unlink() if damage == "delete" else path.write_text("altered")

    assert unneeded(root, STAGES) == []


def test_folders_set_aside_can_go_and_unreadable_ones_only_with_what_is_not_finished(
    config: ConversionConfig, root: Path
) -> None:
    made = convert(config)
    manifest = made.path("allocate") / "manifest.json"
    manifest.write_text("{}")
    convert(config)  # sets it aside
    (aside,) = made.path("allocate").parent.glob("*.damaged-*")
    lost = made.path("measure").with_name("0" * 16)
    lost.mkdir()
    (lost / "manifest.json").write_text("{}")

    assert paths(unneeded(root, STAGES)) == {aside}
    reasons = {i.path: i.why for i in unneeded(root, STAGES, partial=True) if not i.is_tensors}
    assert reasons == {
        aside: "set aside: damaged, or of another version",
        lost: "its manifest is damaged",
    }


def test_nothing_is_removed_while_a_run_is_on(config: ConversionConfig, root: Path) -> None:
    made = convert(config)
    tensors = list(root.rglob("*.safetensors"))

    with made.work.lock_stage(made.refs["validate"], config.out.with_name("elsewhere")):
        with pytest.raises(WorkDirBusy, match="is working in"):
            clean(root, STAGES)
        assert clean(root, STAGES, skip_busy=True) == []
        assert unneeded(root, STAGES) != []  # looking is allowed

    assert list(root.rglob("*.safetensors")) == tensors
    assert clean(root, STAGES) != []


def test_removal_that_was_killed_is_finished_by_the_next(
    config: ConversionConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(config)
    convert(other(config, bpw=3.0))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            clean(root, STAGES)

    left = unneeded(root, STAGES)

    assert {item.why for item in left} == {"removed"}
    assert len(clean(root, STAGES)) == len(left) == 5
    assert list(root.rglob("*.removed-*")) == []


def test_what_cannot_be_removed_is_named(
    config: ConversionConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(config)

    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path / "file"))

    monkeypatch.setattr("shutil.rmtree", fails)

    with pytest.raises(WriteFailed, match=r"cannot remove `.*file`: Permission denied; fix the pe"):
        clean(root, STAGES)


def test_removal_goes_on_within_the_second_in_which_another_was_killed(
    config: ConversionConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = convert(config)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    folder = pipeline.path("quantize")
    folder.with_name(f"{folder.name}{cleaning.REMOVED}now").mkdir()

    clean(root, STAGES)

    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert list(folder.rglob("*.safetensors")) == []


def test_tensors_can_go_although_another_result_is_lost(
    config: ConversionConfig, root: Path
) -> None:
    made = convert(config)
    for path in made.path("validate").iterdir():
        if path.name != "manifest.json":
            path.unlink()

    assert paths(unneeded(root, STAGES), tensors=True) == stages_of(made, "quantize")


@pytest.mark.parametrize("name", ["prefect", "locks"])
def test_folders_that_are_no_stages_stay(name: str, config: ConversionConfig, root: Path) -> None:
    folder = convert(config).work.root / name / "results"
    folder.mkdir(parents=True)

    clean(root, STAGES, partial=True)

    assert folder.is_dir()


def test_folders_that_are_no_work_directories_stay(config: ConversionConfig, root: Path) -> None:
    convert(config)
    notes = root / "notes" / "of" / "mine"
    notes.mkdir(parents=True)

    assert notes not in paths(unneeded(root, STAGES, partial=True))
    clean(root, STAGES, partial=True)

    assert notes.is_dir()


def test_tensors_stay_for_an_unfinished_conversion_unless_it_goes_too(
    config: ConversionConfig, root: Path
) -> None:
    made = convert(config)
    begun(other(config, out=config.out.with_name("other")), "compile")

    assert paths(unneeded(root, STAGES), tensors=True) == set()
    assert paths(unneeded(root, STAGES, partial=True), tensors=True) == stages_of(made, "quantize")


def test_what_an_earlier_version_was_removing_goes(config: ConversionConfig, root: Path) -> None:
    folder = convert(config).path("measure")
    leftover = folder.with_name(f"{folder.name}.removed-20260101T000000")
    leftover.mkdir()

    [item] = [item for item in clean(root, STAGES) if not item.is_tensors]

    assert (item.path, item.why) == (leftover, "removed")
    assert not leftover.exists()


def test_sizes_are_what_the_disk_gains(config: ConversionConfig, root: Path) -> None:
    def used() -> int:
        return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    convert(config)
    convert(other(config, bpw=3.0))
    before = used()

    gained = sum(item.size for item in clean(root, STAGES))

    assert abs(before - used() - gained) < 1000  # a manifest with fewer files


@pytest.mark.parametrize("text", ["a folder", "a file", "nothing"])
def test_other_folders_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if text == "a folder":
        (path / "measure" / "y").mkdir(parents=True)
    elif text == "a file":
        path.touch()

    with pytest.raises(ConfigError, match=r"`.*/x` is not a work root; give the folder of check"):
        clean(path, STAGES)


def test_cleaning_afterwards_is_an_option_and_harms_no_run(
    config: ConversionConfig, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = convert(config)

    clean_after(config, STAGES)
    kept = unneeded(root, STAGES)
    (made.path("measure") / "manifest.json").unlink()
    (made.path("measure") / "manifest.json").mkdir()
    clean_after(other(config, clean_after=True), STAGES)
    assert "not cleaned: cannot read" in caplog.text
    (made.path("measure") / "manifest.json").rmdir()
    with caplog.at_level("INFO", logger=cleaning.__name__):
        clean_after(other(config, clean_after=True), STAGES)

    assert f"cleaned={root} items=1 size=0.00GB" in caplog.text
    assert paths(kept, tensors=True) == stages_of(made, "quantize")
    assert list(root.rglob("*.safetensors")) == []


def test_cleaning_afterwards_leaves_out_what_another_run_uses(
    config: ConversionConfig, root: Path, tmp_path: Path
) -> None:
    mine = convert(config)
    source = model(tmp_path / "busy", '{"other": 1}')
    busy = convert(other(config, source=source, out=tmp_path / "out2"))

    with busy.work.lock():
        clean_after(other(config, clean_after=True), STAGES)

    assert list(mine.path("quantize").rglob("*.safetensors")) == []
    assert paths(unneeded(root, STAGES), tensors=True) == stages_of(busy, "quantize")
