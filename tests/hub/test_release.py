"""Conversions and sweeps that publish what they made: asked before any work, done at the end."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config, small_options, snapshot
from hub_server import TOKEN, Hub
from pydantic import ValidationError
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.work.execution import ONLY_PUBLISHING
from exl2flow.core.errors import (
    ConfigError,
    HubError,
    PublicationDamaged,
    PublicationRefused,
    SourceModelError,
    SweepFailed,
)
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.sweep import REPORT_PAGE, SWEEP_FILE, SweepConfig
from exl2flow.core.store.source import HubModel
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.local import run_locally, sweep_locally
from exl2flow.pipeline.release import check_release
from exl2flow.pipeline.stages import STAGES

REPO = "org/tiny-exl2"


@pytest.fixture
def source(hub: Hub, tiny_source: Path, converted: list[Path], tmp_path: Path) -> Path:
    """The model, fetched from the Hub; its measurement is there, and what 3 and 6 bits need."""
    hub.add_folder("org/tiny", tiny_source, card={"license": "mit"})
    shutil.copytree(converted[0].parent / "work", tmp_path / "work")
    found = hub_tasks.fetch(HubModel(repo="org/tiny"), tmp_path / "work", hub_tasks.Hub.open())
    hub.requests.clear()
    return found


def conversion(source: Path, root: Path, **publish: object) -> ConversionConfig:
    """Return a conversion that publishes, of little work."""
    to = {"repo": REPO, "max_kl": 100, **publish} if publish.get("repo", REPO) else None
    return small_config(source, root / "out", bpw=4.0, work_root=root / "work", publish=to)


def sweep_of(source: Path, root: Path, **values: Any) -> SweepConfig:
    given = {**small_options(), "bpw": (3, 6), "work_root": root / "work", **values}
    to = {"repo": REPO, "max_kl": 100}
    return SweepConfig.model_validate(
        {"source": source, "out": root / "out", "publish": to, **given}
    )


def test_conversion_ends_with_a_public_branch_and_its_measurement(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    made = run_locally(conversion(source, tmp_path))

    assert made.published is not None
    assert set(made.published.branches) == {"4.0bpw", "main"}
    assert not hub.repos[REPO]["private"]
    measured = (made.stages["measure"] / "measurement.json").read_bytes()
    assert hub.files(REPO)["measurement.json"] == measured
    assert {path.name for path in tmp_path.iterdir()} == {"hub", "out", "work"}


@pytest.mark.slow
def test_publishing_changes_no_stage_and_no_byte_of_the_result(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    quiet = run_locally(conversion(source, tmp_path, repo=None))
    before = snapshot(quiet.out)

    made = run_locally(conversion(source, tmp_path))

    assert made.stages == quiet.stages
    assert snapshot(made.out) == before
    assert REPO not in (made.out / RECORD_FILE).read_text()


def test_failed_publication_keeps_the_conversion_and_is_all_that_is_repeated(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    config = conversion(source, tmp_path)
    hub.fail("POST .*/commit/4", "status", status=403)
    with pytest.raises(HubError, match="write access"):
        run_locally(config)
    before = snapshot(config.out)
    assert hub.repos[REPO]["private"]

    run_locally(config)

    assert snapshot(config.out) == before
    assert len(hub.asked("PUT /uploads/")) == 1
    assert not hub.repos[REPO]["private"]


def test_sweep_publishes_all_bitrates_and_its_files_say_where(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    made = sweep_locally(sweep_of(source, tmp_path))

    assert made.published is not None
    assert set(hub.repos[REPO]["branches"]) == {"3.0bpw", "6.0bpw", "main"}
    assert not hub.repos[REPO]["private"]
    content = json.loads((made.out / SWEEP_FILE).read_bytes())
    assert content["published"]["branches"] == dict(made.published.branches)
    page = (made.out / REPORT_PAGE).read_text(encoding="utf-8")
    assert f'<a href="{hub.url}/{REPO}/tree/6.0bpw">6.0bpw</a>' in page


@pytest.mark.slow
def test_sweep_with_a_bitrate_that_failed_publishes_nothing(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    strict = {"rows": 1, "row_tokens": 64, "sample_tokens": 0, "fail_perplexity_ratio": 1e-9}
    config = sweep_of(source, tmp_path, validate_options=strict)

    with pytest.raises(SweepFailed, match=f"Nothing was published to `{REPO}`"):
        sweep_locally(config)

    assert REPO not in hub.repos
    assert json.loads((config.out / SWEEP_FILE).read_bytes())["published"] is None


@pytest.mark.slow
def test_damaged_upload_of_a_sweep_never_becomes_public(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    config = sweep_of(source, tmp_path)
    hub.fail("PUT /uploads/", "damage")

    with pytest.raises(PublicationDamaged, match="stays private"):
        sweep_locally(config)

    assert hub.repos[REPO]["private"]
    assert sorted(p.parent.name for p in config.out.glob("*/model.safetensors")) == [
        "3.0bpw",
        "6.0bpw",
    ]


@pytest.mark.parametrize(
    ("card", "gated", "reason"),
    [
        ({"license": "cc-by-nc-4.0"}, False, "forbids commercial use"),
        ({}, False, "states no licence"),
        ({"license": "mit"}, "manual", "is gated"),
    ],
)
def test_source_that_may_not_be_published_is_refused_before_it_is_fetched(
    hub: Hub, tiny_source: Path, tmp_path: Path, card: dict[str, str], gated: Any, reason: str
) -> None:
    hub.add_folder("org/tiny", tiny_source, card=card, gated=gated)
    config = conversion(Path("org/tiny"), tmp_path)

    with pytest.raises(PublicationRefused, match=f"{reason}.*--force"):
        check_release(config)

    assert not hub.asked("GET /objects/|/resolve/|POST|PUT")
    check_release(conversion(Path("org/tiny"), tmp_path, force=True))


def test_origin_of_a_fetched_model_is_not_asked_for_again(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    check_release(conversion(Path("org/tiny"), tmp_path))

    assert [request.path for request in hub.requests] == ["/api/whoami-v2"]


def test_what_is_known_of_a_folder_is_asked_before_it_is_converted(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    config = conversion(tiny_source, tmp_path)
    with pytest.raises(PublicationRefused, match="--base-model"):
        run_locally(config)
    assert not config.work_dir_root.exists()

    hub.create("org/base", card={"license": "mit"})
    check_release(conversion(tiny_source, tmp_path, base_model="org/base"))


@pytest.mark.parametrize(
    ("repo", "error", "reason"),
    [
        ("org/tiny", ConfigError, "is the source itself"),
        ("stranger/tiny-exl2", HubError, "belongs to `tester`.*write access to `stranger`"),
    ],
)
def test_repository_that_cannot_be_written_is_refused_at_once(
    hub: Hub, source: Path, tmp_path: Path, repo: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        check_release(conversion(source, tmp_path, repo=repo))


def test_missing_token_is_found_before_any_work(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    config = conversion(source, tmp_path)

    with pytest.raises(HubError, match="there is none; set HF_TOKEN"):
        run_locally(config)

    assert not config.out.exists()


@pytest.mark.slow
def test_hub_that_is_away_at_the_start_does_not_stop_a_conversion(
    hub: Hub, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("GET /api/whoami-v2", "status", times=3, status=503)

    with caplog.at_level(logging.WARNING, "exl2flow"):
        made = run_locally(conversion(source, tmp_path))

    assert f"whether `{REPO}` may receive the result is checked again" in caplog.text
    assert made.published is not None
    assert not hub.repos[REPO]["private"]


def test_gate_of_a_folder_is_asked_before_the_token(
    hub: Hub, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")

    with pytest.raises(PublicationRefused, match="--base-model"):
        check_release(conversion(tiny_source, tmp_path))

    assert not hub.requests


def test_mistyped_path_is_told_before_anything_is_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()

    with pytest.raises(SourceModelError, match="no folder `demo/nomodel`"):
        check_release(conversion(Path("demo/nomodel"), tmp_path))

    assert not hub.requests


@pytest.mark.slow
def test_measurement_goes_out_without_paths_of_this_machine(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    quiet = run_locally(conversion(source, tmp_path, repo=None))
    content = json.loads((quiet.stages["measure"] / "measurement.json").read_bytes())
    content["exl2flow"]["options"]["text"] = "/home/me/my text.parquet"
    given = tmp_path / "given.json"
    given.write_text(json.dumps(content))
    config = conversion(source, tmp_path).model_copy(update={"measurement": given})

    run_locally(config)

    there = json.loads(hub.files(REPO)["measurement.json"])
    assert there["exl2flow"]["options"]["text"] == "my text.parquet"
    assert there["measurement"] == content["measurement"]


def test_name_without_an_owner_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"publish\.repo"):
        conversion(tmp_path, tmp_path, repo="tiny-exl2")


@pytest.mark.slow
def test_command_shows_what_was_made_before_it_says_that_publishing_failed(
    hub: Hub, source: Path, tmp_path: Path
) -> None:
    rows = ("--rows", "2", "--measure-rows", "1", "--row-tokens", "64")
    words = ["sweep", str(source), "--out", str(tmp_path / "out"), "--bpw", "3", "--no-prefect"]
    words += [*rows, "--measure-row-tokens", "64", "--quality", "fast", "--device", "cpu"]
    words += ["--validate-row-tokens", "64", "--publish", REPO, "--max-kl", "100"]
    hub.fail("POST .*/commit/3", "status", status=403)

    failed = CliRunner().invoke(app, words)
    again = CliRunner().invoke(app, words)

    assert failed.exit_code == 1
    assert f"report  {tmp_path / 'out' / REPORT_PAGE}" in failed.stdout
    assert ONLY_PUBLISHING in failed.stderr
    assert "Traceback" not in failed.stderr
    assert again.exit_code == 0, again.stderr
    assert f"public     {hub.url}/{REPO}" in again.stdout
    assert TOKEN not in failed.output + again.output


def test_fingerprints_do_not_know_where_a_result_goes(source: Path, tmp_path: Path) -> None:
    first, second = (
        open_pipeline(conversion(source, tmp_path, repo=repo), STAGES).refs for repo in (REPO, None)
    )

    assert first == second
