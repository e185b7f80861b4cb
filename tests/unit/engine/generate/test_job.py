"""Draws of a job whose text was begun earlier."""

import random
import time
from collections.abc import Callable

import pytest

from exl2flow.engine.generate.job import DRAWS
from exl2flow.inference import Generator, LoadedModel, Request


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@pytest.mark.parametrize("drawn", [0, 1, DRAWS - 1, DRAWS, 2 * DRAWS + 7])
def test_a_continued_text_uses_the_next_draw(model: LoadedModel, drawn: int) -> None:
    generator, draws = Generator(model, tokens=512, slots=1), random.Random(3)
    for _ in range(drawn):
        draws.random()

    job = generator.submit(Request((5, 6), seed=3, drawn=drawn))

    assert [job.random.random() for _ in range(3)] == [draws.random() for _ in range(3)]


def test_draws_are_passed_over_faster_than_they_are_made(model: LoadedModel) -> None:
    generator, draws, count = Generator(model, tokens=512, slots=1), random.Random(3), 400_000
    request = Request((5, 6), seed=3, drawn=count)

    made = min(seconds(lambda: [draws.random() for _ in range(count)]) for _ in range(3))
    passed = min(seconds(lambda: generator.submit(request)) for _ in range(3))

    assert passed < made / 2  # a seventh on an idle machine
