"""Page files: what is found again, and that nothing else is."""

import errno
import logging
import os
import random
import shutil
import threading
from hashlib import blake2b
from pathlib import Path

import pytest

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache import page_files
from exl2flow.engine.cache.page_files import PageFiles, clear
from exl2flow.engine.cache.prefix_tree import FullPage, packed

NAMESPACE, OTHER = "a" * 32, "b" * 32
DATA = bytes(range(256)) * 16
SIZE = 10**9


def page(number: int) -> FullPage:
    content = packed(range(number, number + 256))
    return FullPage(blake2b(content, digest_size=16).digest(), b"salt", content)


def write(files: PageFiles, *numbers: int) -> None:
    for number in numbers:
        files.write(page(number), memoryview(DATA))


def read(files: PageFiles, wanted: FullPage) -> bytes | None:
    out = bytearray(len(DATA))
    return bytes(out) if files.read(wanted, memoryview(out)) else None


def paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
def files(folder: Path) -> PageFiles:
    return PageFiles(folder, NAMESPACE, size=SIZE)


def test_a_page_is_read_as_it_was_written_by_another_process_too(
    files: PageFiles, folder: Path
) -> None:
    write(files, 1)

    again = PageFiles(folder, NAMESPACE, size=SIZE)

    assert again.has(page(1))
    assert read(again, page(1)) == DATA
    assert not again.has(page(2))
    assert read(again, page(2)) is None
    assert [one.name for one in paths(folder)] == [f"{page(1).key.hex()}.page"]


def test_nobody_else_may_read_the_files(files: PageFiles, folder: Path) -> None:
    write(files, 1)

    modes = {one: one.stat().st_mode & 0o777 for one in (folder, *folder.rglob("*"))}

    assert {mode for one, mode in modes.items() if one.is_dir()} == {0o700}
    assert {mode for one, mode in modes.items() if one.is_file()} == {0o600}


