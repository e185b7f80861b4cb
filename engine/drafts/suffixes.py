"""The longest end of a text that has occurred before, as the text grows: a suffix automaton.

A state is a set of substrings that end at the same places; its link leads to shorter ends. So what
the last state links to is the longest end of the text with an earlier occurrence (A. Blumer et al.,
"The smallest automaton recognizing the subwords of a text", 1985). A token takes constant time on
average, memory grows with the text, and the last tokens can be taken back.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NONE = -1
REVERTIBLE = 64  # tokens at the end of a text that a rewind may have exchanged
FOLLOWED = 4  # shorter ends that also learn of their latest place


class Match(NamedTuple):
    """An end of a text that occurred before: its length, and the place behind that occurrence."""

    length: int
    end: int


@dataclass(frozen=True, slots=True)
class _Change:
    """What a token changed: the states before it, and old transitions, links and places."""

    states: int
    last: int
    transitions: list[tuple[int, int, int]] = field(default_factory=list)
    links: list[tuple[int, int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)


class SuffixAutomaton:
    """Built token by token; `ids` is the text so far.

    By state: the length of its longest substring; its link; the place behind its latest known
    occurrence; its first transition. Further transitions are in dictionaries.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.ids = array("q")
        self._lengths, self._links = array("q", [0]), array("q", [NONE])
        self._places = array("q", [0])
        self._tokens, self._targets = array("q", [NONE]), array("q", [NONE])
        self._others = dict[int, dict[int, int]]()
        self._last = 0
        self._changes = deque[_Change](maxlen=REVERTIBLE)

    def follow(self, ids: Sequence[int], *, most: int) -> bool:
        """Take up to `most` tokens of a text that grew, or changed at its end; False: not all."""
        shared = min(len(self.ids), len(ids))
        begin = max(0, shared - REVERTIBLE)
        before, after = self.ids[begin:shared], array("q", ids[begin:shared])
        same = shared
        if before != after:
            pairs = enumerate(zip(before, after, strict=True), begin)
            same = next(i for i, (old, new) in pairs if old != new)
        if len(self.ids) - same > len(self._changes):
            self._begin()
            same = 0
        while len(self.ids) > same:
            self._take_back()
        for token in ids[same : same + most]:
            self._extend(token)
        return len(self.ids) == len(ids)

    @property
    def match(self) -> Match:
        """The longest end of the text that occurred before, where it did so last, or nearly."""
        state = max(0, self._links[self._last])
        return Match(self._lengths[state], self._places[state])

    def _extend(self, token: int) -> None:
        change = _Change(len(self._lengths), self._last)
        self._changes.append(change)
        self._note_places(change)
        self.ids.append(token)
        new = self._add(self._lengths[self._last] + 1, len(self.ids))
        state = self._last
        while state != NONE and self._next(state, token) == NONE:
            self._change(change, state, token, new)
            state = self._links[state]
        if state == NONE:
            self._links[new] = 0
        else:
            target = self._next(state, token)
            is_longest = self._lengths[target] == self._lengths[state] + 1
            self._links[new] = target if is_longest else self._split(change, state, token, target)
        self._last = new

    def _note_places(self, change: _Change) -> None:
        """Note that the ends of the text that occurred before occur here as well."""
        state = self._links[self._last]
        for _ in range(FOLLOWED):
            if state <= 0:
                return
            change.places.append((state, self._places[state]))
            self._places[state] = len(self.ids)
            state = self._links[state]

    def _add(self, length: int, place: int) -> int:
        self._lengths.append(length)
        self._places.append(place)
        for column in (self._links, self._tokens, self._targets):
            column.append(NONE)
        return len(self._lengths) - 1

    def _split(self, change: _Change, state: int, token: int, target: int) -> int:
        """Give the shorter substrings of a target, which occur at more places, their own state."""
        new = self._add(self._lengths[state] + 1, self._places[target])
        for column in (self._links, self._tokens, self._targets):
            column[new] = column[target]
        if target in self._others:
            self._others[new] = {**self._others[target]}
        change.links.append((target, self._links[target]))
        self._links[target] = new
        while state != NONE and self._next(state, token) == target:
            self._change(change, state, token, new)
            state = self._links[state]
        return new

    def _next(self, state: int, token: int) -> int:
        if self._tokens[state] == token:
            return self._targets[state]
        others = self._others.get(state)
        return NONE if others is None else others.get(token, NONE)

    def _change(self, change: _Change, state: int, token: int, target: int) -> None:
        change.transitions.append((state, token, self._next(state, token)))
        self._put(state, token, target)

    def _put(self, state: int, token: int, target: int) -> None:
        if self._tokens[state] in (NONE, token):
            self._tokens[state] = NONE if target == NONE else token
            self._targets[state] = target
        elif target == NONE:
            del self._others[state][token]
        else:
            self._others.setdefault(state, {})[token] = target

    def _take_back(self) -> None:
        change = self._changes.pop()
        for state, token, target in reversed(change.transitions):
            self._put(state, token, target)
        for state, link in reversed(change.links):
            self._links[state] = link
        for state, place in reversed(change.places):
            self._places[state] = place
        for state in range(change.states, len(self._lengths)):
            self._others.pop(state, None)
        columns = (self._lengths, self._links, self._places, self._tokens, self._targets)
        for column in columns:
            del column[change.states :]
        self._last = change.last
        self.ids.pop()
