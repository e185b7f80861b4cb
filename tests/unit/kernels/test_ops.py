"""The interface, and the implementation chosen for a device."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from exl2flow.core.errors import BackendUnavailable, ConfigError
from exl2flow.kernels import Ops, backend, get_ops, resolve_device

BEYOND_TORCH: dict[str, str] = {}  # public operations of `CudaOps` alone: name → reason


def operations(ops: Ops) -> dict[str, inspect.Signature]:
    """Return the signatures of public operations as callers see them: without self."""
    functions = inspect.getmembers(ops, inspect.isroutine)
    return {name: inspect.signature(f) for name, f in functions if not name.startswith("_")}


def test_kernels_override_operations_as_they_are_declared() -> None:
    from exl2flow.kernels.cuda.ops import CUDA_OPS

    declared, overridden = operations(get_ops("cpu")), operations(CUDA_OPS)

    assert len(declared) == 45
    assert {name: overridden[name] for name in declared} == declared
    assert overridden.keys() - declared.keys() == BEYOND_TORCH.keys()


def test_every_operation_is_described_where_it_is_declared() -> None:
    for name in operations(get_ops("cpu")):
        text = inspect.getdoc(getattr(Ops, name))
        assert text, name
        assert not text.startswith("See "), name


def test_kernels_are_those_of_every_operation() -> None:
    from exl2flow.kernels.cuda.ops import CUDA_OPS

    assert type(get_ops("cpu")) is not type(CUDA_OPS)
    assert isinstance(CUDA_OPS, type(get_ops("cpu")))
    assert get_ops("cuda") is CUDA_OPS


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Ask for the kernels of a GPU as in a new process, and let later tests do the same."""
    caches = (backend._cuda_ops, backend.unused_gpu)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    """A machine whose GPU torch sees, and on which CuPy is not installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "exl2flow.kernels.cuda.ops", raising=False)
    monkeypatch.delitem(sys.modules, "exl2flow.kernels.cuda.compiler", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.mark.usefixtures("without_cupy")
def test_auto_takes_the_cpu_where_kernels_cannot_run_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = {resolve_device("auto") for _ in range(2)}

    assert devices == {torch.device("cpu")}
    assert caplog.text.count("the GPU is not used") == 1
    assert "pip install 'cupy-cuda13x" in caplog.text


@pytest.mark.usefixtures("without_cupy")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_without_kernels_is_refused_by_name(name: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"need CuPy.*pip install.*--device cpu"):
        resolve_device(name)


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(("found", "is_enough"), [((12, 3), False), ((12, 4), True)])
def test_a_compiler_that_is_too_old_is_named(
    found: tuple[int, int], is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exl2flow.kernels.cuda.ptx.nvrtc_version", lambda: found)
    named = pytest.raises(BackendUnavailable, match=r"NVRTC 12\.4.*CuPy finds 12\.3.*pip install")

    with nullcontext() if is_enough else named:
        get_ops("cuda")


@pytest.mark.usefixtures("asked_anew")
def test_a_device_without_cupy_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "exl2flow.kernels.cuda.ops", raising=False)
    monkeypatch.delitem(sys.modules, "exl2flow.kernels.cuda.compiler", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(BackendUnavailable, match=r"CuPy.*cupy-cuda13x"):
        get_ops("cuda")


def test_cpu_is_available() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("available", "expected"), [(False, "cpu"), (True, "cuda")])
def test_auto_takes_the_accelerator_if_there_is_one(
    available: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)

    assert resolve_device("auto").type == expected


def test_a_gpu_may_be_named_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    for name in ("cuda:2", "cuda:9999"):
        message = f"no device `{name}`: torch sees `cuda:0` to `cuda:1`; give one"
        with pytest.raises(BackendUnavailable, match=message):
            resolve_device(name)


@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize(
    "name",
    ["gpu", "", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:01", "cuda:1\n", "cuda:٣", 0, None],
)
def test_what_names_no_device_is_refused_in_words(
    name: object, available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)

    with pytest.raises(
        ConfigError, match=r"(?s)the device is `.*`: it must be `auto`, `cpu`, `cuda`"
    ):
        resolve_device(name)  # type: ignore[arg-type]


def test_missing_accelerator_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(BackendUnavailable, match=r"no CUDA device.*--device cpu"):
        resolve_device("cuda")
