"""`Tiers` raises nothing: what finds no memory is not kept."""

from pathlib import Path

import pytest
import torch

from exl2flow.engine.cache.page_files import PageFiles
from exl2flow.engine.cache.prefix_tree import FullPage, packed
from exl2flow.engine.cache.tiers import HostPage, PageBytes, Tiers
from exl2flow.kernels import PAGE_TOKENS

NAMESPACE = "0" * 32
PAGES = 4


@pytest.fixture
def pages() -> PageBytes:
    return PageBytes([torch.arange(PAGES * PAGE_TOKENS * 2).view(-1, 2).float()], PAGE_TOKENS)


def files_of(folder: Path) -> PageFiles:
    return PageFiles(folder / "pages", NAMESPACE, size=1 << 20)


def full_page(number: int) -> FullPage:
    return FullPage(bytes([number]) * 16, b"", packed([number] * PAGE_TOKENS))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_a_page_that_finds_no_memory_is_not_kept_and_the_others_are(
    pages: PageBytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    files, save = files_of(tmp_path), pages.save

    def no_memory_for_one(index: int, page: FullPage) -> HostPage:
        if index == 1:
            raise error("no memory")
        return save(index, page)

    monkeypatch.setattr(pages, "save", no_memory_for_one)
    tiers = Tiers(pages, ram=pages.host_bytes * PAGES, files=files)
    for index in (0, 1):
        tiers.take(index, full_page(index))

    tiers.close([(index, full_page(index)) for index in (1, 2, 3)])

    assert [files.has(full_page(index)) for index in range(PAGES)] == [True, False, True, True]
    assert tiers.nbytes["ram"] == 0


def test_a_page_whose_copy_failed_is_not_written(
    pages: PageBytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error")

    files, save = files_of(tmp_path), pages.save
    monkeypatch.setattr(
        pages, "save", lambda index, page: save(index, page)._replace(copied=(Failed(),))
    )
    tiers = Tiers(pages, ram=pages.host_bytes, files=files)
    for index in range(3):
        tiers.take(index, full_page(index))

    tiers.close([(3, full_page(3))])

    assert not any(files.has(full_page(index)) for index in range(PAGES))
    assert tiers._queued == {}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_bytes_that_find_no_room_on_the_device_are_not_loaded(
    pages: PageBytes, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    tiers = Tiers(pages, ram=pages.host_bytes, files=None)

    def fails(index: int, data: torch.Tensor) -> None:
        raise error("no memory")

    monkeypatch.setattr(pages, "load", fails)

    assert not tiers.load(0, pages.empty())


def test_pages_that_follow_forgotten_ones_are_forgotten_in_host_memory(pages: PageBytes) -> None:
    tiers = Tiers(pages, ram=pages.host_bytes * PAGES, files=None)
    chain = [full_page(number)._replace(before=bytes([number - 1]) * 16) for number in (1, 2, 3)]
    for index, page in enumerate([*chain, full_page(9)]):
        tiers.take(index, page)

    tiers.forget([full_page(0).key])

    assert tiers.nbytes["ram"] == pages.host_bytes
    assert tiers.find([full_page(9), full_page(9)])
    assert not tiers.find([chain[2], chain[2]])
