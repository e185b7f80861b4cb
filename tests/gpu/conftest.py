"""What the tests on a GPU share: they leave torch as they found it."""

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from conversions import small_config
from stage_runs import run_until
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.kernels.cuda import graphs as cuda_graphs
from exl2flow.kernels.cuda.graphs import CudaGraph

MANY = 200  # tests of a run


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
def _built(request: pytest.FixtureRequest) -> None:
    """Compile all kernels at once, where many tests run: by turns it takes most of their time."""
    if len(request.session.items) < MANY:
        return
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


def _converted(family: str, folder: Path, **overrides: object) -> ConversionConfig:
    source = make_tiny(family, folder / "source", head_dim=64, **overrides)
    config = small_config(source, folder / "out", bpw=4.0)
    run_until(config, "compile")
    return config


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """Return a finished conversion, made on the CPU."""
    return _converted("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """Return the same of a model with windows."""
    return _converted("mistral", tmp_path_factory.mktemp("mistral"), sliding_window=40)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """Return the same of a model with biases."""
    return _converted("qwen2", tmp_path_factory.mktemp("qwen2"))


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
