"""The end of a flow: a known error as a state whose message is its sentence, without a traceback.

The first page of a run shows that message; a raised error would begin with Prefect's words.
"""

import signal
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from prefect._internal.control_listener import get_intent  # no public name
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Failed

from exl2flow.core.errors import Exl2FlowError, Interrupted

P = ParamSpec("P")
R = TypeVar("R")

STOPPED = "stopped; everything finished is saved"


def ending(flow: Callable[P, R]) -> Callable[P, R]:
    """Let known errors of a flow's function end its run; the caller still gets them raised."""

    @wraps(flow)
    def run(*args: P.args, **values: P.kwargs) -> R:
        try:
            return flow(*args, **values)
        except KeyboardInterrupt:  # while no stage listens
            error: Exl2FlowError = Interrupted(STOPPED, signum=signal.SIGINT)
        except Exl2FlowError as known:
            error = known
        return cast(R, _state(error))  # Prefect raises what a state holds

    return run


def _state(error: Exl2FlowError) -> State[Any]:
    """Return the state of a run that an error ended.

    Raises:
        TerminationSignal: its worker cancels it, and then stores the state itself.
    """
    if not isinstance(error, Interrupted):
        return Failed(message=str(error), data=error)
    if get_intent() is not None:
        raise TerminationSignal(signal=error.signum)
    return Cancelled(message=str(error), data=error)
