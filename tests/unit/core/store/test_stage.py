"""Pipelines of toy stages: what runs, what is cached, what is redone."""

import logging
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from gpus import stand_in
from toy_stages import CHAIN, RAN, run_all, stage, with_options, write_note

from exl2flow.core.errors import Interrupted, StoreError, WorkDirBusy
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.interrupt import listening
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.changes import outlook
from exl2flow.core.store.manifest import RunRecord
from exl2flow.core.store.stage import (
    FILES,
    KINDS_FILE,
    NATS,
    RECORD_FILE,
    ROWS_FILE,
    SCORE_FILE,
    SOURCE_FINGERPRINT,
    Pipeline,
    Stage,
    StageRun,
)
from exl2flow.core.store.store import StageFolder
from exl2flow.pipeline.stages import run_in_order

DOCS = Path(__file__).parents[4] / "docs"


def test_second_run_executes_nothing_and_says_so_in_the_log(
    config: ConversionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run_all(config)
    first = list(RAN)

    with caplog.at_level(logging.INFO, logger="exl2flow.core.store.stage"):
        pipeline = run_all(config)

    assert first == RAN == ["measure", "allocate", "compile"]
    assert all(map(pipeline.is_complete, pipeline.stages))
    said = [message.split(" path=")[0] for message in caplog.messages]
    assert said == [f"stage={name} cached" for name in first]


def test_run_returns_the_result_whether_it_was_there_or_not(config: ConversionConfig) -> None:
    pipeline, ticks = Pipeline(config, CHAIN, device="cpu"), list[Tick]()

    assert pipeline.run("measure", progress=ticks.append) == pipeline.refs["measure"]
    assert ticks == [Tick(stage="measure", done=1, total=1, detail="noted")]
    assert pipeline.run("measure", progress=silent) == pipeline.refs["measure"]


def test_cleared_stage_is_made_again_with_a_stage_that_reads_it(
    config: ConversionConfig, tmp_path: Path
) -> None:
    pipeline = run_all(config)
    for name in ("allocate", "compile"):
        folder, aside = StageFolder.load(pipeline.path(name)), tmp_path / name
        assert folder is not None
        aside.mkdir()
        folder.clear(aside)
        assert pipeline.is_complete(name) == (name == "allocate")  # nothing reads the last one

    run_all(config)

    assert RAN[3:] == ["allocate", "compile"]
    assert all(map(pipeline.is_complete, pipeline.stages))


def test_changed_option_redoes_what_depends_on_it_and_nothing_else(
    config: ConversionConfig,
) -> None:
    before = run_all(config)

    after = run_all(with_options(config, bpw=2.5))

    assert RAN[3:] == ["allocate", "compile"]
    assert before.refs["measure"] == after.refs["measure"]
    assert all(map(before.is_complete, before.stages))  # siblings coexist
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


def test_a_source_that_was_renamed_keeps_its_results(config: ConversionConfig) -> None:
    run_all(config)
    renamed = config.source.rename(config.source.with_name("other name"))
    moved = ConversionConfig(source=renamed, out=config.out)

    pipeline = Pipeline(moved, CHAIN, device="cpu")

    assert all(map(pipeline.is_complete, pipeline.stages))
    other = Pipeline(with_options(moved, bpw=3.0), CHAIN, device="cpu")
    assert [each.changes for each in outlook(other) if each.stage == "allocate"] != [()]


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


def test_fingerprints_are_those_of_earlier_versions(config: ConversionConfig) -> None:
    """An update of this package does not redo finished stages."""
    stages = (
        stage("measure", options=lambda config: {"rows": 19}),
        stage("allocate", "measure", options=lambda config: {"bpw": 4.0, "text": "é"}, schema=2),
    )

    pipeline = Pipeline(config, stages, device="cpu")

    assert [ref.path for ref in pipeline.refs.values()] == [
        "measure/c842fb5ea000d928",
        "allocate/1540dc27a640f923",
    ]


@pytest.mark.parametrize(
    ("name", "page"),
    [
        (ROWS_FILE, "concepts/checkpoints.md"),
        (KINDS_FILE, "concepts/checkpoints.md"),
        (SCORE_FILE, "concepts/checkpoints.md"),
        (f"`{RECORD_FILE}`", "format.md"),
        (f"`{FILES}`", "format.md"),
        (f"`{SOURCE_FINGERPRINT}`", "format.md"),
        (f"`{NATS}`", "format.md"),
    ],
)
def test_files_and_entries_have_the_names_that_are_documented(name: str, page: str) -> None:
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (DOCS / page).read_text())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_options_of_the_gpu_count_there_only(device: str, config: ConversionConfig) -> None:
    plain = stage("measure")
    tiled = replace(plain, gpu_options=lambda config: {"tile": 64})

    before, after = (Pipeline(config, (each,), device=device).refs for each in (plain, tiled))

    assert (before != after) == (device == "cuda")


