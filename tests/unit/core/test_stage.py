"""Pipelines of toy stages: what runs, what is cached, what is redone."""

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exl2flow.core import source
from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import Interrupted, SourceModelError, StoreError, WorkDirBusy
from exl2flow.core.files import digest, write_text
from exl2flow.core.progress import Tick, silent
from exl2flow.core.stage import Pipeline, Stage, StageRun
from exl2flow.core.store import StageFolder
from exl2flow.tasks.stages import run_in_order

RAN: list[str] = []


@pytest.fixture(autouse=True)
def ran() -> list[str]:
    """The names of the stages that really ran, in order."""
    RAN.clear()
    return RAN


@pytest.fixture
def config(tmp_path: Path) -> ConversionConfig:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    return ConversionConfig(source=source, out=tmp_path / "out")


def write_note(run: StageRun) -> None:
    """Write one file that tells the inputs and the options."""
    RAN.append(run.folder.manifest.stage)
    inputs = {name: (path / "note").read_text() for name, path in run.inputs.items()}
    write_text(run.folder.path / "note", f"{run.folder.manifest.options}{inputs}")
    run.folder.commit("note", digest(run.folder.path / "note"), cursor=1)
    run.tick(1, 1, "noted")


def stage(
    name: str,
    *inputs: str,
    options: Callable[[ConversionConfig], dict[str, object]] = lambda config: {},
    schema: int = 1,
    run: Callable[[StageRun], None] = write_note,
) -> Stage:
    return Stage(name=name, schema=schema, inputs=inputs, options=options, run=run)


CHAIN = (
    stage("measure", options=lambda config: {"rows": config.calibration.measure_rows}),
    stage("allocate", "measure", options=lambda config: {"bpw": config.bpw}),
    stage("compile", "allocate"),
)


def run_all(config: ConversionConfig, stages: tuple[Stage, ...] = CHAIN) -> Pipeline:
    pipeline = Pipeline(config, stages, device="cpu")
    for name in pipeline.stages:
        pipeline.run(name, progress=silent)
    return pipeline


def with_options(config: ConversionConfig, **values: object) -> ConversionConfig:
    return ConversionConfig(source=config.source, out=config.out, **values)


def test_second_run_executes_nothing(config: ConversionConfig) -> None:
    run_all(config)
    first = list(RAN)

    pipeline = run_all(config)

    assert first == RAN == ["measure", "allocate", "compile"]
    assert all(map(pipeline.is_complete, pipeline.stages))


def test_changed_option_redoes_what_depends_on_it_and_nothing_else(
    config: ConversionConfig,
) -> None:
    before = run_all(config)

    after = run_all(with_options(config, bpw=2.5))

    assert RAN[3:] == ["allocate", "compile"]
    assert before.refs["measure"] == after.refs["measure"]
    assert all(map(before.is_complete, before.stages))  # siblings coexist


def test_going_back_to_an_earlier_option_finds_its_results(config: ConversionConfig) -> None:
    run_all(config)
    run_all(with_options(config, bpw=2.5))

    run_all(config)

    assert RAN[5:] == []


@pytest.mark.parametrize("change", ["source", "schema"])
def test_changed_source_or_schema_redoes_all_that_follows(
    change: str, config: ConversionConfig
) -> None:
    run_all(config)
    stages = CHAIN
    if change == "source":
        (config.source / "config.json").write_text('{"other": 1}')
    else:
        stages = (stage("measure", options=CHAIN[0].options, schema=2), *CHAIN[1:])

    run_all(config, stages)

    assert RAN[3:] == ["measure", "allocate", "compile"]


@pytest.mark.parametrize("damage", ["delete", "alter", "manifest"])
def test_lost_result_is_made_again_and_only_that(damage: str, config: ConversionConfig) -> None:
    pipeline = run_all(config)
    path = pipeline.path("allocate") / ("manifest.json" if damage == "manifest" else "note")
    content = (pipeline.path("allocate") / "note").read_text()

    if damage == "alter":
        path.write_text(content.upper())
    else:
        path.unlink()
    run_all(config)

    assert RAN[3:] == ["allocate"]
    assert (pipeline.path("allocate") / "note").read_text() == content


def test_stage_reads_only_the_folders_of_its_inputs(config: ConversionConfig) -> None:
    pipeline = run_all(config)

    note = (pipeline.path("compile") / "note").read_text()
    measured = (pipeline.path("measure") / "note").read_text()
    assert "'allocate'" in note
    assert measured == "{'rows': 19}{}"


