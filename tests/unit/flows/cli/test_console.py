import json
import logging
import math

import pytest

from exl2flow.flows.cli.console import emit_json, logging_to_stderr
from exl2flow.flows.cli.wording import number, percent, printable, short, size


def test_json_is_one_line_of_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"a": [math.inf, 1.5], "b": {"c": math.nan}, "long": "[red]ä\n" * 100})

    line, end = capsys.readouterr().out.split("\n")
    assert end == ""
    assert json.loads(line) == {"a": [None, 1.5], "b": {"c": None}, "long": "[red]ä\n" * 100}


def test_each_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("exl2flow.quant.forecast.preflight")

    with logging_to_stderr(logging.WARNING):
        for _ in range(2):
            logger.warning("rows are long")
            logger.info("hidden")

    assert capsys.readouterr().err == "warning: rows are long\n"


def test_logging_is_left_as_it_was() -> None:
    logger = logging.getLogger("exl2flow")
    before = (logger.level, logger.propagate, list(logger.handlers))

    with logging_to_stderr(logging.DEBUG):
        assert logger.level == logging.DEBUG

    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_values_are_worded_for_people() -> None:
    assert [size(n) for n in (12, 1_500, 2_340_000, 5e9)] == [
        "12 B",
        "1.50 kB",
        "2.34 MB",
        "5.00 GB",
    ]
    assert (number(None), number(1.23456), percent(None), percent(0.5)) == (
        "–",
        "1.2346",
        "–",
        "50.00 %",
    )
    assert short("model.layers.3.mlp") == "3.mlp"


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[31m\r\u202eb\n\tc") == "a\ufffd[31m\ufffd\ufffdb\n\tc"
