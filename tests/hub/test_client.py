"""The client gives up, says what it waits for, and never repeats a token."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import FILES, serving, used_by_client
from huggingface_hub import HfApi, constants
from tiny import make_tiny

from exl2flow.core.errors import ConfigError, HubError, HubUnavailable
from exl2flow.pipeline.hub.client import Hub


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_does_not_answer_is_named_at_once_and_given_up_in_the_end(
    silent: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub = Hub(api=HfApi(endpoint=silent), waits=(0.0,), silence=0.1, timeout=0.3)
    began = time.monotonic()

    with (
        caplog.at_level(logging.WARNING, "exl2flow"),
        pytest.raises(HubUnavailable, match=f"reached for `org/tiny`.*{silent}"),
    ):
        hub.call("org/tiny", lambda: hub.api.model_info("org/tiny"))

    assert time.monotonic() - began < 5
    assert f"waiting for {silent}: no answer for `org/tiny` yet" in caplog.text
    left = [thread for thread in threading.enumerate() if thread.name == "hub"]
    assert len(left) == 2
    assert all(thread.daemon for thread in left)  # they do not keep the process


def test_an_answer_that_comes_late_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub(api=HfApi(), waits=(), silence=0.05, timeout=30.0)

    with caplog.at_level(logging.WARNING, "exl2flow"):
        answer = hub.call("org/tiny", lambda: time.sleep(0.2) or "late")  # type: ignore[func-returns-value]

    assert answer == "late"
    assert "no answer for `org/tiny` yet" in caplog.text


def test_transfers_take_as_long_as_they_take() -> None:
    hub = Hub(api=HfApi(), waits=(), silence=0.01, timeout=0.02)

    hub.call("org/tiny", lambda: time.sleep(0.2), transfers=True)


@pytest.mark.parametrize("token", ["hf_Geheimnïs", "hf_two words", "hf_line\nbreak", "hf_\x00"])
def test_a_token_that_no_header_can_hold_is_refused_without_repeating_it(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="the token for the Hub has characters") as raised:
        Hub.open(token)

    assert token not in str(raised.value)
    assert raised.value.__cause__ is None


def test_the_token_of_the_environment_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_Geheimnïs")

    with pytest.raises(ConfigError, match="HF_TOKEN"):
        Hub.open()


@pytest.mark.parametrize(
    "repeated",
    [
        "the token hf_abcdefghijkl may not do this",
        "http://somebody:pass%2Fword@127.0.0.1 says no",
        "no: Basic c29tZWJvZHk6cGFzcy93b3Jk",  # somebody:pass/word
        "pass/word is wrong",
    ],
)
def test_a_secret_that_the_hub_repeats_is_not_shown(
    repeated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "hub") as server:
        server.fail(".*", "status", times=None, status=403, headers={"X-Error-Message": repeated})
        address = server.url.replace("//", "//somebody:pass%2Fword@")
        monkeypatch.setattr(constants, "ENDPOINT", address)
        hub = Hub.open("hf_abcdefghijkl")

        with pytest.raises(HubError) as caught:
            hub.call("org/tiny", lambda: hub.api.model_info("org/tiny"))

    assert "***" in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("hf_ab", "pass", "c29tZW"))


def test_the_password_of_a_mirror_is_sent_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    with (
        serving(tmp_path / "hub") as server,
        used_by_client(server),
        caplog.at_level(logging.WARNING),  # as in commands: libraries show no more
    ):
        server.tokens = {"Basic c29tZWJvZHk6cGFzcy93b3Jk"}
        server.add_folder("org/tiny", make_tiny("llama", tmp_path / "model"))
        address = server.url.replace("//", "//somebody:pass%2Fword@")
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + FILES)
        hub = Hub.open()
        server.fail("GET .*resolve.*", "status", times=1, status=429)

        file = hub.api.hf_hub_download("org/tiny", "config.json", cache_dir=tmp_path / "cache")

        assert json.loads(Path(file).read_text())["model_type"] == "llama"
        assert hub.api.endpoint == server.url
    assert "429" in caplog.text
    assert "pass" not in caplog.text


def test_a_mirror_that_cannot_be_reached_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://somebody:password@127.0.0.1:1")
    hub = replace(Hub.open(), waits=())

    with pytest.raises(HubUnavailable, match=r"connection to http://127.0.0.1:1$"):
        hub.call("org/tiny", lambda: hub.api.model_info("org/tiny"))
