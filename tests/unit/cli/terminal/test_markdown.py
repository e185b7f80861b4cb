"""Markdown that is shown while it comes: what is drawn again, how often, and what never is."""

import re

import pytest
from screens import Reflowing, Screen

from exl2flow.cli.terminal.markdown import DRAWING_SHARE, MarkdownStream

CONTROL = re.compile(r"\x1b\[(\?7[lh]|\d+A|J|[\d;]*m)|\r|\n")


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drawing(screen: Screen) -> tuple[MarkdownStream, Seconds]:
    clock = Seconds()
    return MarkdownStream(screen.console, clock=clock), clock


def stream(screen: Screen, *pieces: str) -> None:
    """Feed pieces, with so much time between them that each is drawn."""
    markdown, clock = drawing(screen)
    for piece in pieces:
        markdown.feed(piece)
        clock.now += 1
    markdown.finish()


def test_a_finished_block_is_never_written_again() -> None:
    screen = Screen()
    markdown, clock = drawing(screen)
    for piece in ("First ", "words.\n", "\n"):
        markdown.feed(piece)
        clock.now += 1
    before = len(screen.written)

    for piece in ("- one\n", "- two\n\n", "```\ncode\n", "```\n", "end"):
        markdown.feed(piece)
        clock.now += 1
    markdown.finish()

    assert "First" not in screen.written[before:]
    assert screen.rows()[0] == "First words."


def test_only_rows_that_changed_are_written() -> None:
    screen = Screen()
    markdown, clock = drawing(screen)
    markdown.feed("- one\n- two\n- thr")
    before, clock.now = len(screen.written), 1.0

    markdown.feed("ee")

    assert "two" not in screen.written[before:]
    assert "three" in screen.written[before:]


def test_it_draws_thirty_times_a_second_at_most() -> None:
    screen = Screen()
    markdown, clock = drawing(screen)

    for _ in range(500):  # in a second
        markdown.feed("word ")
        clock.now += 0.002

    assert 25 <= screen.written.count("\x1b[?7l") <= 31


def test_a_block_that_takes_long_to_draw_is_drawn_less_often() -> None:
    screen = Screen()
    clock = iter(i * 0.02 for i in range(10_000))  # 20 ms between any two looks
    markdown = MarkdownStream(screen.console, clock=lambda: next(clock))

    for _ in range(1000):
        markdown.feed("word ")

    assert screen.written.count("\x1b[?7l") <= 1000 * 0.02 * DRAWING_SHARE / 0.02 + 1


@pytest.mark.parametrize(
    "pieces",
    [
        ("`", "`", "`", "py", "thon", "\nx = 1\n", "``", "`", "\nend"),
        ("- a\n  ``", "`py\n  x = 1\n", "  `", "``\n- end"),
    ],
)
def test_fences_may_be_cut_anywhere(pieces: tuple[str, ...]) -> None:
    screen = Screen()

    stream(screen, *pieces)

    assert "x = 1" in "\n".join(screen.rows())
    assert "end" in screen.rows()[-1]
    assert not any("```" in row for row in screen.rows())


def test_an_unclosed_fence_is_shown_at_the_end() -> None:
    screen = Screen()

    stream(screen, "```python\n", "def f():\n", "    return")

    assert [row.strip() for row in screen.rows() if row.strip()] == ["def f():", "return"]


def test_a_fence_that_may_still_come_is_not_shown() -> None:
    screen = Screen()
    markdown, _ = drawing(screen)

    markdown.feed("Look:\n``")

    assert screen.rows() == ["Look:"]


def test_a_block_taller_than_the_screen_shows_its_end_and_is_printed_once() -> None:
    screen = Screen(height=8)
    markdown, clock = drawing(screen)
    for i in range(50):
        markdown.feed(f"- item {i}\n")
        clock.now += 1
    assert screen.rows()[-1].endswith("item 49")

    markdown.finish()

    assert [row.strip(" •") for row in screen.rows()] == [f"item {i}" for i in range(50)]


