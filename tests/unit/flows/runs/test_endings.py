"""How flows end: the state that Prefect stores."""

import signal
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal

from exl2flow.core.errors import Exl2FlowError, Interrupted, PreflightFailed
from exl2flow.flows import convert, measure, publish, refine, sweep, validate, watch
from exl2flow.flows.runs import endings
from exl2flow.flows.runs.endings import ending


def state_after(error: BaseException) -> Any:
    @ending
    def flow() -> State[Any]:
        raise error

    return flow()


def test_known_error_fails_with_its_sentence_alone() -> None:
    error = PreflightFailed("the disk has no room; free 2 GB")

    state = state_after(error)

    assert (state.name, state.message, state.data) == ("Failed", str(error), error)


@pytest.mark.parametrize("error", [Interrupted("stopped", signum=15), KeyboardInterrupt()])
def test_signal_cancels(error: BaseException) -> None:
    state = state_after(error)

    assert state.name == "Cancelled"
    assert str(state.message).startswith("stopped")
    assert isinstance(state.data, Interrupted)


def test_worker_that_cancels_stores_the_state_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "get_intent", lambda: "cancel")

    with pytest.raises(TerminationSignal) as ended:
        state_after(Interrupted("stopped", signum=signal.SIGTERM))
    assert state_after(Exl2FlowError("no room")).name == "Failed"
    assert ended.value.signal == signal.SIGTERM


def test_defect_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        state_after(ZeroDivisionError())


@pytest.mark.parametrize("flow", [convert, measure, publish, refine, sweep, validate, watch])
def test_every_flow_ends_like_that(flow: Any) -> None:
    assert flow.fn.__code__ is ending(lambda: None).__code__
