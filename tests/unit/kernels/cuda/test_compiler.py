"""The arguments a launch passes to the driver, without one: the call is recorded, not made.

Also the architecture that a source is compiled for, and what a launch that fails raises.
"""

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from kernel_resources import resources

from exl2flow.core.errors import ConfigError, KernelError
from exl2flow.kernels.cuda import compiler
from exl2flow.kernels.cuda.ptx import cubin_file, ptx_file, ptx_of
from exl2flow.kernels.plans.sources import source


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[int]]]:
    """Record launches from now on: their configuration, and the addresses of their arguments."""
    found: list[tuple[Any, list[int]]] = []

    def kept(how: Any, kernel: ctypes.c_void_p, pointers: Any, extra: None) -> int:
        sizes = [8, 8, 4, 16]  # of the arguments below
        bodies = [ctypes.string_at(at, n) for at, n in zip(pointers, sizes, strict=False)]
        found.append((type(how._obj).from_buffer_copy(how._obj), bodies))
        return 0

    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=0)
    monkeypatch.setattr(compiler, "function", lambda file, name, architecture: kernel)
    monkeypatch.setattr(compiler, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=kept))
    monkeypatch.setattr(compiler, "_is_early", lambda file, device: file == "early.cu")
    monkeypatch.setattr(compiler.cupy.cuda, "Device", lambda index: nullcontext())
    monkeypatch.setattr(compiler, "raw_stream", lambda device: 7)
    compiler._kernel.cache_clear()
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
    assert [how.x, how.y, how.z] == [2, 5, 1]
    assert [how.threads, how.block_y, how.block_z] == [compiler.THREADS, 1, 1]
    assert how.stream == 7


@pytest.mark.parametrize(("early", "together"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_a_launch_says_what_it_waits_for(calls: list, early: bool, together: bool) -> None:
    file = "early.cu" if early else "any.cu"
    compiler.launch(file, "any", (1,), torch.zeros(1), together=together)

    [(how, _)] = calls
    attributes = (compiler._Attribute * how.count).from_address(how.attributes)
    kinds = [attribute.kind for attribute in attributes]
    assert kinds == [2] * together + [6] * early  # cooperative, programmatic


def test_tensors_with_gaps_are_refused(calls: list) -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        compiler.launch("any.cu", "any", (1,), torch.zeros(4, 4).T)

    assert calls == []


def test_a_word_follows_a_struct_in_the_next_launch(calls: list) -> None:
    struct = np.array([(1, 2)], [("a", "u8"), ("b", "u8")])[0]

    for _ in range(2):
        compiler.launch("any.cu", "any", (1,), torch.zeros(1), 5, 6, struct)
        compiler.launch("any.cu", "any", (1,), torch.zeros(1), 5, 6, 7)

    numbers = [int.from_bytes(of[3], "little") & 0xFF for _, of in calls]
    assert numbers == [1, 7, 1, 7]


def test_a_launch_that_fails_leaves_no_address_behind(
    calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    struct = np.array([(1, 2)], [("a", "u8"), ("b", "u8")])[0]

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_kernel", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compiler.launch("any.cu", "any", (1,), torch.zeros(1), 5, 6, struct)
    compiler.launch("any.cu", "any", (1,), torch.zeros(1), 5, 6, 7)

    [(_, (*_, last))] = calls
    assert int.from_bytes(last[:8], "little") == 7


def test_each_thread_has_arguments_of_its_own() -> None:
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(lambda: ctypes.addressof(compiler._CALL.words)).result()

    assert there != ctypes.addressof(compiler._CALL.words)


@pytest.mark.parametrize("status", [2, 701, 720])
def test_a_launch_that_does_not_fit_is_refused(
    calls: list, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cuLaunchKernelEx=lambda *given: status)
    monkeypatch.setattr(compiler, "_driver", lambda: driver)

    with pytest.raises(compiler.LaunchRefused, match=rf"any of any\.cu .* {status}") as found:
        compiler.launch("any.cu", "any", (1,), torch.zeros(1), together=True)

    assert found.value.reason == compiler.REFUSALS[status]


def test_another_failure_of_a_launch_is_no_refusal(
    calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cuLaunchKernelEx=lambda *given: 1)
    monkeypatch.setattr(compiler, "_driver", lambda: driver)

    with pytest.raises(RuntimeError, match="CUDA error 1") as found:
        compiler.launch("any.cu", "any", (1,), torch.zeros(1))

    assert found.type is RuntimeError


@pytest.fixture
def sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(compute_capability="90")
    monkeypatch.setattr(compiler.cupy.cuda, "Device", lambda index: device)
    for name in ("capability", "_is_early"):
        monkeypatch.setattr(compiler, name, getattr(compiler, name).__wrapped__)


@pytest.mark.parametrize(("virtual", "found"), [("", 90), ("80", 80), ("90", 90)])
def test_a_virtual_architecture_is_that_of_all_kernels(
    sm_90: None, virtual: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL2FLOW_VIRTUAL_ARCH", virtual)

    assert compiler.capability(0) == found
    assert compiler._is_early("product.cu", 0) is (found == 90)


def test_a_newer_architecture_than_the_gpu_s_is_refused(
    sm_90: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL2FLOW_VIRTUAL_ARCH", "120")

    with pytest.raises(ConfigError, match="`120`, but GPU 0 is an sm_90"):
        compiler.build("product.cu", "product<1, false>", 0)


def test_a_source_becomes_ptx_of_a_virtual_architecture() -> None:
    code = source("product.cu")

    path, name = ptx_file(code, compiler.options_of("product.cu"), 80, "product<1, false>")

    ptx = Path(path).read_text()
    assert ".target sm_80\n" in ptx
    assert re.search(rf"\.entry {name}\(", ptx)
    assert "cp.async.cg" in ptx
    assert "cp.async.bulk" not in ptx
    assert "griddepcontrol" not in ptx


@pytest.mark.parametrize(
    ("name", "virtual", "found"),
    [
        ("batched<64, true>", None, "90a"),
        ("batched<64, true>", "80", None),
        ("batched<32, true>", None, None),
    ],
)
def test_64_rows_are_multiplied_with_instructions_of_the_gpu_s_own(
    sm_90: None, name: str, virtual: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if virtual is not None:
        monkeypatch.setenv("EXL2FLOW_VIRTUAL_ARCH", virtual)

    assert compiler._grouped(name, 0) == found


def test_an_instance_becomes_machine_code_of_its_own_architecture() -> None:
    path, name = cubin_file(
        source("batched.cu"), compiler.options_of("batched.cu"), "90a", "batched<64, true>"
    )

    code = Path(path).read_bytes()
    taken = resources(code)[name]
    assert taken.registers <= 128
    assert taken.stack <= 64  # spilled
    assert b"sm_90a" in code


def test_an_architecture_that_nobody_knows_is_an_error_that_names_it() -> None:
    with pytest.raises(KernelError, match=r"compute_85.*architecture"):
        ptx_of("", (), 85, None)


def test_a_source_is_compiled_with_the_constants_that_it_names() -> None:
    options = {file: compiler.options_of(file) for file in ("choose.cu", "product.cu")}

    assert f"-DTEAM={compiler.TEAM}" in options["choose.cu"]
    assert f"-DTEAM={compiler.TEAM}" not in options["product.cu"]
