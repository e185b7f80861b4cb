"""What environment variables say of a machine."""

from pathlib import Path

import pytest

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.environment import notify_socket, tuning_file, virtual_architecture


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"EXL2FLOW_TUNING": "off"}, None),
        ({"EXL2FLOW_TUNING": "/a/b.json"}, Path("/a/b.json")),
        ({"EXL2FLOW_TUNING": "~/b.json"}, Path("/home/someone/b.json")),
        ({"EXL2FLOW_TUNING": ""}, Path("/home/someone/.cache/exl2flow/tuning.json")),
        ({}, Path("/home/someone/.cache/exl2flow/tuning.json")),
        ({"XDG_CACHE_HOME": "/caches"}, Path("/caches/exl2flow/tuning.json")),
        ({"XDG_CACHE_HOME": "here"}, Path("/home/someone/.cache/exl2flow/tuning.json")),
        ({"EXL2FLOW_CACHE": "~/c", "XDG_CACHE_HOME": "/a"}, Path("/home/someone/c/tuning.json")),
    ],
)
def test_measured_launches_are_kept_where_the_environment_says(
    variables: dict[str, str], expected: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("EXL2FLOW_TUNING", "EXL2FLOW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert tuning_file() == expected


@pytest.mark.parametrize(("given", "expected"), [("", None), ("80", 80), ("120", 120)])
def test_kernels_are_for_the_architecture_of_the_environment(
    given: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL2FLOW_VIRTUAL_ARCH", given)

    assert virtual_architecture() == expected


@pytest.mark.parametrize("given", ["sm_80", "75", "8.0", "ampere", "\u0668\u0660"])
def test_an_architecture_of_no_kernel_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL2FLOW_VIRTUAL_ARCH", given)

    with pytest.raises(ConfigError, match=f"`{given}`; set an architecture from 80 on"):
        virtual_architecture()


def test_without_a_service_manager_there_is_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert notify_socket() == ""

    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    assert notify_socket() == "/run/x"
