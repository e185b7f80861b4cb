"""The flow `convert` against a real server: states, caching, artifacts, logs, interruption."""

import logging
import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conversions import small_config, snapshot
from prefect.client.orchestration import SyncPrefectClient
from prefect_runs import artifacts, log_lines, run_message, run_name, run_state, task_states
from tiny import make_tiny

from exl2flow.core.errors import Interrupted, PreflightFailed, ValidationFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.runtime.progress import Tick, reporting_to
from exl2flow.flows import convert, measure
from exl2flow.pipeline import preparation
from exl2flow.pipeline.local import RUNS
from exl2flow.pipeline.preparation import prepare, reuse_checks

SHARED = ("tokenize", "sensitivity", "measure")  # by all bitrates
STAGES = (*SHARED, "allocate", "quantize", "compile", "validate")


@dataclass(frozen=True)
class Converted:
    """A conversion by the flow, and the id of its run."""

    config: ConversionConfig
    run: UUID

    @property
    def root(self) -> Path:
        """The folder of everything that the conversion wrote."""
        return self.config.out.parent

    def stage_folder(self, name: str) -> Path:
        """Return the only folder of a stage."""
        [folder] = self.root.glob(f".exl2flow/tiny-*/{name}/*")
        return folder


def run_flow(config: ConversionConfig) -> tuple[UUID, Any]:
    """Run the flow; return the run's id and its final state."""
    state = convert(config, return_state=True)
    run = state.state_details.flow_run_id
    assert run is not None
    return run, state


