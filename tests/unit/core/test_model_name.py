"""Names of EXL2 models on the Hub: what is one, and what a folder of that name is."""

from pathlib import Path

import pytest

from exl2flow.core.model_name import HubName, name_of, on_hub


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name@v1.2", ("org/name", "v1.2", None)),
        ("org/name:4.0", ("org/name", None, "4.0")),
        ("org/name@main:4bpw-h6", ("org/name", "main", "4bpw-h6")),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("a/b/c", None),
        ("~/org", None),
    ],
)
def test_names_are_told_from_paths(
    text: str, parts: tuple[str, str | None, str | None] | None
) -> None:
    found = HubName.of(text)

    assert (found and (found.repo, found.revision, found.choice)) == parts
    if found is not None:
        assert str(found) == text
        assert found.is_plain == (parts is not None and parts[1:] == (None, None))


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)

    assert on_hub(Path("org/here")) is None
    assert name_of(Path("org/here")) == "here"
    assert name_of(Path("org/away:4.0")) == "org/away:4.0"
