"""What would be published is known without the Hub, as far as it can be."""

import json
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import ConfigError, PublicationRefused, WorkDirBusy
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.runtime.progress import Tick
from exl2flow.core.store.files import digest
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.core.store.store import WorkDir
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.hub.publish import PublicationDraft, draft, publish

REPO = "org/tiny-exl2"


def draft_of(models: list[Path], **values: Any) -> PublicationDraft:
    known = {"models": models, "repo": REPO, "max_kl": 100, **values}
    return draft(PublishConfig.model_validate(known))


def test_draft_has_what_is_published_and_asks_the_hub_nothing(
    hub: Hub, models: list[Path], tmp_path: Path
) -> None:
    measurement = tmp_path / "measurement.json"
    measurement.write_text("{}")

    found = draft_of(models, measurement=measurement)

    assert hub.requests == []
    known = {"models": models, "repo": REPO, "device": "cpu", "max_kl": 100}
    config = PublishConfig.model_validate({**known, "measurement": measurement})
    publish(config, hub_tasks.Hub.open())
    assert hub.files(REPO)["README.md"].decode() == found.card
    for branch, files in found.branches.items():
        assert {*files, ".gitattributes"} == set(hub.files(REPO, branch))
    assert found.notes == ()
    assert len(found.unchecked) == 3


def test_the_arrays_of_a_measurement_go_along(models: list[Path], tmp_path: Path) -> None:
    measurement, arrays = tmp_path / "given.json", tmp_path / "given.safetensors"
    arrays.write_bytes(b"numbers")
    content = {"arrays": {"sha256": digest(arrays), "slots": {}, "options": []}}
    measurement.write_text(json.dumps(content))

    found = draft_of(models, measurement=measurement)

    names = ("README.md", "measurement.json", "measurement.safetensors")
    assert found.branches["main"] == names
    arrays.write_bytes(b"others")
    with pytest.raises(ConfigError, match=r"given\.safetensors` is damaged or belongs"):
        draft_of(models, measurement=measurement)
    arrays.unlink()
    with pytest.raises(ConfigError, match=r"given\.safetensors`, which .* is missing"):
        draft_of(models, measurement=measurement)


def test_model_that_is_being_written_is_not_published(models: list[Path], tmp_path: Path) -> None:
    with WorkDir(tmp_path / "work").lock_output(models[0]), pytest.raises(WorkDirBusy):
        draft_of(models)


def test_models_are_not_written_until_they_are_verified(
    hub: Hub, models: list[Path], tmp_path: Path
) -> None:
    seen = set[str]()

    def check(tick: Tick) -> None:
        work = WorkDir(tmp_path / "work")
        for model in models:
            with pytest.raises(WorkDirBusy), work.lock_output(model):
                pytest.fail("it is read")
        seen.add(tick.stage)

    config = PublishConfig(models=tuple(models), repo=REPO, device="cpu", max_kl=100)
    publish(config, hub_tasks.Hub.open(), progress=check)

    assert seen == {"upload", "verify"}


def test_draft_is_refused_like_a_publication(models: list[Path]) -> None:
    with pytest.raises(PublicationRefused, match="KL divergence"):
        draft_of(models, max_kl=1e-6)
    assert draft_of(models, max_kl=1e-6, force=True).notes


def test_draft_does_not_know_the_licence_of_a_source_that_is_looked_up(models: list[Path]) -> None:
    for folder in models:
        record = folder / RECORD_FILE
        record.write_text(json.dumps({**json.loads(record.read_text()), "provenance": None}))

    with pytest.raises(PublicationRefused, match="--base-model"):
        draft_of(models)
    assert draft_of(models, base_model="org/tiny").unchecked[0].startswith("licence and gate of")
    assert len(draft_of(models, base_model="org/tiny", license="mit").unchecked) == 3


def test_dry_run_prints_the_card_and_what_was_not_checked(hub: Hub, models: list[Path]) -> None:
    command = ["publish", *map(str, models), "--repo", REPO, "--max-kl", "100", "--dry-run"]

    shown, as_json = (CliRunner().invoke(app, [*command, *more]) for more in ([], ["--json"]))

    card = draft_of(models).card
    assert shown.exit_code == as_json.exit_code == 0
    assert shown.stdout == card + "\n"
    assert f"not checked: whether there is a token that may write to `{REPO}`" in shown.stderr
    assert json.loads(as_json.stdout)["card"] == card
    assert hub.requests == []
