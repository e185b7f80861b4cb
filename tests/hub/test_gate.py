"""What is examined before models go to the Hub, and what `--force` overrides."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hub_fixtures import REPO, change, is_public, run
from hub_server import Hub

from exl2flow.core.errors import PublicationRefused
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE


def set_kl(folder: Path, kl: float, *of_rows: float) -> None:
    """Let validation have found another divergence, in all rows or in each of eight."""
    divergences = [10 * each for each in of_rows or [kl] * 8]
    rows = {"tokens": [10] * 8, "losses": [20.0] * 8, "divergences": divergences}
    score = json.loads((folder / SCORE_FILE).read_text())["score"] | {"text": "t", "rows": rows}
    change(folder / SCORE_FILE, score={**score, "kl_divergence": kl})


def test_the_gate_is_asked_before_the_token(
    hub: Hub, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    unscored(models)
    change(models[0] / RECORD_FILE, provenance=None)
    change(models[1] / RECORD_FILE, provenance=None)

    with pytest.raises(PublicationRefused) as caught:
        run(models)

    for reason in ("no measured KL divergence", "--base-model", "states no licence"):
        assert reason in str(caught.value)
    assert not hub.requests


def nothing(folders: list[Path]) -> None:
    """Change nothing."""


def rising(folders: list[Path]) -> None:
    set_kl(folders[0], 0.1)
    set_kl(folders[1], 0.2)


def rising_without_rows(folders: list[Path]) -> None:
    rising(folders)
    for folder in folders:
        score = json.loads((folder / SCORE_FILE).read_text())["score"]
        change(folder / SCORE_FILE, score={**score, "rows": None})


def unscored(folders: list[Path]) -> None:
    (folders[0] / SCORE_FILE).unlink()


def of_licence(license: str | None, **values: object) -> Any:
    def apply(folders: list[Path]) -> None:
        for folder in folders:
            known = json.loads((folder / RECORD_FILE).read_text())["provenance"]
            provenance = {**known, "license": license, **values}
            change(folder / RECORD_FILE, provenance=provenance)

    return apply


@pytest.mark.parametrize(
    ("spoil", "values", "reason"),
    [
        (rising, {}, "KL divergence rises with bytes"),
        (rising_without_rows, {}, "KL divergence rises with bytes"),
        (nothing, {"max_kl": 0.01}, r"3bpw`: KL divergence 0\.0\d+ is above the limit 0\.01"),
        (unscored, {}, "no measured KL divergence"),
        (of_licence("cc-by-nc-4.0"), {}, "`cc-by-nc-4.0` forbids commercial use"),
        (of_licence("other", license_name="mine"), {}, r"`other \(mine\)` is not in the table"),
        (of_licence(None), {}, "states no licence"),
        (of_licence("llama3", gated=True), {}, "`org/tiny` is gated"),
    ],
)
def test_what_speaks_against_it_refuses_and_can_be_forced(
    hub: Hub, models: list[Path], spoil: Any, values: Mapping[str, Any], reason: str
) -> None:
    spoil(models)

    with pytest.raises(PublicationRefused, match=reason):
        run(models, **values)
    assert REPO not in hub.repos

    published = run(models, force=True, **values)

    card = hub.files(REPO)["README.md"].decode()
    assert is_public(hub)
    assert len(published.notes) == 1
    assert f"> **Published despite:** {published.notes[0]}." in card
    assert str(models[0].parent) not in card


def test_a_rise_that_may_be_chance_is_published_and_said(
    hub: Hub, models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [0.1 * index for index in range(8)]
    set_kl(models[0], 0.35, *rows)
    set_kl(models[1], 0.36, *(row + 0.01 for row in reversed(rows)))

    published = run(models)

    assert is_public(hub)
    assert published.notes == ()
    assert "includes zero" in caplog.text
    assert str(models[0].parent) not in hub.files(REPO)["README.md"].decode()


def test_a_licence_by_hand_and_a_base_model_stand_in_for_records(
    hub: Hub, models: list[Path], tiny_source: Path
) -> None:
    of_licence(None)(models[:1])
    run(models[:1], license="mit")
    change(models[0] / RECORD_FILE, provenance=None)
    with pytest.raises(PublicationRefused, match="--base-model"):
        run(models[:1])

    hub.add_folder("org/base", tiny_source, card={"license": "apache-2.0"})
    run(models[:1], base_model="org/base")

    card = hub.files(REPO)["README.md"].decode()
    assert 'base_model: "org/base"' in card
    assert 'license: "apache-2.0"' in card