def test_stage_that_is_switched_off_is_left_out(config: ConversionConfig) -> None:
    off = Stage(
        name="measure",
        schema=1,
        inputs=(),
        options=lambda config: {},
        run=write_note,
        enabled=lambda config: False,
    )

    pipeline = run_all(config, (off, *CHAIN[1:]))

    assert list(pipeline.stages) == RAN == ["allocate", "compile"]
    assert (pipeline.path("allocate") / "note").read_text() == "{'bpw': 4.0}{}"


def test_failed_stage_keeps_what_it_committed(config: ConversionConfig) -> None:
    def fail(run: StageRun) -> None:
        if not run.folder.valid("note"):
            write_note(run)
            raise ValueError("half way")

    broken = (stage("measure", run=fail),)
    with pytest.raises(ValueError, match="half way"):
        run_all(config, broken)

    pipeline = run_all(config, broken)

    assert RAN == ["measure"]
    assert pipeline.is_complete("measure")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_stage_after_a_commit(
    number: signal.Signals, config: ConversionConfig
) -> None:
    def interrupted(run: StageRun) -> None:
        run.folder.manifest.total = 3
        os.kill(os.getpid(), number)
        write_note(run)
        run.stop_if_asked()
        pytest.fail("the stage went on")

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="stopped in stage `measure` after 1 of 3") as error:
        run_all(config, (stage("measure", run=interrupted),))

    assert error.value.signum == number
    assert signal.getsignal(number) == before
    pipeline = Pipeline(config, (stage("measure"),), device="cpu")
    fingerprint = pipeline.refs["measure"].fingerprint
    folder = StageFolder.load(pipeline.path("measure"), fingerprint)
    assert folder is not None
    assert (folder.manifest.status, folder.manifest.cursor) == ("partial", 1)
    assert folder.valid("note")


def test_busy_work_directory_is_refused(config: ConversionConfig) -> None:
    pipeline = Pipeline(config, CHAIN, device="cpu")

    with pipeline.work.lock(), pytest.raises(WorkDirBusy, match=str(os.getpid())):
        pipeline.run("measure", progress=silent)

    assert RAN == []


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


@pytest.mark.parametrize("end", ["changed", "put back", "failed", "killed", "missing"])
def test_what_comes_of_a_changed_source_is_not_recorded(end: str, config: ConversionConfig) -> None:
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
def test_a_result_of_what_was_changed_meanwhile_is_not_recorded(
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
    folder = StageFolder.found(pipeline.path("validate"))
    assert folder is None or not folder.manifest.files


def test_output_belongs_to_one_run_from_the_first_stage_to_the_last_whatever_its_work_root(
    config: ConversionConfig,
) -> None:
    other = Pipeline(with_options(config, work_root=config.out.with_name("b")), CHAIN, device="cpu")
    seen = []

    def second(name: str) -> None:
        with pytest.raises(WorkDirBusy, match=f"is working in `{config.out}`.*another `--out`"):
            run_in_order(other)
        seen.append(name)
        pipeline.run(name, progress=silent)

    pipeline = Pipeline(config, CHAIN, device="cpu")
    run_in_order(pipeline, second)

    assert seen == RAN == ["measure", "allocate", "compile"]
    assert not config.out.exists()  # no stage wrote into it
    run_in_order(other)
    assert all(map(other.is_complete, other.stages))


def test_progress_names_the_stage(config: ConversionConfig) -> None:
    ticks: list[Tick] = []
    pipeline = Pipeline(config, CHAIN, device="cpu")

    pipeline.run("measure", progress=ticks.append)

    assert ticks == [Tick(stage="measure", done=1, total=1, detail="noted")]


def test_cached_stage_says_so_in_the_log(
    config: ConversionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run_all(config)

    with caplog.at_level(logging.INFO, logger="exl2flow.core.stage"):
        run_all(config)

    assert [record.getMessage().split(" path=")[0] for record in caplog.records] == [
        "stage=measure cached",
        "stage=allocate cached",
        "stage=compile cached",
    ]


def test_stages_of_two_threads_use_the_gpu_one_after_the_other(config: ConversionConfig) -> None:
    working: list[str] = []
    most: list[int] = []

    def work(run: StageRun) -> None:
        working.append(run.folder.manifest.stage)
        time.sleep(0.05)
        most.append(len(working))
        working.pop()
        write_note(run)

    names = ("sensitivity", "measure", "judge")
    pipelines = [Pipeline(config, (stage(name, run=work),), device="cuda") for name in names]
    outs = [config.model_copy(update={"out": config.out / name}) for name in names]
    for pipeline, own in zip(pipelines, outs, strict=True):
        pipeline.config = own  # each thread has an output of its own

    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(pipeline.run, name, progress=silent)
            for pipeline, name in zip(pipelines, names, strict=True)
        ]:
            done.result()

    assert most == [1, 1, 1]
