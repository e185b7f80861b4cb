"""Searches a text that arrives in pieces for strings."""

import re
from collections.abc import Collection


class Strings:
    """Finds the earliest of several strings, or a text end that could become one."""

    def __init__(self, strings: Collection[str]) -> None:
        self._strings = tuple(strings)
        self._any = re.compile("|".join(map(re.escape, strings)))
        self._first = frozenset(string[0] for string in strings)
        self.longest = max(map(len, strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str) -> tuple[int, str] | None:
        """Return start and string of the earliest match; of several there, the first listed."""
        match = self._any.search(text) if self._strings else None
        return None if match is None else (match.start(), match.group())

    def unfinished(self, text: str) -> int:
        """Return the start of the longest end of a text that begins a string, or its length."""
        for start in range(max(len(text) - self.longest + 1, 0), len(text)):
            if text[start] in self._first:
                tail = text[start:]
                if any(string.startswith(tail) for string in self._strings):
                    return start
        return len(text)
