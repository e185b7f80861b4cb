"""Which kernels are built before they are needed, and that none is built twice at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from cuda_instances import INSTANCES, SOURCES

from exl2flow.kernels.cuda import ahead, compiler
from exl2flow.kernels.plans.sources import source


@pytest.mark.parametrize(("file", "name"), [*ahead.ROUNDING, *ahead.GENERATION])
def test_what_is_built_ahead_exists(file: str, name: str) -> None:
    assert file in SOURCES
    if "<" in name:
        assert name in INSTANCES[file]
    else:
        assert name in source(file)


def test_a_launch_waits_for_what_is_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    building, finished = threading.Event(), threading.Event()
    builds = list[str]()

    def get_function(name: str) -> str:
        if not builds:  # the first one takes long, the second finds its result
            building.set()
            finished.wait(5)
        builds.append(threading.current_thread().name)
        return name

    monkeypatch.setattr(compiler, "virtual_architecture", lambda: None)
    module = SimpleNamespace(get_function=get_function)
    monkeypatch.setattr(compiler, "module", lambda file, instance=None: module)
    compiler.function.cache_clear()
    with ThreadPoolExecutor(1, "ahead") as thread:
        first = thread.submit(compiler.function, "round.cu", "round_panel")
        assert building.wait(5)
        threading.Timer(0.05, finished.set).start()

        assert compiler.function("round.cu", "round_coupled") == "round_coupled"

        assert first.result() == "round_panel"
    assert builds == ["ahead_0", "MainThread"]
    compiler.function.cache_clear()
