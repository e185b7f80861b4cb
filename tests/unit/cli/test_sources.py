"""Messages of the command line about a source."""

from pathlib import Path

import pytest

from exl2flow.cli.work.sources import fetched_with_progress


@pytest.mark.parametrize("is_fetched", [False, True])
def test_a_local_folder_is_named_where_it_could_be_mistaken_for_the_hub(
    is_fetched: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    if is_fetched:
        (tmp_path / "work" / "sources" / "abc" / "tiny").mkdir(parents=True)

    found = fetched_with_progress(Path("org/tiny"), tmp_path / "work", None, plain=True)

    assert found == Path("org/tiny")
    assert ("is a folder here and is used instead" in capsys.readouterr().err) == is_fetched
