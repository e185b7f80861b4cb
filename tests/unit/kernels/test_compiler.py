"""The arguments a launch passes to the driver, without one: the call is recorded, not made."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from exl2flow.kernels import compiler


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[int]]]:
    """Record launches from now on: their configuration, and the addresses of their arguments."""
    found: list[tuple[Any, list[int]]] = []

    def kept(how: Any, kernel: ctypes.c_void_p, pointers: Any, extra: None) -> int:
        sizes = [8, 8, 4, 16][: len(pointers)]  # of the arguments below
        bodies = [ctypes.string_at(at, n) for at, n in zip(pointers, sizes, strict=True)]
        found.append((how._obj, bodies))
        return 0

    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=0)
    monkeypatch.setattr(compiler, "function", lambda file, name: kernel)
    monkeypatch.setattr(compiler, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=kept))
    monkeypatch.setattr(compiler, "_can_be_early", lambda device: True)
    monkeypatch.setattr(compiler.cupy.cuda, "Device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return found


def test_each_argument_is_where_the_driver_looks(calls: list) -> None:
    x = torch.zeros(3)
    struct = np.array([(1 << 40, -5, 0.5)], [("a", "u8"), ("b", "i4"), ("c", "f4")])[0]

    compiler.launch("any.cu", "any", (2, 5), x, -(1 << 40), np.float32(1.5), struct)

    [(how, (tensor, integer, number, whole))] = calls
    assert int.from_bytes(tensor, "little") == x.data_ptr()
    assert int.from_bytes(integer, "little", signed=True) == -(1 << 40)
    assert np.frombuffer(number, np.float32)[0] == 1.5
    assert whole == struct.tobytes()
    assert list(how.grid) == [2, 5, 1]
    assert how.stream == 7


@pytest.mark.parametrize(("early", "together"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_a_launch_says_what_it_waits_for(calls: list, early: bool, together: bool) -> None:
    compiler.launch("any.cu", "any", (1,), torch.zeros(1), early=early, together=together)

    [(how, _)] = calls
    kinds = [how.attributes[i].kind for i in range(how.count)]
    assert kinds == [2] * together + [6] * early  # cooperative, programmatic


def test_tensors_with_gaps_are_refused(calls: list) -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        compiler.launch("any.cu", "any", (1,), torch.zeros(4, 4).T)

    assert calls == []