def test_a_file_that_was_cut_or_changed_anywhere_is_a_miss_and_deleted(
    files: PageFiles, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(files, 1)
    [path] = paths(folder)
    whole, source = path.read_bytes(), random.Random(1)
    places = [0, 8, 12, 50, 76, 100, len(whole) - 1, *source.sample(range(len(whole)), 40)]
    torn = [whole[:cut] for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    torn += [whole + b"x"]
    torn += [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in places]
    for content in torn:
        path.write_bytes(content)

        assert read(files, page(1)) is None
        assert not path.exists()
    assert "damaged or not ours" in caplog.text

    write(files, 1)
    assert read(files, page(1)) == DATA


def test_a_page_that_was_made_without_the_secret_is_not_used(
    files: PageFiles, folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "planted"
    write(PageFiles(elsewhere, NAMESPACE, size=SIZE), 1)
    [planted] = paths(elsewhere)
    path = folder / planted.relative_to(elsewhere)
    path.parent.mkdir(parents=True)
    path.write_bytes(planted.read_bytes())

    assert read(files, page(1)) is None
    assert not path.exists()


@pytest.mark.parametrize("target", ["other key", "other namespace"])
def test_a_good_file_in_another_place_is_not_used(
    files: PageFiles, folder: Path, target: str
) -> None:
    write(files, 1)
    other = PageFiles(folder, OTHER if target == "other namespace" else NAMESPACE, size=SIZE)
    wanted = page(1) if target == "other namespace" else page(2)
    write(other, 2)
    [first] = [one for one in paths(folder) if one.stem == page(1).key.hex()]
    place = next(one for one in paths(folder) if one.stem == page(2).key.hex())
    place = place.parents[1] / wanted.key.hex()[:2] / f"{wanted.key.hex()}.page"
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(first.read_bytes())

    assert read(other, wanted) is None
    assert not place.exists()
    assert read(files, page(1)) == DATA


@pytest.mark.parametrize(
    "wanted",
    [
        page(1)._replace(content=packed([9, *range(2, 257)])),
        page(1)._replace(before=b"another salt"),
    ],
)
def test_other_ids_or_salts_under_the_same_key_are_a_miss(
    files: PageFiles, wanted: FullPage
) -> None:
    write(files, 1)

    assert files.has(wanted)
    assert read(files, wanted) is None


def test_a_link_in_place_of_a_page_is_not_followed(files: PageFiles, folder: Path) -> None:
    write(files, 1)
    [path] = paths(folder)
    path.symlink_to(path.rename(folder / "elsewhere"))

    assert read(files, page(1)) is None


def test_the_least_recently_used_pages_go_first_and_the_size_is_kept(folder: Path) -> None:
    files = PageFiles(folder, NAMESPACE, size=SIZE)
    write(files, 0)
    one = paths(folder)[0].stat().st_size
    files = PageFiles(folder, NAMESPACE, size=5 * one)
    write(files, 1, 2, 3, 4)
    files.touch(page(0))
    for number in range(5, 30):
        write(files, number)
        files.touch(page(0))
        assert sum(path.stat().st_size for path in paths(folder)) <= 5 * one

    assert [n for n in range(30) if files.has(page(n))] == [0, 26, 27, 28, 29]


def test_pages_of_other_namespaces_count_and_go_as_well(folder: Path) -> None:
    files = PageFiles(folder, NAMESPACE, size=SIZE)
    write(files, 1, 2, 3)
    one = paths(folder)[0].stat().st_size
    other = PageFiles(folder, OTHER, size=3 * one)

    write(other, 4)

    assert [n for n in (1, 2, 3) if files.has(page(n))] == [2, 3]
    assert other.has(page(4))


def test_a_page_larger_than_the_size_is_not_written(folder: Path) -> None:
    files = PageFiles(folder, NAMESPACE, size=100)

    write(files, 1)

    assert paths(folder) == []


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the disk have room for some bytes, whose number is in the list."""
    room, real = [0], os.write

    def short(handle: int, part: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(handle, part[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(page_files.os, "write", short)
    return room


def test_a_full_disk_ends_writing_with_one_warning(
    files: PageFiles, folder: Path, full_disk: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    full_disk[0] = 10_000
    with caplog.at_level(logging.WARNING):
        write(files, 1, 2, 3, 4)

    assert [record.message for record in caplog.records] == [
        f"no further pages are kept in `{folder}`: No space left on device; they are read as before"
    ]
    assert [read(files, page(number)) for number in (1, 2)] == [DATA, None]
    assert not [*folder.rglob("*.partial")]


def test_pages_are_deleted_with_all_that_follow_them(files: PageFiles, folder: Path) -> None:
    first, other = page(1), page(2)
    second = page(3)._replace(before=first.key)
    third, beside = page(4)._replace(before=second.key), page(5)._replace(before=other.key)
    for one in (first, other, second, third, beside):
        files.write(one, memoryview(DATA))
    (folder / NAMESPACE / "ab").mkdir(exist_ok=True)
    (folder / NAMESPACE / "ab" / "torn.page").write_bytes(b"exl2")

    files.delete([first.key])

    assert [files.has(one) for one in (first, second, third)] == [False] * 3
    assert [read(files, one) for one in (other, beside)] == [DATA] * 2


def test_two_writers_share_a_folder(folder: Path) -> None:
    both = [PageFiles(folder, NAMESPACE, size=SIZE) for _ in range(2)]
    threads = [threading.Thread(target=write, args=(one, *range(40))) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(read(one, page(number)) == DATA for one in both for number in range(40))
    assert len(paths(folder)) == 40


def test_processes_that_begin_at_once_have_one_secret(folder: Path) -> None:
    found = list[bytes]()
    ask = lambda: found.append(page_files.secret_of(folder))  # noqa: E731
    work = [threading.Thread(target=ask) for _ in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()

    assert len(found) == 8
    assert len({*found}) == 1
    assert os.listdir(folder) == ["secret"]


def test_clearing_deletes_pages_of_all_namespaces_and_nothing_else(
    files: PageFiles, folder: Path
) -> None:
    write(files, 1)
    write(PageFiles(folder, OTHER, size=SIZE), 2)
    (folder / "note").write_text("mine")

    clear(folder)

    assert sorted(os.listdir(folder)) == ["note", "secret"]
    assert read(files, page(1)) is None
    write(files, 1)  # who has it open goes on
    assert read(files, page(1)) == DATA
    clear(folder / "nothing")
    assert not (folder / "nothing").exists()


def test_a_folder_that_is_deleted_while_it_is_used_is_not_made_anew(
    files: PageFiles, folder: Path
) -> None:
    shutil.rmtree(folder)

    write(files, 1)

    assert not folder.exists()
    assert read(files, page(1)) is None
    assert not files.is_off


def test_a_folder_with_other_things_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")

    for use in (clear, page_files.secret_of):
        with pytest.raises(ConfigError, match=r"holds other things, such as `thesis\.tex`"):
            use(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_empty_folder_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    PageFiles(tmp_path, NAMESPACE, size=SIZE)

    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", "secret"])
def test_what_others_can_read_is_refused(files: PageFiles, folder: Path, name: str) -> None:
    (folder / name).chmod(0o755)

    with pytest.raises(ConfigError, match="can be read by others"):
        PageFiles(folder, NAMESPACE, size=SIZE)


def test_a_damaged_secret_and_a_file_in_place_of_the_folder_are_named(
    files: PageFiles, folder: Path
) -> None:
    (folder / "secret").write_bytes(b"short")

    with pytest.raises(ConfigError, match="secret` is damaged"):
        PageFiles(folder, NAMESPACE, size=SIZE)
    with pytest.raises(ConfigError, match="cannot use"):
        PageFiles(folder / "secret", NAMESPACE, size=SIZE)


def test_temporary_files_of_killed_processes_go(files: PageFiles, folder: Path) -> None:
    write(files, 1)
    parent = paths(folder)[0].parent
    for name, age in (("old.page.1.partial", 10**6), ("new.page.2.partial", 0)):
        (parent / name).write_bytes(b"x")
        when = (parent / name).stat().st_mtime - age
        os.utime(parent / name, (when, when))

    PageFiles(folder, NAMESPACE, size=SIZE)

    assert [one.name for one in folder.rglob("*.partial")] == ["new.page.2.partial"]
