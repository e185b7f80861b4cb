"""Split streamed text and its ids into thinking and answer."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

from exl2flow.core.requests.conversation import Thinking
from exl2flow.model.text.tokenizer import Tokenizer

Kind = Literal["answer", "thinking"]


class Splitter:
    """Separates thoughts from the answer, and drops the marks and leading white space.

    kind: of the text that comes next; is_marked: whether the mark before the answer was seen.
    """

    def __init__(self, marks: Thinking | None, *, opened: bool) -> None:
        """Start a text; `opened`: the prompt has begun the thoughts."""
        self.kind: Kind = "thinking" if marks is not None and opened else "answer"
        self.is_marked = False
        self._marks, self._held = marks, ""
        self._is_start, self._is_blank = marks is not None and not opened, True

    def push(self, text: str, *, ends: bool = False) -> list[tuple[Kind, str]]:
        """Take text, and return the parts whose kind is certain; `ends`: no more text follows."""
        parts: list[tuple[Kind, str]] = []
        self._held += text
        while self._begin(ends=ends):
            kind, shown = self.kind, self._next(ends=ends)
            if self._is_blank:
                shown = shown.lstrip()
            if shown:
                self._is_blank = False
                parts.append((kind, shown))
            if self.kind == kind:
                break
            self._is_blank = True
        return parts

    def _begin(self, *, ends: bool) -> bool:
        """Find out what the text begins with; False: it is too short to tell."""
        if not self._is_start:
            return True
        assert self._marks is not None
        text = self._held.lstrip()
        kinds: dict[str, Kind] = {self._marks.open: "thinking", self._marks.answer: "answer"}
        for mark, kind in kinds.items():
            if mark and text.startswith(mark):
                self.kind, self._held = kind, text[len(mark) :]
                self.is_marked, self._is_start = kind == "answer", False
                return True
            if mark and mark.startswith(text) and not ends:
                return False
        self._is_start = False
        return True

    def _next(self, *, ends: bool) -> str:
        """Return the text up to the next mark, or up to what may become one."""
        text, self._held = self._held, ""
        if self.kind == "answer" or self._marks is None:
            return text
        close = self._marks.close
        before, mark, after = text.partition(close)
        if mark:
            self.kind, self.is_marked, self._held = "answer", True, after
            return before
        longest = 0 if ends else min(len(close) - 1, len(text))
        held = next((n for n in range(longest, 0, -1) if close.startswith(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def first_of_answer(
    ids: Sequence[int], marks: Thinking | None, tokenizer: Tokenizer, *, opened: bool
) -> int:
    """Return how many ids belong to thoughts, marks and the white space behind them."""
    if marks is None:
        return 0

    def split(count: int) -> Splitter:
        splitter = Splitter(marks, opened=opened)
        splitter.push(tokenizer.decode(ids[:count], special=True), ends=True)
        return splitter

    whole = split(len(ids))
    if not whole.is_marked:
        return len(ids) if whole.kind == "thinking" else 0
    first = bisect_left(range(len(ids)), True, key=lambda count: split(count).is_marked)
    while first < len(ids) and not tokenizer.decode(ids[first : first + 1], special=True).strip():
        first += 1
    return first
