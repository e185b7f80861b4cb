"""Strings to look for in a text that arrives in pieces."""

import re
from collections.abc import Collection


class Strings:
    """Finds the earliest of some strings, or what may still become one."""

    def __init__(self, strings: Collection[str]) -> None:
        self._strings = tuple(strings)
        self._any = re.compile("|".join(map(re.escape, strings)))
        self._first = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str) -> tuple[int, str] | None:
        """Return where the earliest match begins, and the string; the first of several there."""
        match = self._any.search(text) if self._strings else None
        return None if match is None else (match.start(), match.group())

    def unfinished(self, text: str) -> int:
        """Return where a text's end begins that a string could begin with, or the text's length."""
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[start] in self._first:
                tail = text[start:]
                if any(string.startswith(tail) for string in self._strings):
                    return start
        return len(text)
