"""What goes from a source folder into the output, and what never does."""

import json
from pathlib import Path

import pytest
from conversions import small_config
from stage_runs import calibrated_on, text_parquet
from tiny import make_tiny

from exl2flow.core.errors import PreflightFailed, SourceModelError
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.inference.report.publication import CARD_FILE, describe, public_files
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.compile.refined import other_files
from exl2flow.quant.compile.stage import remove_others
from exl2flow.quant.forecast.preflight import preflight


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a folder with a client's name, reached by a relative path; keys lie beside it."""
    monkeypatch.chdir(tmp_path)
    folder = make_tiny("llama", tmp_path / "clients" / "acme" / "model").relative_to(tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        origin = {"_name_or_path": str(tmp_path / folder), "name_or_path": "clients/acme/model"}
        path.write_text(json.dumps({**content, **origin}))
    (folder / "wandb-key.txt").write_text("WANDB")
    (folder / "train_private.csv").write_text("rows of a customer")
    return folder


def test_link_out_of_the_source_is_refused_by_preflight_and_nothing_is_made(
    source: Path, tmp_path: Path
) -> None:
    token = tmp_path / "home" / "token"
    token.parent.mkdir()
    token.write_text("hf_secret")
    (source / "LICENSE.txt").symlink_to(token)
    config = small_config(source, tmp_path / "out")

    with pytest.raises(PreflightFailed, match=r"`.*/LICENSE\.txt` is a link to `.*/home/token`"):
        preflight(config, STAGES)
    with pytest.raises(PreflightFailed):
        run_locally(config)

    assert not config.out.exists()
    assert not config.work_dir_root.exists()


def test_plan_names_what_is_carried_and_what_is_left_out(source: Path, tmp_path: Path) -> None:
    rows = dict(preflight(small_config(source, tmp_path / "out"), STAGES).rows())

    assert rows["carried"] == "config.json, tokenizer.json, tokenizer_config.json"
    assert rows["left out"] == "train_private.csv, wandb-key.txt"


def test_no_published_file_has_a_path_of_the_user_or_a_file_that_is_none_of_the_model(
    source: Path, tmp_path: Path
) -> None:
    mails = source.parent / "mail.parquet"
    text_parquet(mails)
    (source.parent / "held out.txt").write_text("Once upon a time there was a mouse. " * 40)
    calibration = calibrated_on(str(mails), (2, 32), (1, 32))
    judged = {"rows": 1, "row_tokens": 64, "sample_tokens": 0, "fail_perplexity_ratio": 100}
    config = small_config(
        source,
        Path("clients/acme/out"),
        bpw=4.0,
        calibration=calibration,
        validate_options={**judged, "text": source.parent / "held out.txt"},
    )
    out = run_locally(config).out
    (out / "mine.txt").write_text("put there later")

    files = public_files(describe(out), "card")

    assert set(files) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        RECORD_FILE,
        "exl2flow-score.json",
        CARD_FILE,
    }
    assert "clients/acme" in (out / RECORD_FILE).read_text()  # kept on this machine
    for name, content in files.items():
        data = content.read_bytes() if isinstance(content, Path) else content
        for folder in (b"clients", b"acme", str(tmp_path).encode()):
            assert folder not in data, name
    record = json.loads(files[RECORD_FILE])  # type: ignore[arg-type]
    assert record["options"]["calibration"]["text"] == "mail.parquet"
    for name in ("config.json", "tokenizer_config.json"):
        assert "name_or_path" not in (out / name).read_text()


@pytest.mark.slow
def test_links_in_an_output_are_not_published(source: Path, tmp_path: Path) -> None:
    out = run_locally(small_config(source, tmp_path / "out")).out
    (tmp_path / "token").write_text("hf_secret")
    (out / "more.safetensors").symlink_to(tmp_path / "token")  # not recorded

    assert "more.safetensors" not in public_files(describe(out), "card")
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").symlink_to(tmp_path / "token")
    with pytest.raises(SourceModelError, match=r"tokenizer\.json"):
        public_files(describe(out), "card")


def test_file_that_leaves_the_source_leaves_the_output_and_nothing_else_does(
    source: Path, tmp_path: Path
) -> None:
    (source / "chat_template.jinja").write_text("{{ messages }}")
    config = small_config(source, tmp_path / "out")
    stages = [stage for stage in STAGES if stage.name != "validate"]
    out = run_locally(config, stages=stages).out
    assert "chat_template.jinja" in public_files(describe(out), "card")
    for name in ("chat_template.json", "notes.txt"):  # of the user
        (out / name).write_text("{}")
    (source / "chat_template.jinja").unlink()

    run_locally(config, stages=stages)

    assert not (out / "chat_template.jinja").exists()
    assert (out / "chat_template.json").exists()
    assert (out / "notes.txt").exists()
    assert public_files(describe(out), "card").keys() == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        RECORD_FILE,
        CARD_FILE,
    }


def test_files_that_an_older_version_may_have_left_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / RECORD_FILE).write_text('{"source": "/model"}')
    for name in ("chat_template.jinja", "config.json", "notes.txt"):
        (tmp_path / name).write_text("{}")

    remove_others(tmp_path, {"config.json"})

    assert [r.args for r in caplog.records] == [(tmp_path / "chat_template.jinja",)]
    assert len([*tmp_path.iterdir()]) == 4


FOREIGN = ("measurement.safetensors", "consolidated.safetensors", "pytorch_model.bin.index.json")


@pytest.mark.parametrize("version", ["this", "an older one"])
def test_only_what_a_conversion_wrote_is_deleted(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    content: dict[str, object] = {"source": "/model"}
    if version == "this":
        content["files"] = [RECORD_FILE, *written, {}]
    (tmp_path / RECORD_FILE).write_text(json.dumps(content))
    for name in (*written, *FOREIGN, "lora.safetensors", ".model.safetensors.0.partial"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder.safetensors").mkdir()

    remove_others(tmp_path, {"config.json"})

    left = {path.name for path in tmp_path.iterdir()} - {"folder.safetensors", RECORD_FILE}
    if version == "this":
        assert left == {*FOREIGN, "lora.safetensors"}
        assert [r.args for r in caplog.records] == [(tmp_path / "lora.safetensors",)]
    else:  # its record does not say what it wrote
        assert left == {*FOREIGN}


def test_refining_takes_over_the_files_of_the_model_only(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "pytorch_model.bin.index.json").write_text("{}")

    assert {path.name for path in other_files(source)} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
    }
    (source / "model.safetensors.index.json").unlink()
    (source / "model.safetensors.index.json").symlink_to("wandb-key.txt")
    with pytest.raises(SourceModelError, match=r"index\.json` is a link"):
        other_files(source)
