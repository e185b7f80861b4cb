import pytest
from outputs import run_of

from exl2flow.engine.generate.loops import is_loop


@pytest.mark.parametrize("period", [1, 7, 32, 100, 256])
def test_loop_ends_the_text(period: int) -> None:
    passage = [f"{index:03} " for index in range(period)]
    run = run_of("Once ", *passage * (1_200 // period + 1), end_loops=True)

    assert run.end.reason == "loop"
    assert run.output.new_tokens <= max(128, 4 * period) + 32
    assert run.text == "Once " + ("".join(passage) * 1_200)[: len(run.text) - 5]


def test_loops_go_on_unless_they_are_to_end() -> None:
    assert run_of(*["a"] * 1_000).output.reason is None


def test_repetition_with_changes_is_no_loop() -> None:
    rows = [token for row in range(100) for token in (1, 2, 3, 4, 5, 6, 7, 1_000 + row)]

    assert not any(is_loop(rows[:count]) for count in range(len(rows)))
    assert not is_loop([1] * 127)
    assert is_loop([*range(128), *[1] * 128])
