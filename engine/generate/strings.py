"""Searches a text that arrives in pieces for strings, however many there are."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from operator import itemgetter


class Strings:
    """Finds the earliest of several strings, or a text end that could become one."""

    def __init__(self, strings: Collection[str]) -> None:
        self._place = {string: place for place, string in reversed([*enumerate(strings)])}
        self._sorted = sorted(self._place)
        firsts = "".join({re.escape(string[0]) for string in self._sorted})
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self.longest = max(map(len, self._sorted), default=0)

    def __bool__(self) -> bool:
        return bool(self._sorted)

    def find(self, text: str) -> tuple[int, str] | None:
        """Return start and string of the earliest match; of several there, the first listed."""
        for first in self._first.finditer(text):
            start = first.start()
            begun = (text[start:end] for end in self._begun(text, start))
            if found := [part for part in begun if part in self._place]:
                return start, min(found, key=self._place.__getitem__)
        return None

    def unfinished(self, text: str) -> int:
        """Return the start of the longest end of a text that begins a string, or its length."""
        for first in self._first.finditer(text, max(len(text) - self.longest + 1, 0)):
            if any(end == len(text) for end in self._begun(text, first.start())):
                return first.start()
        return len(text)

    def _begun(self, text: str, start: int) -> Iterator[int]:
        """Yield the ends of the parts of a text from `start` on with which some string begins."""
        low, high = 0, len(self._sorted)
        for end in range(start + 1, len(text) + 1):
            part, size = text[start:end], end - start
            low = bisect_left(self._sorted, part, low, high)
            high = bisect_right(self._sorted, part, low, high, key=itemgetter(slice(size)))
            if low == high:
                return
            yield end