def test_resizing_loses_no_text_and_touches_nothing_above() -> None:
    screen = Screen(60, 12)
    screen.feed("above\n")
    markdown, clock = drawing(screen)
    markdown.feed("finished\n\nword " + "word " * 30)

    for number, (width, height) in enumerate([(30, 12), (50, 14), (20, 30), (60, 40)]):
        screen.resize(width, height)
        clock.now += 1
        markdown.feed(f"more{number} ")
    markdown.finish()
    screen.feed("below\n")

    text = " ".join(screen.rows())
    assert {"more0", "more3", "below"} <= set(text.split())
    assert screen.rows()[0] == "above"
    assert screen.rows()[-1] == "below"


WORDS = " ".join(f"word{i}" for i in range(40))
LIST = "\n".join(f"- item {i}, which has several words in it" for i in range(6))
DRAWN = 8  # rows at most, of each of these on 60 columns
OPEN = (WORDS, LIST, f"```\n{LIST}")


def narrowed(kind: type[Screen], text: str, width: int) -> tuple[list[str], list[str]]:
    """Return the rows of an answer that comes while its terminal is narrowed, and those asked."""
    screens = kind(60, 40), kind(60, 40)
    for screen in screens:
        screen.feed("above\n")
    markdown, clock = drawing(screens[0])
    markdown.feed(f"finished\n\n{text}")
    for screen in screens:
        screen.resize(width, 40)
    clock.now += 1
    markdown.feed(" end")
    markdown.finish()
    stream(screens[1], f"finished\n\n{text} end")
    for screen in screens:
        screen.feed("below\n")
    return screens[0].rows(), screens[1].rows()


@pytest.mark.parametrize("width", [59, 45, 20])
@pytest.mark.parametrize("text", OPEN)
def test_a_terminal_that_is_narrowed_shows_the_open_block_once(text: str, width: int) -> None:
    shown, expected = narrowed(Screen, text, width)

    assert shown == expected


@pytest.mark.parametrize("width", [59, 45, 20])
@pytest.mark.parametrize("text", OPEN)
def test_a_terminal_that_wraps_rows_anew_keeps_no_more_than_the_rows_it_adds(
    text: str, width: int
) -> None:
    shown, expected = narrowed(Reflowing, text, width)
    rests = len(shown) - len(expected)

    assert shown[:2] == expected[:2] == ["above", "finished"]
    assert shown[2 + rests :] == expected[2:]
    assert 0 <= rests <= DRAWN * (-(-60 // width) - 1)


@pytest.mark.parametrize("text", ["漢字" * 40, "👩‍💻" * 40, "❤️🇩🇪" * 30, "e\u0301" * 90])
def test_wide_characters_and_emoji_are_erased_completely(text: str) -> None:
    by_letter, whole = Screen(31), Screen(31)

    stream(by_letter, "before\n\n", *text, "\n\nafter")
    stream(whole, f"before\n\n{text}\n\nafter")

    assert by_letter.rows() == whole.rows()


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[2J\x1b[1;1Hgone",
        "\x1b]0;title\x07",
        "\x9b31m red",
        "&#27;[2J &#13; &#x9b;2J",
        "[link](http://a\x1b[2J)",
        "```\n\x1b[2J\x08\x08\n```",
        "| a\x1b[A | b |\n|---|---|\n",
        "\u202egnirts",
        "\x00\x0b\x0c",
        "`\x1b[2J`",
        "x" * 100_000,
        "漢" * 50_000,
        "".join(f"{'`' * n}\n" for n in range(3, 200)),
        "> " * 5000 + "deep",
        "- " * 5000,
        "[" * 30_000,
        "*a" * 30_000,
        "\r" * 100 + "end",
        "```" + "z" * 5000 + "\nx",
    ],
)
def test_hostile_text_changes_only_its_own_rows(text: str) -> None:
    screen = Screen(40, 20)
    screen.feed("above\n")

    stream(screen, text[: len(text) // 2], text[len(text) // 2 :])
    screen.feed("below\n")

    assert CONTROL.sub("", screen.written).isprintable()
    assert screen.rows()[0] == "above"
    assert screen.rows()[-1] == "below"
    assert not screen.screen.title


def test_line_breaks_html_and_link_definitions_are_shown_as_written() -> None:
    screen = Screen()

    stream(screen, "one\ntwo\n\n<div>\n\n[x]: http://y\n\n[z](http://w)")

    assert screen.rows() == ["one", "two", "", "<div>", "", "[x]: http://y", "", "z (http://w)"]