@pytest.fixture(scope="module")
def converted(
    prefect_env: Mapping[str, str], single_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    root = tmp_path_factory.mktemp("convert")
    source = make_tiny("llama", root / "tiny", num_hidden_layers=1)
    config = small_config(source, root / "out", bpw=4.0)
    run, state = run_flow(config)
    assert state.is_completed(), state
    return Converted(config, run)


def test_run_is_named_after_model_and_bits_and_has_one_task_per_stage(converted: Converted) -> None:
    assert run_name(converted.run) == "tiny@4bpw"
    assert task_states(converted.run) == dict.fromkeys(STAGES, "Completed")


def test_run_publishes_progress_tables_and_report(converted: Converted) -> None:
    found = artifacts(converted.run)

    assert {found[f"tiny-{stage}"].data for stage in ("measure", "quantize")} == {100.0}
    allocation, errors = str(found["tiny-bit-allocation"].data), str(found["tiny-errors"].data)
    assert "0.mlp.down_proj" in allocation
    assert "relative error" in errors
    assert "lm_head" in errors
    report = str(found["tiny-report"].data)
    assert "perplexity" in report
    assert "data:image/svg+xml;base64," in report


def test_run_logs_one_line_per_sublayer_under_its_task(converted: Converted) -> None:
    lines = [log for log in log_lines(converted.run) if "model.layers.0.mlp" in log.message]

    assert len(lines) == 3  # differentiated, measured, quantized
    assert all(log.task_run_id is not None for log in lines)


def test_first_artifact_of_a_run_says_how_far_it_is_and_in_the_end_what_it_made(
    converted: Converted,
) -> None:
    found = artifacts(converted.run)

    assert min(found.values(), key=lambda artifact: artifact.created).key == "tiny-run"
    bar = found["tiny-run"]
    assert (bar.data, bar.task_run_id) == (100.0, None)
    assert re.fullmatch(
        r"done: `.*/out`: \d.* kB, \d.* bits per weight, KL divergence \d.* nats, perplexity \d.*"
        r" · output `.*/out`",
        str(bar.description),
    )


def test_reason_of_a_refused_run_is_its_message_its_only_task_and_in_its_artifact(
    converted: Converted, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    config = converted.config.model_copy(update={"out": tmp_path / "taken"})

    run, state = run_flow(config)

    with pytest.raises(PreflightFailed) as refusal:
        state.result()
    reason = str(refusal.value)
    assert run_state(run) == "Failed"
    assert run_message(run) == reason
    assert task_states(run) == {f"refused: {reason}"[:200]: "Failed"}
    assert str(artifacts(run)["tiny-run"].description).startswith(f"failed: {reason}")
    assert not [log for log in log_lines(run) if "Traceback" in log.message]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[ConversionConfig]:
    """The configurations that were checked."""
    found: list[ConversionConfig] = []
    original = preparation.preflight

    def check(config: ConversionConfig, *words: Any, **values: Any) -> Any:
        found.append(config)
        return original(config, *words, **values)

    monkeypatch.setattr(preparation, "preflight", check)
    return found


def test_second_run_is_checked_and_cached_throughout_and_changes_no_file(
    converted: Converted, checked: list[ConversionConfig]
) -> None:
    before = snapshot(converted.root)

    run, state = run_flow(converted.config)

    assert state.is_completed()
    assert checked == [converted.config]
    assert task_states(run) == dict.fromkeys(STAGES, "Cached")
    assert snapshot(converted.root) == before
    assert "tiny-report" in artifacts(run)


def test_stages_completed_without_prefect_are_cached_too_and_checked_by_the_command_only(
    converted: Converted, checked: list[ConversionConfig]
) -> None:
    [results] = converted.root.glob(".exl2flow/tiny-*/prefect")
    shutil.rmtree(results)

    with reuse_checks(prepare(RUNS["convert"], converted.config)):
        run, _ = run_flow(converted.config)

    assert checked == [converted.config]
    assert task_states(run) == dict.fromkeys(STAGES, "Cached")


@pytest.mark.slow
def test_other_bits_reuse_tokens_and_measurement(converted: Converted) -> None:
    other = small_config(converted.config.source, converted.root / "out-5", bpw=5.0)

    run, state = run_flow(other)

    assert state.is_completed()
    assert run_name(run) == "tiny@5bpw"
    states = task_states(run)
    assert {name for name, state in states.items() if state == "Cached"} == set(SHARED)
    for name in STAGES[len(SHARED) :]:
        assert states[name] == "Completed"
        newest = max(converted.root.glob(f".exl2flow/tiny-*/{name}/*"), key=os.path.getmtime)
        shutil.rmtree(newest)  # the other tests know one folder per stage


@pytest.mark.parametrize(
    "kind", [MeasureConfig, pytest.param(ConversionConfig, marks=pytest.mark.slow)]
)
def test_flow_measure_shares_its_stages_with_convert(
    kind: type[MeasureConfig | ConversionConfig], converted: Converted
) -> None:
    given = converted.config.model_dump(include=set(MeasureConfig.model_fields))

    path = measure(kind.model_validate({**given, "out": converted.root / "m.json"}))

    assert path == converted.stage_folder("measure") / "measurement.json"
    assert path.is_file()


@pytest.mark.slow
def test_deleted_folder_is_made_again_with_the_same_bytes(converted: Converted) -> None:
    folder = converted.stage_folder("quantize")
    before = {path.name: path.read_bytes() for path in folder.glob("sublayers/*")}
    shutil.rmtree(folder)

    run, state = run_flow(converted.config)

    assert state.is_completed()
    assert task_states(run) == dict.fromkeys(STAGES, "Cached") | {"quantize": "Completed"}
    assert {path.name: path.read_bytes() for path in folder.glob("sublayers/*")} == before


def test_run_completes_when_every_artifact_call_raises(
    converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **values: object) -> None:
        raise RuntimeError("no artifacts today")

    for name in ("create_artifact", "update_artifact"):
        monkeypatch.setattr(SyncPrefectClient, name, refuse)
    shutil.rmtree(converted.stage_folder("quantize"))

    run, state = run_flow(converted.config)

    assert state.is_completed()
    assert task_states(run)["quantize"] == "Completed"
    assert artifacts(run) == {}
    warnings = [log for log in log_lines(run) if "cannot publish artifacts" in log.message]
    assert len(warnings) == 2  # one for the run's own artifact, one for those of its stages


@pytest.mark.slow
def test_failed_verdict_fails_the_run_after_all_stages(converted: Converted) -> None:
    strict = converted.config.validate_options.model_copy(update={"fail_perplexity_ratio": 0.01})
    config = converted.config.model_copy(update={"validate_options": strict})

    with pytest.raises(ValidationFailed, match=r"above 0\.01 x"):
        convert(config)

    run, state = run_flow(config)
    assert state.is_failed()
    assert "above 0.01 x" in run_message(run)
    assert str(artifacts(run)["tiny-run"].description).startswith(f"failed: {run_message(run)}")
    assert task_states(run) == dict.fromkeys(STAGES, "Cached")
    assert "tiny-report" in artifacts(run)
    assert "fail_perplexity_ratio` 100.0 -> 0.01" in str(artifacts(run)["tiny-why"].data)


def test_interrupted_run_is_cancelled_and_goes_on_to_the_same_bytes(converted: Converted) -> None:
    folder = converted.stage_folder("quantize")
    before = {path.name: path.read_bytes() for path in folder.glob("sublayers/*")}
    shutil.rmtree(folder)

    def interrupt(tick: Tick) -> None:
        if tick.stage == "quantize" and tick.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with reporting_to(interrupt):
        run, state = run_flow(converted.config)

    with pytest.raises(Interrupted):
        state.result()
    assert run_state(run) == "Cancelled"
    assert run_message(run).startswith("stopped in stage `quantize` after 2 of ")
    assert task_states(run)["quantize"] == "Cancelled"
    assert not [log for log in log_lines(run) if log.level > logging.WARNING]
    bar = artifacts(run)["tiny-run"]
    assert str(bar.description).startswith("cancelled: stopped in stage `quantize`")
    assert 50 < bar.data < 100
    finished = snapshot(folder / "sublayers")
    assert len(finished) == 2

    _, state = run_flow(converted.config)

    assert state.is_completed()
    assert finished.items() <= snapshot(folder / "sublayers").items()
    assert {path.name: path.read_bytes() for path in folder.glob("sublayers/*")} == before
