"""Everything that can be known to be wrong is found before any work, all at once."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import small_config, snapshot
from measurements import written_in_nats
from refusals import change_config, change_tensors, config_of, problems_of
from safetensors.torch import load_file
from stage_runs import foreign_measurement
from tiny import make_tiny

from exl2flow.core.errors import PreflightFailed
from exl2flow.model import resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast import preflight as preflight_module
from exl2flow.quant.forecast.preflight import preflight

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def test_plan_describes_the_conversion_and_writes_nothing(source: Path) -> None:
    before = snapshot(source.parent)

    plan = preflight(config_of(source, bpw=4.5), STAGES)

    assert (plan.model, plan.architecture, plan.layers) == ("model", "LlamaForCausalLM", 2)
    assert (plan.target, plan.device) == ("4.5bpw", "cpu")
    tensors = load_file(source / "model.safetensors")
    assert plan.weights == sum(tensor.numel() for tensor in tensors.values())
    assert snapshot(source.parent) == before
    json.dumps(plan.to_json())
    assert {"model", "device", "target", "output", "memory"} <= {name for name, _ in plan.rows()}


def test_output_size_is_forecast(converted: Any, tmp_path: Path) -> None:
    config = converted.config.model_copy(update={"out": tmp_path / "out"})
    written = sum(path.stat().st_size for path in converted.config.out.glob("*.safetensors"))

    plan = preflight(config, STAGES)

    # the header is not counted, and the last bits of the budget are not used
    assert plan.output_bytes == pytest.approx(written, rel=0.12)


def test_all_problems_are_in_one_list(source: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(Q_PROJ)
        tensors[UP_PROJ] = tensors[UP_PROJ][:-1].clone()

    change_tensors(source, spoil)
    (source / "tokenizer.json").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    (tmp_path / "file").write_text("")
    config = config_of(
        source,
        bpw=2.0,
        work_root=tmp_path / "file" / "work",
        calibration={"text": tmp_path / "nowhere.parquet"},
        validate_options={"text": tmp_path / "nowhere.txt"},
    )

    problems = problems_of(config)

    for words in (
        f"`{Q_PROJ}` (64, 64) is missing",
        f"`{UP_PROJ}` has shape (95, 64), the config implies (96, 64)",
        "tokenizer.json",
        "tokenizer.model",
        "was not made from this source",
        "is not a folder that can be written",
        "nowhere.parquet",
        "nowhere.txt",
        "2 bits per weight are out of reach",
    ):
        assert any(words in line for line in problems), words


@pytest.mark.parametrize("inside", [".", "work"])
def test_work_root_in_the_output_is_refused_and_no_deletion_is_advised(
    inside: str, source: Path
) -> None:
    root = source.parent / "out" / inside
    root.mkdir(parents=True)
    (root / "digests.json").write_text("{}")  # of a run that was allowed to begin

    (problem,) = problems_of(config_of(source, work_root=root))

    assert f"the work root `{root.resolve()}` is in the output" in problem
    assert "delete" not in problem


@pytest.mark.parametrize("place", ["file", "file/out"])
def test_output_that_is_a_file_is_one_problem(place: str, source: Path) -> None:
    file = source.parent / "file"
    file.write_text("mine")

    problems = problems_of(small_config(source, source.parent / place))

    assert problems == [f"`{file}` is not a folder that can be written; choose another `--out`"]


def test_missing_measurement_is_one_problem(source: Path) -> None:
    problems = problems_of(small_config(source, source.parent / "out", measurement="/nope.json"))

    assert problems == ["no such file: `/nope.json`"]


def test_many_missing_tensors_are_counted(source: Path) -> None:
    change_tensors(source, lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name])

    problems = problems_of(config_of(source))

    assert len([line for line in problems if "is missing in" in line]) == 8
    assert problems[-1].startswith("… and 1 more; get the model's files in")


def test_matrix_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model", intermediate_size=100)

    problems = problems_of(config_of(source))

    named = [line for line in problems if "multiple of 32" in line]
    assert len(named) == 1
    assert "`model.layers.0.mlp.down_proj` (100), `model.layers.1.mlp.down_proj` (100)" in named[0]
    assert "EXL2 cannot store this model" in named[0]


@pytest.mark.parametrize("value", [2 * 10**9, 10**30])
@pytest.mark.parametrize("field", ["vocab_size", "intermediate_size", "num_hidden_layers"])
@pytest.mark.timeout(20)
def test_sizes_beyond_reason_are_problems_like_others(field: str, value: int, source: Path) -> None:
    change_config(source, **{field: value})

    problems = problems_of(config_of(source, target_bytes=10**6, tune={"steps": 1}))

    assert any(f"`{field}`" in line for line in problems)


def test_unknown_architecture_is_refused(source: Path) -> None:
    change_config(source, architectures=["LlamaForCausalLLM"])

    assert any("LlamaForCausalLM" in line for line in problems_of(config_of(source)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(name: str, source: Path) -> None:
    (source / name).unlink()

    wanted = name if name == "config.json" else "*.safetensors"
    assert any(wanted in line for line in problems_of(config_of(source)))


def test_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert any("nowhere" in line for line in problems_of(config_of(tmp_path / "nowhere")))


@pytest.mark.parametrize("target", [{"bpw_total": 9.0}, {"target_bytes": 120_000}])
def test_a_free_head_that_will_not_be_measured_is_refused(
    target: dict[str, object], source: Path, tmp_path: Path
) -> None:
    by_error = {"sensitivity": {"kind": "error"}, **target}
    measured = foreign_measurement(tmp_path / "measurement.json", resolve(source))

    for values in (by_error, {"measurement": measured, **target}):
        (problem,) = problems_of(config_of(source, **values))
        assert "does not include the head" in problem
        preflight(config_of(source, head_bits=6, **values), STAGES)
    path = written_in_nats(tmp_path / "nats.json", resolve(source))
    preflight(config_of(source, measurement=path, **by_error), STAGES)


def test_trying_allocations_without_costs_in_nats_is_refused(source: Path, tmp_path: Path) -> None:
    best = {"allocate": {"rounds": 1}}
    measured = foreign_measurement(tmp_path / "measurement.json", resolve(source))

    for values in ({"sensitivity": {"kind": "error"}}, {"measurement": measured}):
        (problem,) = problems_of(config_of(source, **best, **values))
        assert "further rounds of allocation need costs in nats" in problem
    preflight(config_of(source, **best), STAGES)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"tune": {"steps": 1}}, "training set"),
        ({"allocate": {"rounds": 1}}, "allocation set"),
        ({"tune": {"steps": 1}, "allocate": {"rounds": 1}}, "training and allocation set"),
    ],
)
def test_a_single_row_cannot_judge(values: dict[str, object], what: str, source: Path) -> None:
    one = {"rows": 1, "row_tokens": 64, "measure_rows": 1, "measure_row_tokens": 64}

    (problem,) = problems_of(config_of(source, calibration=one, **values))

    assert problem.startswith(f"{what} rows of text aside")
    preflight(config_of(source, calibration=one), STAGES)
    preflight(config_of(source, calibration={**one, "rows": 2}, **values), STAGES)


def test_measurement_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    other = resolve(make_tiny("llama", tmp_path / "other", intermediate_size=128))
    path = foreign_measurement(tmp_path / "measurement.json", other)

    (problem,) = problems_of(config_of(source, measurement=path))

    assert "it is of another model" in problem


def test_missing_accelerator_is_a_problem_like_others(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    (problem,) = problems_of(config_of(source, device="cuda"))

    assert "no CUDA device is visible" in problem


def test_too_little_disk_is_a_problem(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = preflight(config_of(source), STAGES)
    need = plan.output_bytes + plan.work_bytes
    free, usage = [need], type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free[0]))

    preflight(config_of(source), STAGES)
    free[0] = need - 1
    (problem,) = problems_of(config_of(source))

    assert "of disk" in problem
    assert "`--work-root`" in problem


def test_too_little_memory_is_a_problem(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = preflight(config_of(source), STAGES).memory_bytes
    monkeypatch.setattr(preflight_module, "available_memory", lambda: need - 1)

    (problem,) = problems_of(config_of(source))

    assert "of memory" in problem
    assert "the largest part of the model, `lm_head`" in problem


def test_longer_rows_need_more_memory_and_disk(source: Path) -> None:
    longer = {"rows": 200, "row_tokens": 2048, "measure_rows": 1, "measure_row_tokens": 64}

    small, large = (
        preflight(config_of(source), STAGES),
        preflight(config_of(source, calibration=longer), STAGES),
    )

    assert large.memory_bytes - small.memory_bytes > 199 * 2048 * 64 * 4
    assert large.work_bytes > small.work_bytes


def test_gradients_need_memory_and_disk_for_their_rows(source: Path) -> None:
    plans = [
        preflight(config_of(source, sensitivity=options), STAGES)
        for options in ({"kind": "error"}, {"rows": 1}, {"rows": 64}, {"rows": 6400})
    ]

    work = [plan.work_bytes for plan in plans]
    assert work == sorted(set(work))
    row = 64 * 64 * 4  # tokens, hidden, bytes
    assert plans[3].memory_bytes - plans[0].memory_bytes > 3 * 6000 * row


def test_tuning_needs_memory_for_the_whole_model(source: Path) -> None:
    before, after = (
        preflight(config_of(source, tune={"steps": steps}), STAGES).memory_bytes for steps in (0, 1)
    )

    assert after - before > (source / "model.safetensors").stat().st_size


def test_padded_embedding_is_no_problem(source: Path) -> None:
    def pad(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 19))

    change_tensors(source, pad)

    assert preflight(config_of(source), STAGES).layers == 2


def test_rows_longer_than_the_positions_cause_a_warning(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longer = {"rows": 1, "row_tokens": 512, "measure_rows": 1, "measure_row_tokens": 64}

    with caplog.at_level(logging.WARNING):
        preflight(config_of(source, calibration=longer), STAGES)

    assert "rows of 512 tokens exceed the model's 256" in caplog.text


def test_a_gpu_that_is_not_used_is_in_the_plan(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the GPU is not used: the kernels need CuPy"
    monkeypatch.setattr(preflight_module, "unused_gpu", lambda: reason)

    rows = dict(preflight(config_of(source, device="auto"), STAGES).rows())

    assert rows["device"] == f"cpu; {reason}"
    assert dict(preflight(config_of(source, device="cpu"), STAGES).rows())["device"] == "cpu"


def test_too_little_memory_leaves_the_plan_to_be_shown(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module, "available_memory", lambda: 1)

    with pytest.raises(PreflightFailed) as caught:
        preflight(config_of(source), STAGES)

    assert dict(caught.value.plan).keys() >= {"model", "memory", "GPU fit"}
    assert "no option lowers that enough" in str(caught.value)


def test_only_what_lowers_memory_enough_is_advised(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {"rows": 20_000, "row_tokens": 32, "measure_rows": 1, "measure_row_tokens": 32}
    config = config_of(source, calibration=many)
    need = preflight(config, STAGES).memory_bytes
    monkeypatch.setattr(preflight_module, "available_memory", lambda: need - 1)

    (problem,) = problems_of(config)

    assert "`--rows 16`" in problem
    assert "--row-tokens" not in problem
