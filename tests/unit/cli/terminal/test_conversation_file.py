"""Which file a chat has, and that no other chat has it at the same time."""

from pathlib import Path

import pytest

from exl2flow.cli.terminal.conversation_file import reserved, unused
from exl2flow.core.errors import ConfigError


def test_two_chats_have_two_files(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"

    with reserved(file) as first, reserved(file) as second, reserved(file) as third:
        names = [place.name for place in (first, second, third)]

    assert names == ["kept.json", "kept-2.json", "kept-3.json"]


def test_a_file_is_free_again_when_its_chat_ends(tmp_path: Path) -> None:
    for _ in range(2):
        with reserved(tmp_path / "free.json") as file:
            assert file == tmp_path / "free.json"


def test_a_link_and_the_file_that_it_names_are_one_file(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "real.json"
    link.symlink_to(file)

    with reserved(link) as by_link, reserved(file) as by_name:
        assert (by_link, by_name) == (file, tmp_path / "real-2.json")


def test_a_folder_that_cannot_be_written_has_files_without_locks() -> None:
    with reserved(Path("/proc/none/x.json")) as file:
        assert file == Path("/proc/none/x.json")


def test_the_file_of_another_chat_is_not_unused(tmp_path: Path) -> None:
    wanted = tmp_path / "kept.json"
    with (
        reserved(wanted) as file,
        pytest.raises(ConfigError, match="another chat has"),
        unused(file),
    ):
        pass

    with unused(wanted), reserved(wanted) as file:
        assert file != wanted


def test_a_file_that_no_chat_ever_had_gets_no_lock_file(tmp_path: Path) -> None:
    with unused(tmp_path / "new.json"), unused(Path("/proc/none/x.json")):
        pass

    assert [*tmp_path.iterdir()] == []
