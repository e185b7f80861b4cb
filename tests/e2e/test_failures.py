"""A full disk or an unusable model or text is named, and costs nothing that was done before."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from checkpoints import make_checkpoint
from crash import STAGES, Conditions, Conversion, assert_refused
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from traces import delete, leftovers, truncate

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.slow
def test_a_full_disk_is_named_and_a_repeat_goes_on(undisturbed: Conversion, tmp_path: Path) -> None:
    conversion = Conversion.inside(tmp_path, undisturbed.source)
    stopped_in = []

    def starve(*limits: int) -> None:
        for limit in limits:
            ended = conversion.run(Conditions(file_limit=limit, states_seconds=0.0))
            assert_refused(ended, "File too large; free space", "repeat the command")
            path = Path(re.findall("cannot write `(.+?)`", ended.err)[0]).relative_to(tmp_path)
            stopped_in.append("out" if path.parts[0] == "out" else path.parts[2])
            assert leftovers(tmp_path) == []

    starve(500, 2_000, 30_000, 1_500_000)  # the head's factors are larger than all else
    conversion.finish_stage("sensitivity")
    starve(4_000, 30_000, 900_000, 1_500_000)
    conversion.finish()

    assert stopped_in == sorted(stopped_in, key=[*STAGES, "out"].index)
    assert set(stopped_in) >= {"tokenize", "sensitivity", "measure", "quantize", "out"}
    assert conversion.results() == undisturbed.results()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of two layers, to be spoilt."""
    return make_tiny("llama", tmp_path / "source")


def edit_config(source: Path, **entries: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def edit_weights(source: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(source / WEIGHTS)
    edit(tensors)
    save_file(tensors, source / WEIGHTS)


def unreadable_weights(source: Path) -> None:
    """Replace the weights by a link to itself, which nobody can read, not even root."""
    (source / WEIGHTS).unlink()
    (source / WEIGHTS).symlink_to(WEIGHTS)


def flat_projection(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].reshape(32, -1)


def other_width(source: Path) -> None:
    make_tiny("llama", source, intermediate_size=80)


SPOILT: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "unreadable weights": (
        unreadable_weights,
        ("cannot read", WEIGHTS, "symbolic link", "check the file"),
    ),
    "truncated weights": (lambda s: truncate(s / WEIGHTS), (WEIGHTS, "fetch it again")),
    "no weights": (lambda s: delete(s / WEIGHTS), ("holds no `*.safetensors`", "give the folder")),
    "no config": (lambda s: delete(s / "config.json"), ("config.json",)),
    "no tokenizer": (
        lambda s: delete(s / "tokenizer.json"),
        ("neither `tokenizer.json` nor `tokenizer.model`", "fetch one"),
    ),
    "missing tensor": (
        lambda s: edit_weights(s, lambda tensors: tensors.pop(Q_PROJ)),
        (f"`{Q_PROJ}`", "is missing", "get the model's files in"),
    ),
    "wrong shape": (
        lambda s: edit_weights(s, flat_projection),
        (f"`{Q_PROJ}` has shape (32, 128)", "(64, 64)", "get the model's files in"),
    ),
    "unknown architecture": (
        lambda s: edit_config(s, architectures=["LlamaForCausalLN"]),
        ("`LlamaForCausalLN`", "LlamaForCausalLM"),
    ),
    "k not a multiple of 32": (
        other_width,
        ("`model.layers.0.mlp.down_proj` (80)", "multiple of 32", "cannot store this model"),
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_an_unusable_source_is_refused_before_any_work(
    source: Path, tmp_path: Path, what: str
) -> None:
    spoil, words = SPOILT[what]
    spoil(source)
    conversion = Conversion.inside(tmp_path, source)

    ended = conversion.run()

    assert_refused(ended, *words)
    assert not conversion.out.exists()
    assert not conversion.work_root.exists()


def test_a_dry_run_names_everything_that_does_not_fit_a_family(tmp_path: Path) -> None:
    source = make_checkpoint("starcoder2", tmp_path / "source")
    norm = "model.layers.0.input_layernorm"
    edit_config(source, intermediate_size=100)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{norm}.bias"]
        tensors[f"{norm}.weight"] = torch.ones(63)
        tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16)

    edit_weights(source, spoil)
    conversion = Conversion.inside(tmp_path, source, "--dry-run")

    ended = conversion.run()

    assert_refused(
        ended,
        "multiple of 32",
        "`model.layers.1.mlp.c_proj` (100)",
        str(source),
        f"`{norm}.bias` (64,) is missing",
        f"`{norm}.weight` has shape (63,)",
        "`Starcoder2ForCausalLM` does not have: `model.layers.1.self_attn.q_norm.weight`",
    )


def test_a_dry_run_names_the_key_of_a_config(tmp_path: Path) -> None:
    source = make_checkpoint("gpt2", tmp_path / "source")
    edit_config(source, n_head=5)

    ended = Conversion.inside(tmp_path, source, "--dry-run").run()

    assert_refused(ended, "`n_head`", "config.json` is 5; it must divide `n_embd`, 64")


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert_refused(
        Conversion.inside(tmp_path, tmp_path / "nowhere").run(), f"{tmp_path / 'nowhere'}"
    )


@pytest.mark.parametrize(
    ("name", "value", "measured"),
    [
        ("model.embed_tokens.weight", float("nan"), 0),
        slow("model.norm.weight", float("nan"), 0),
        slow("model.layers.1.input_layernorm.weight", float("nan"), 2),
        slow(Q_PROJ, float("nan"), 2),
        (Q_PROJ, float("inf"), 2),
        ("lm_head.weight", float("nan"), 0),
    ],
)
@pytest.mark.parametrize("kind", ["fisher", slow("error")])
def test_weights_that_are_not_finite_are_named_and_earlier_results_stay(
    source: Path, tmp_path: Path, kind: str, name: str, value: float, measured: int
) -> None:
    edit_weights(source, lambda tensors: tensors[name].view(-1)[5:7].fill_(value))
    conversion = Conversion.inside(tmp_path, source, "--sensitivity", kind)

    ended = conversion.run()

    assert_refused(ended, f"`{name}`", "NaN or infinity in", "download or export the model again")
    assert conversion.manifest("tokenize")["status"] == "complete"
    if kind == "fisher":  # the way back begins with a walk forward that meets them all
        assert conversion.manifest("sensitivity")["cursor"] == 0
    else:
        assert conversion.manifest("measure")["cursor"] == measured
    assert not conversion.out.exists()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"n": [1, 2]}, ("has no text column", "`n` (int64)", "add one")),
        ({"text": ["Too little."]}, ("one row needs 64", "add text or lower `row_tokens`")),
        ({"text": [None, " "]}, ("holds no text", "`text`")),
    ],
)
def test_calibration_data_that_does_not_do_is_refused(
    source: Path, tmp_path: Path, table: dict[str, list[object]], words: tuple[str, ...]
) -> None:
    file = tmp_path / "own.parquet"
    pd.DataFrame(table).to_parquet(file)
    conversion = Conversion.inside(tmp_path, source, "--calibration", str(file))

    ended = conversion.run()

    assert_refused(ended, f"`{file}`", *words)
    assert not conversion.out.exists()


def test_a_file_that_is_no_parquet_is_refused(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.parquet"
    file.write_text("plain text")

    ended = Conversion.inside(tmp_path, source, "--calibration", str(file)).run()

    assert_refused(ended, f"`{file}` cannot be read as Parquet", "give a file with a text column")
