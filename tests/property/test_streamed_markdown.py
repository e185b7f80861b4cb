"""Streamed Markdown: however it is cut, the terminal ends as if it had come in one piece."""

from itertools import pairwise

import pyte
from hypothesis import example, given
from hypothesis import strategies as st
from screens import Screen

from exl2flow.cli.terminal.markdown import MarkdownStream, SafeMarkdown, closed_lines

LINES = [
    "",
    "",
    "plain words that go on for longer than a narrow terminal is wide",
    "# One",
    "## Two",
    "```python",
    "```",
    "````",
    "~~~",
    "x = {'a': 1}  # why",
    "- item",
    "  - inner",
    "1. first",
    "   more",
    "    code",
    "> quote",
    "| a | b |",
    "|---|---|",
    "| 1 | 2 |",
    "---",
    "===",
    "***",
    "**bold** *it* `code` ~~no~~",
    "[x]: http://y",
    "[x](http://y)",
    "<b>tag</b>",
    "日本語のテキスト 漢字",
    "👩‍💻 🇩🇪 ❤️ e\u0301 \u200b",
    "\t- tab",
    "10) ten",
    "- ```sh",
    "  ```",
    "#",
    "-",
    "`",
    "&#13;&amp;",
]
markdown = st.lists(
    st.one_of(st.sampled_from(LINES), st.text("ab`#->|* \n1.~\\[(", max_size=12)), max_size=30
).map("\n".join)


class Clock:
    """A second per look, so that every piece is drawn, or a constant, so that none is."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def streamed(pieces: list[str], *, width: int, height: int, step: float = 1.0) -> Screen:
    screen = Screen(width, height)
    stream = MarkdownStream(screen.console, clock=Clock(step))
    for piece in pieces:
        stream.feed(piece)
    stream.finish()
    return screen


def cut(text: str, at: list[int]) -> list[str]:
    ends = sorted({min(x, len(text)) for x in at} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@given(
    text=markdown,
    at=st.lists(st.integers(0, 600), max_size=40),
    width=st.integers(12, 70),
    height=st.integers(3, 30),
    step=st.sampled_from([1.0, 0.01]),
)
@example(text="a\n#5 bolt\n", at=[3, 4], width=20, height=5, step=1.0)
@example(text="```\nx\n    ```\ny\n```\nz", at=[*range(30)], width=20, height=5, step=1.0)
def test_any_pieces_leave_the_screen_of_one_piece(
    text: str, at: list[int], width: int, height: int, step: float
) -> None:
    whole = streamed([text], width=width, height=height, step=0.0)

    pieces = streamed(cut(text, at), width=width, height=height, step=step)

    assert pieces.rows() == whole.rows()
    assert pieces.screen.cursor.x == 0
    assert pyte.modes.DECAWM in pieces.screen.mode  # it wraps again


@given(text=markdown, width=st.integers(20, 70))
def test_blocks_printed_one_by_one_are_those_of_the_whole_document(text: str, width: int) -> None:
    whole = Screen(width)
    whole.console.print(SafeMarkdown(text.replace("\r", "")))

    blocks = streamed([*text], width=width, height=12)

    assert [row for row in blocks.rows() if row] == [row for row in whole.rows() if row]


@given(text=markdown, more=markdown)
def test_closed_blocks_stay_closed_whatever_follows(text: str, more: str) -> None:
    ends = closed_lines(text)

    assert closed_lines(text + more)[: len(ends)] == ends