def test_stage_before_its_input_is_refused(config: ConversionConfig) -> None:
    pipeline = Pipeline(config, CHAIN, device="cpu")

    with pytest.raises(StoreError, match="`allocate` reads `measure`, whose files are missing"):
        pipeline.run("allocate", progress=silent)

    assert RAN == []


def test_folder_records_the_run_that_made_it(config: ConversionConfig) -> None:
    pipeline = run_all(config)

    folder = StageFolder.load(pipeline.path("measure"))

    assert folder is not None
    assert folder.manifest.run == RunRecord.of(["measure", "allocate", "compile"], config)
    assert folder.manifest.source == pipeline.source.files


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_after_the_last_commit_stops_before_the_next_stage(
    number: signal.Signals, config: ConversionConfig
) -> None:
    def asked(run: StageRun) -> None:
        write_note(run)
        os.kill(os.getpid(), number)

    stages = (stage("measure", run=asked), *CHAIN[1:])
    with pytest.raises(Interrupted, match="stopped at stage `measure`; everything") as error:
        run_all(config, stages)

    assert error.value.signum == number
    assert RAN == ["measure"]
    assert Pipeline(config, stages, device="cpu").is_complete("measure")


def test_signal_during_another_stage_begins_no_stage(config: ConversionConfig) -> None:
    pipeline = Pipeline(config, CHAIN, device="cpu")

    with listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="stopped at stage `measure`"):
            pipeline.run("measure", progress=silent)

    assert RAN == []
    assert not pipeline.is_complete("measure")


@pytest.mark.parametrize(
    ("names", "is_busy"), [(("measure", "compile"), True), (("measure",), False)]
)
@pytest.mark.parametrize("is_second", [False, True])
def test_stage_keeps_others_out_of_an_output_that_its_run_writes(
    names: tuple[str, ...], is_busy: bool, is_second: bool, config: ConversionConfig
) -> None:
    refused = list[bool]()

    def tried(run: StageRun) -> None:
        try:
            with other.work.lock_output(config.out):
                refused.append(False)
        except WorkDirBusy:
            refused.append(True)
        write_note(run)

    stages = tuple(stage(name, run=tried) for name in names)
    other = Pipeline(with_options(config, work_root=config.out.with_name("b")), (), device="cpu")
    pipeline = Pipeline(config, stages, device="cpu")
    if is_second:  # after a block for all stages
        with pipeline.alone():
            pass

    pipeline.run("measure", progress=silent)

    assert refused == [is_busy]


@pytest.mark.parametrize(("named", "current"), [("cuda:1", 1), ("cuda", 0)])
def test_a_stage_computes_on_the_gpu_that_is_named_and_records_only_that_it_is_one(
    config: ConversionConfig, named: str, current: int
) -> None:
    seen = list[object]()

    def run(work: StageRun) -> None:
        seen.extend((work.device, gpus.current_stream().device.index))
        write_note(work)

    there = config.model_copy(update={"device": named})
    with stand_in() as gpus:
        pipeline = run_all(there, (stage("measure", run=run),), device="cuda")

    assert seen == [named, current]
    folder = StageFolder.load(pipeline.path("measure"), pipeline.refs["measure"].fingerprint)
    assert folder is not None
    assert folder.manifest.device == "cuda"
