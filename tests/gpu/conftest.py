"""What the tests on a GPU share: they leave torch as they found it."""

import fcntl
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cards import CARDS
from conversions import small_config
from stage_runs import run_until
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.kernels.cuda import graphs as cuda_graphs
from exl2flow.kernels.cuda.graphs import CudaGraph

MANY = 200  # tests of a run
CARD = "EXL2FLOW_TEST_CARD"  # set by `make test-cards`


def torch_state() -> dict[str, object]:
    """Return the settings of torch that outlive whoever changes them."""
    return {
        "synchronization debug mode": torch.cuda.get_sync_debug_mode(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "current device": torch.cuda.current_device(),
        "current stream": torch.cuda.current_stream(),
        "TF32 products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 convolutions": torch.backends.cudnn.allow_tf32,
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(scope="session", autouse=True)
def _limits_of_a_card() -> Iterator[None]:
    """Plan launches for the limits of the card that `make test-cards` names, where it names one.

    No limit exceeds that of the GPU at hand: CTAs that wait for each other must be resident on it,
    so a 5090 with its 170 multiprocessors has 132 on an H100.
    """
    name = os.environ.get(CARD)
    if name is None:
        yield
        return
    if name not in CARDS:
        pytest.exit(f"no card `{name}`; there are {', '.join(CARDS)} and sm_80", returncode=4)
    from exl2flow.kernels.cuda import compiler

    of_device = compiler.limits

    def of_card(device: int) -> tuple[int, int]:
        processors, shared = map(min, CARDS[name].limits, of_device(device))
        return processors, shared

    with pytest.MonkeyPatch.context() as patch:
        for module in [*sys.modules.values()]:  # all that have imported it
            if isinstance(module, ModuleType) and vars(module).get("limits") is of_device:
                patch.setattr(module, "limits", of_card)
        yield


@contextmanager
def once(name: str, factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bool]]:
    """Give a folder that all processes of a run share, and whether this is the first one in it.

    The others wait until the first one has left.
    """
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, not done.exists()
        done.touch()


@pytest.fixture(scope="session", autouse=True)
def _built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile all kernels at once, where many tests run: by turns it takes most of their time."""
    if len(request.session.items) < MANY:
        return
    with once("kernels", tmp_path_factory) as (_, is_first):
        if is_first:
            build_all()


def build_all() -> None:
    """Compile all kernels into CuPy's cache on disk."""
    from cuda_instances import INSTANCES, SOURCES  # imports CuPy

    from exl2flow.kernels.cuda import compiler

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        plain = [threads.submit(compiler.module(file).compile) for file in SOURCES]
        instances = [
            threads.submit(compiler.build, file, name, torch.cuda.current_device())
            for file, names in INSTANCES.items()
            for name in names
        ]
        for work in (*plain, *instances):
            work.result()


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    before = torch_state()
    yield
    assert torch_state() == before


def _converted(
    family: str, factory: pytest.TempPathFactory, **overrides: object
) -> ConversionConfig:
    with once(family, factory) as (folder, is_first):
        if is_first:
            make_tiny(family, folder / "source", head_dim=64, **overrides)
        config = small_config(folder / "source", folder / "out", bpw=4.0)
        if is_first:
            run_until(config, "compile")
    return config


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """Return a finished conversion, made on the CPU."""
    return _converted("llama", tmp_path_factory)


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """Return the same of a model with windows."""
    return _converted("mistral", tmp_path_factory, sliding_window=40)


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """Return the same of a model with experts."""
    return _converted("mixtral", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """Return the same of a model with biases."""
    return _converted("qwen2", tmp_path_factory)


@pytest.fixture
def without_waiting() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which waiting for the device is an error."""

    @contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraph]:
    """Return all recordings made from now on."""
    made: list[CudaGraph] = []

    class Listed(CudaGraph):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(cuda_graphs, "CudaGraph", Listed)
    return made


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, which no kernel writes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
