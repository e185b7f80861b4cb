import logging

from prefect.logging.handlers import APILogHandler

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
