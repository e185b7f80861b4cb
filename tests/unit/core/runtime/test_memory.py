"""How much memory there is; a GPU of 80 GB with 30 GB free is simulated."""

import sys
from pathlib import Path

import psutil
import pytest
import torch

from exl2flow.core.runtime import memory
from exl2flow.core.runtime.memory import (
    available_memory,
    free_memory,
    limit_for,
    limit_memory,
    limit_of,
    usable,
)

TOTAL, FREE, USED, RESERVED = 80 * 10**9, 30 * 10**9, 10 * 10**9, 15 * 10**9
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, float]:
    """The shares to which processes are limited, by device."""
    found: dict[torch.device, float] = {}
    monkeypatch.setattr(memory, "_limits", {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: USED)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: RESERVED)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: found.update({device: share}),
    )
    return found


def test_a_part_of_a_limit_is_not_for_tensors() -> None:
    assert usable(10 * 10**9) == 9_600_000_000 - 2**30


@pytest.mark.parametrize("tensors", [1, 12_345_678, 15_108_931_584])
def test_a_limit_for_tensors_suffices_and_is_not_much_more(tensors: int) -> None:
    limit = limit_for(tensors)

    assert usable(limit - 3) < tensors <= usable(limit)
    assert usable(2**30) == usable(0) == 0


def test_memory_of_a_cpu_is_not_limited(shares: dict[torch.device, float]) -> None:
    limit_memory(CPU, 10**9)

    assert limit_of(CPU) == sys.maxsize
    assert shares == {}


@pytest.mark.parametrize(
    ("most", "counted"), [(None, TOTAL), (24 * 10**9, 24 * 10**9), (90 * 10**9, TOTAL)]
)
def test_limit_is_what_is_given_but_not_more_than_there_is(
    most: int | None, counted: int, shares: dict[torch.device, float]
) -> None:
    limit_memory(GPU, most)

    assert limit_of(GPU) == limit_of(torch.device("cuda", 0)) == usable(counted)
    assert shares == {torch.device("cuda", 0): usable(counted) / TOTAL}


def test_each_gpu_has_its_own_limit(shares: dict[torch.device, float]) -> None:
    second = torch.device("cuda", 1)

    limit_memory(second, 24 * 10**9)

    assert limit_of(GPU) == TOTAL
    assert limit_of(second) == usable(24 * 10**9)
    assert list(shares) == [second]


@pytest.mark.parametrize(
    ("most", "expected"), [(None, FREE + RESERVED - USED), (24 * 10**9, usable(24 * 10**9) - USED)]
)
@pytest.mark.usefixtures("shares")
def test_free_memory_includes_the_reserve_and_ends_at_the_limit(
    most: int | None, expected: int
) -> None:
    limit_memory(GPU, most)

    assert free_memory(GPU) == expected


def test_available_memory_is_the_estimate_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = available_memory()
    assert found is not None
    assert found == pytest.approx(psutil.virtual_memory().available, rel=0.2)

    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert available_memory() == 7 * 1024
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 9 kB\n")
    assert available_memory() is None


def test_available_memory_is_unknown_where_the_kernel_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)

    assert available_memory() is None
