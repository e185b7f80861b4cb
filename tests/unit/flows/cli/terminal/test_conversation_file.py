"""Which file a chat has, and that no other chat has it at the same time."""

import gc
from pathlib import Path

import pytest

from exl2flow.core.errors import ConfigError
from exl2flow.flows.cli.terminal.conversation_file import ConversationFile, unused


def test_two_chats_have_two_files(tmp_path: Path) -> None:
    first, second, third = (ConversationFile.take(tmp_path / "kept.json") for _ in range(3))

    assert [place.file.name for place in (first, second, third)] == [
        "kept.json",
        "kept-2.json",
        "kept-3.json",
    ]
    assert [place.is_wanted for place in (first, second, third)] == [True, False, False]


def test_a_file_is_free_again_when_its_chat_ends(tmp_path: Path) -> None:
    place = ConversationFile.take(tmp_path / "free.json")
    del place
    gc.collect()

    assert ConversationFile.take(tmp_path / "free.json").is_wanted


def test_a_link_and_the_file_that_it_names_are_one_file(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "real.json"
    link.symlink_to(file)

    by_link, by_name = ConversationFile.take(link), ConversationFile.take(file)

    assert (by_link.file, by_name.file) == (file, tmp_path / "real-2.json")


def test_a_folder_that_cannot_be_written_has_files_without_locks() -> None:
    assert ConversationFile.take(Path("/proc/none/x.json")).is_wanted


def test_the_file_of_another_chat_is_not_unused(tmp_path: Path) -> None:
    place = ConversationFile.take(tmp_path / "kept.json")

    with pytest.raises(ConfigError, match="another chat has"), unused(place.file):
        pass

    del place
    with unused(tmp_path / "kept.json"):
        assert not ConversationFile.take(tmp_path / "kept.json").is_wanted


def test_a_file_that_no_chat_ever_had_gets_no_lock_file(tmp_path: Path) -> None:
    with unused(tmp_path / "new.json"), unused(Path("/proc/none/x.json")):
        pass

    assert [*tmp_path.iterdir()] == []
