"""`StateStore`: snapshots of states in host memory, by the key of the page behind which they stand.

A prefix is taken over from the cache only up to a page that has a snapshot. A snapshot is as large
as a dozen pages, so only some have one; the least recently used go first, and before them those
whose page has left the cache.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from exl2flow.engine.cache.states import SavedState, States


class StateStore:
    """Snapshots of one generator's texts, at most `nbytes`."""

    def __init__(
        self,
        states: States,
        *,
        nbytes: int,
        page_tokens: int,
        is_listed: Callable[[bytes], bool],
    ) -> None:
        """Take the slots' states, and whether there is a page with a key."""
        self._page_tokens = page_tokens
        self._states, self._most = states, nbytes // states.saved_bytes
        self._is_listed = is_listed
        self._saved = OrderedDict[bytes, SavedState]()  # in the order of eviction
        self._pending = list[tuple[tuple[bytes, ...], SavedState]]()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return (len(self._saved) + len(self._pending)) * self._states.saved_bytes

    def put(self, slot: int, keys: Sequence[bytes], *, at: int | None = None) -> None:
        """Keep what a slot has passed at the last page border of a text, if memory is left.

        keys: of its full pages. at: tokens before the border; None: only the device knows, and the
        host finds out once the state has been copied.
        """
        self._settle()
        if not self._most:
            return
        self._evict()
        try:
            saved = self._states.save(slot)
        except RuntimeError:
            return
        if at is None:
            self._pending.append((tuple(keys), saved))
            self._settle()
        else:
            self._register(keys, saved, at)

    def holds(self, key: bytes) -> bool:
        """Return whether there is a snapshot behind the page with a key."""
        self._settle()
        return key in self._saved

    def load(self, slot: int, key: bytes, tokens: int) -> None:
        """Let a slot continue behind a page that has a snapshot, and its text's first tokens."""
        self._saved.move_to_end(key)
        self._states.load(slot, self._saved[key], tokens)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget snapshots whose values may not be finite."""
        for key in keys:
            self._saved.pop(key, None)
        self._pending = [one for one in self._pending if not {*one[0]} & {*keys}]

    def _evict(self) -> None:
        while len(self._saved) + len(self._pending) >= self._most and self._saved:
            unlisted = (key for key in self._saved if not self._is_listed(key))
            del self._saved[next(unlisted, next(iter(self._saved)))]
        del self._pending[: max(0, len(self._pending) + 1 - self._most)]

    def _settle(self) -> None:
        """Find the keys of snapshots that have been copied: only now is known where they stand."""
        pending, self._pending = self._pending, []
        for keys, saved in pending:
            if not saved.is_there:
                self._pending.append((keys, saved))
                continue
            self._register(keys, saved, int(saved.at))

    def _register(self, keys: Sequence[bytes], saved: SavedState, tokens: int) -> None:
        page = tokens // self._page_tokens
        if 0 < page <= len(keys):
            self._saved[keys[page - 1]] = saved
            self._saved.move_to_end(keys[page - 1])
