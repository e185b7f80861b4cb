import logging

from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings

from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.tasks.logs import logged


def test_log_lines_go_to_the_run_inside_the_block_only() -> None:
    logger = logging.getLogger("exl2flow")
    before = (logger.level, list(logger.handlers))

    with logged():
        added = [h for h in logger.handlers if isinstance(h, APILogHandler)]
        assert len(added) == 1
        assert logger.isEnabledFor(logging.INFO)

    assert (logger.level, logger.handlers) == before


def test_handler_that_prefect_added_itself_is_not_doubled() -> None:
    logger = logging.getLogger("exl2flow")
    configured = APILogHandler()
    logger.addHandler(configured)

    with logged():
        assert [h for h in logger.handlers if isinstance(h, APILogHandler)] == [configured]

    logger.removeHandler(configured)


def lines_of(*errors: Exception) -> list[logging.LogRecord]:
    """Return what becomes of Prefect's lines about errors, each logged by a task and its flow."""
    made: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = made.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("prefect.task_runs", "prefect.flow_runs")]
    with logged(), temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}):
        for logger in loggers:
            logger.addHandler(handler)
        for error in errors:
            for logger in loggers:
                logger.error("failed: %r", error, exc_info=error)
        for logger in loggers:
            logger.removeHandler(handler)
    return made


def test_a_known_error_is_one_line_without_a_traceback() -> None:
    stopped = Interrupted("stopped in stage `one`", signum=2)

    lines = lines_of(Exl2FlowError("no such `a`"), stopped)

    assert [line.getMessage() for line in lines] == ["no such `a`", "stopped in stage `one`"]
    assert [line.levelno for line in lines] == [logging.ERROR, logging.INFO]
    assert [line.exc_info for line in lines] == [None, None]


def test_a_defect_keeps_its_traceback() -> None:
    defect = ValueError("defect")

    assert [line.exc_info and line.exc_info[1] for line in lines_of(defect)] == [defect, defect]
