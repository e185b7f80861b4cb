"""The first signal asks, the second leaves."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from exl2flow.core.errors import Interrupted
from exl2flow.core.runtime import interrupt
from exl2flow.core.runtime.interrupt import GRACE_SECONDS, SIGNALS, listening, look

TWICE = """
import os, signal, sys, time
from exl2flow.core.runtime.interrupt import listening

number = int(sys.argv[1])
try:
    with listening():
        os.kill(os.getpid(), number)
        print("still here", flush=True)
        os.kill(os.getpid(), number)
        time.sleep(30)
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_is_remembered_and_raises_nothing(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with listening() as request:
        assert request.signum is None
        os.kill(os.getpid(), number)

    assert request.signum == number
    assert "repeat the signal to stop at once" in capfd.readouterr().err


def test_handlers_are_restored_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    during: list[object] = []

    def listen_and_fail() -> None:
        with listening():
            during.extend(signal.getsignal(number) for number in SIGNALS)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        listen_and_fail()

    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not set(during) & set(before)


@pytest.mark.parametrize("number", SIGNALS)
def test_second_signal_exits_at_once(number: signal.Signals) -> None:
    result = subprocess.run(
        [sys.executable, "-c", TWICE, str(int(number))], capture_output=True, text=True, timeout=60
    )

    assert result.returncode == 128 + number
    assert result.stdout == "still here\n"


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    found: list[object] = []

    def listen() -> None:
        with listening() as request:
            found.extend([request.signum, [signal.getsignal(number) for number in SIGNALS]])

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()

    assert found == [None, before]


def test_work_goes_on_in_the_grace_period_and_ends_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    with listening():
        look()
        os.kill(os.getpid(), signal.SIGTERM)
        now += GRACE_SECONDS - 0.1
        look()
        now += 0.2
        with pytest.raises(Interrupted, match="everything finished is saved") as stopped:
            look()

    assert stopped.value.signum == signal.SIGTERM
    look()


def test_other_threads_see_the_signal_of_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.0)

    with listening(), ThreadPoolExecutor(1) as pool:
        pool.submit(look).result()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            pool.submit(look).result()
