"""What a stage reads changes, goes away or is only touched while pipelines of toy stages run."""

import os

import pytest
from toy_stages import CHAIN, RAN, run_all, stage, write_note

from exl2flow.core.errors import SourceModelError, StoreError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store import source
from exl2flow.core.store.files import digest, write_text
from exl2flow.core.store.stage import Pipeline, Stage, StageRun
from exl2flow.core.store.store import StageFolder


def model_text(config: ConversionConfig) -> str:
    return (config.source / "config.json").read_text()


def test_source_that_changes_between_stages_is_named_and_the_next_stage_does_not_begin(
    config: ConversionConfig,
) -> None:
    pipeline = Pipeline(config, CHAIN, device="cpu")
    pipeline.run("measure", progress=silent)
    (config.source / "config.json").write_text('{"other": 1}')

    with pytest.raises(SourceModelError, match=r"model/config\.json` changed during this run"):
        pipeline.run("allocate", progress=silent)

    assert RAN == ["measure"]


def copy_model(run: StageRun) -> None:
    """Write two files that hold the model, unless they are there."""
    for name in ("first", "second"):
        if not run.folder.valid(name):
            RAN.append(name)
            write_text(run.folder.path / name, model_text(run.config))
            run.folder.commit(name, digest(run.folder.path / name))


@pytest.mark.parametrize("end", ["changed", "put back", "failed", "missing"])
def test_results_of_a_changed_source_are_not_recorded(end: str, config: ConversionConfig) -> None:
    model = config.source / "config.json"

    def disturbed(run: StageRun) -> None:
        model.write_text('{"other": 1}')
        made = model_text(run.config)
        if end == "put back":
            model.write_text("{}")
        elif end == "missing":
            model.rename(model.with_suffix(".away"))
        write_text(run.folder.path / "first", made)
        if end != "failed":
            run.folder.commit("first", digest(run.folder.path / "first"))
        raise ValueError("half way")

    with pytest.raises(ValueError if end == "failed" else SourceModelError):
        run_all(config, (stage("measure", run=disturbed),))
    model.write_text("{}")
    RAN.clear()
    pipeline = run_all(config, (stage("measure", run=copy_model),))

    assert RAN == ["first", "second"]
    assert (pipeline.path("measure") / "first").read_text() == "{}"


def test_a_source_that_is_away_for_a_while_costs_no_result(config: ConversionConfig) -> None:
    away = config.source.with_name("away")

    def unplugged(run: StageRun) -> None:
        write_text(run.folder.path / "first", model_text(run.config))
        run.folder.commit("first", digest(run.folder.path / "first"))
        config.source.rename(away)
        config.source.mkdir()  # an empty mount point
        run.folder.commit("second", "")

    with pytest.raises(SourceModelError, match=r"config\.json` \(which is missing\) changed"):
        run_all(config, (stage("measure", run=unplugged),))
    config.source.rmdir()
    away.rename(config.source)
    run_all(config, (stage("measure", run=copy_model),))

    assert RAN == ["second"]


def test_an_unchanged_source_is_read_once_however_many_stages_check_it(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    (config.source / "model.safetensors").write_text("weights")
    monkeypatch.setattr(source, "digest", lambda path: read.append(path.name) or digest(path))

    run_all(config)
    again = Pipeline(config, CHAIN, device="cpu")
    again.run("compile", progress=silent)

    assert RAN == ["measure", "allocate", "compile"]
    assert sorted(read) == ["config.json", "model.safetensors"]


def test_a_stage_goes_on_when_its_source_is_touched(
    config: ConversionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    times, times_touched = iter(range(1, 100)), list[int]()

    def touching(run: StageRun) -> None:
        os.utime(run.config.source / "config.json", (0, next(times)))
        copy_model(run)

    def backed_up(run: StageRun) -> None:
        copy_model(run)
        if not times_touched:
            times_touched.append(0)  # a backup adds a link to each file, say
            os.utime(run.config.source / "config.json", (0, 0))

    pipeline = run_all(config, (stage("measure", run=backed_up),))

    assert pipeline.is_complete("measure")
    assert RAN == ["first", "second"]
    assert "config.json` was written to; stage `measure` goes on" in caplog.text
    RAN.clear()
    with pytest.raises(SourceModelError, match="written to again and again while stage `tune`"):
        run_all(config, (stage("tune", run=touching),))
    assert RAN == ["first", "first"]


def test_a_source_that_is_touched_and_then_changed_has_changed(config: ConversionConfig) -> None:
    model = config.source / "config.json"

    def disturbed(run: StageRun) -> None:
        RAN.append("again")
        if len(RAN) == 1:
            os.utime(model, (0, 0))
        else:
            model.write_text('{"other": 1}')
        run.folder.commit("first", "")

    with pytest.raises(SourceModelError, match=r"config\.json` changed during this run"):
        run_all(config, (stage("measure", run=disturbed),))

    assert RAN == ["again"] * 2


@pytest.mark.parametrize("change", ["edited", "deleted", "a folder"])
def test_file_of_an_option_that_changes_before_its_stage_is_told(
    change: str, config: ConversionConfig
) -> None:
    text = config.source.parent / "text.txt"
    text.write_text("before")
    stages = (stage("measure"), stage("validate", options=lambda config: {"text": digest(text)}))
    pipeline = Pipeline(config, stages, device="cpu")
    pipeline.run("measure", progress=silent)
    text.unlink()
    if change == "edited":
        text.write_text("after")
    elif change == "a folder":
        text.mkdir()

    what = r"stage `validate` reads \(`text`\)" if change == "edited" else r"`.*/text.txt` \(.*\)"
    with pytest.raises(SourceModelError, match=f"{what} changed during this run"):
        pipeline.run("validate", progress=silent)

    assert RAN == ["measure"]


def test_stage_whose_input_was_changed_does_not_begin(config: ConversionConfig) -> None:
    pipeline = Pipeline(config, CHAIN, device="cpu")
    for name in ("measure", "allocate"):
        pipeline.run(name, progress=silent)
    (pipeline.path("allocate") / "note").write_text("of another run")

    with pytest.raises(StoreError, match="`compile` reads `allocate`, whose files are missing or"):
        pipeline.run("compile", progress=silent)

    assert RAN == ["measure", "allocate"]


@pytest.mark.parametrize("changed", ["input", "file of an option"])
def test_results_of_inputs_changed_meanwhile_are_not_recorded(
    changed: str, config: ConversionConfig
) -> None:
    text = config.source.parent / "text.txt"
    text.write_text("before")

    def disturbed(run: StageRun) -> None:
        path = text if changed == "file of an option" else run.inputs["measure"] / "note"
        path.write_text("of another run")
        write_note(run)

    second = Stage(
        name="validate",
        schema=1,
        inputs=("measure",),
        options=lambda config: {"text": digest(text)},
        run=disturbed,
        files=lambda config: [text],
    )
    with pytest.raises(StoreError if changed == "input" else SourceModelError, match="changed"):
        run_all(config, (stage("measure"), second))

    pipeline = Pipeline(config, (stage("measure"), second), device="cpu")
    folder = StageFolder.load(pipeline.path("validate"))
    assert folder is None or not folder.manifest.files
