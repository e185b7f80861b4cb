"""What the options of `exl2flow chat` are where the command line does not give them."""

import json
from pathlib import Path

import pytest

from exl2flow.cli.options.chat import CHAT, build_chat, of_model, profile_of
from exl2flow.core.errors import ReadFailed

DOCS = Path(__file__).parents[3] / "docs"


def test_defaults_come_from_the_model_then_from_the_chat(tmp_path: Path) -> None:
    config = {"temperature": 0.3, "typical_p": 0.9, "top_k": -5, "min_p": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    sampling = build_chat({"top_p": 0.7}, tmp_path).sampling

    assert of_model(tmp_path) == {"temperature": 0.3, "typical": 0.9}
    assert (sampling.temperature, sampling.top_p, sampling.typical) == (0.3, 0.7, 0.9)
    assert (sampling.top_k, sampling.repetition_penalty) == (50, 1.01)
    assert build_chat({"temperature": 1.0}, tmp_path).sampling.temperature == 1.0
    assert build_chat({"greedy": True}, tmp_path).sampling.top_k == 1


def test_a_model_that_does_not_sample_is_greedy_unless_a_temperature_is_given(
    tmp_path: Path,
) -> None:
    config = {"temperature": 0.3, "top_k": 20, "do_sample": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    assert of_model(tmp_path) == {"temperature": 0.0, "top_k": 20}
    assert build_chat({}, tmp_path).sampling.temperature == 0
    assert build_chat({"temperature": 1.0}, tmp_path).sampling.temperature == 1.0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"temperature": "hot"}'])
def test_a_damaged_generation_config_recommends_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)

    assert of_model(tmp_path) == {}


def test_no_option_is_defined_twice() -> None:
    flags = [setting.flag for setting in CHAT]

    assert len(flags) == len(set(flags))


def test_every_option_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()

    plain = page.replace("`", " ")
    assert [s.flag for s in CHAT if f"{s.flag[2:]} " not in plain] == []


def test_remembered_profiles_that_cannot_be_read_are_not_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exl2flow").mkdir()
    (tmp_path / "exl2flow" / "chat.json").write_text("{}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)

    with pytest.raises(ReadFailed, match="Input/output error; check the disk"):
        profile_of(tmp_path, None, remember=False)
