"""`SequenceStates`: which state stands in a sequence's slot, and where it goes back to.

A state includes all tokens up to one place. Pages may be cut anywhere; a state returns to a place
that was kept: where text began to be held back, or behind a page that has a snapshot.
"""

from exl2flow.engine.cache.page_pool import PagePool
from exl2flow.engine.cache.prefix_tree import SequencePages
from exl2flow.engine.cache.state_store import StateStore
from exl2flow.engine.cache.states import States
from exl2flow.kernels import STEP_TOKENS

STATE_MEMORY = 4 * 10**9  # bytes of snapshots
OUTPUT_TOKENS = 2048  # of a text, between two snapshots


class SequenceStates:
    """States of sequences in slots; without layers that have one, nothing happens."""

    def __init__(self, states: States | None, pool: PagePool, *, nbytes: int) -> None:
        """Keep snapshots of at most `nbytes`, and let the pool share pages that have one only."""
        self._pool, self._states, self.store = pool, states, None
        if states is not None:
            self.store = StateStore(
                states, nbytes=nbytes, page_tokens=pool.page_tokens, is_listed=pool.is_listed
            )
            pool.continues_from = self.store.holds

    @property
    def spare(self) -> int:
        """The slot of texts that have none."""
        return -1 if self._states is None else self._states.spare

    def follow(self, slot: int, held: SequencePages) -> None:
        """Bring the state to the end of pages that the sequence shares."""
        if self.store is not None and held.filled > held.behind:
            page = held.filled // self._pool.page_tokens
            self.store.load(slot, held.keys[page - 1], held.filled)
            held.behind = held.snapshot = held.filled

    def has_read(self, slot: int, held: SequencePages) -> None:
        """Note that a pass has read all tokens that are filled; keep the state at a border."""
        if self.store is None:
            return
        begin, held.behind = held.behind, held.filled
        border = held.filled - held.filled % self._pool.page_tokens
        if border > begin:
            self.store.put(slot, held.keys, at=border)
            held.snapshot = border

    def has_grown(self, slot: int, held: SequencePages, *, is_holding: bool) -> None:
        """Note that a token was added to a text; keep the state where text begins to wait."""
        if self._states is None or self.store is None:
            return
        if is_holding and held.waits_at is None:
            self._states.hold(slot)
            held.waits_at = held.behind
        elif not is_holding:
            held.waits_at = None
        page = held.behind // self._pool.page_tokens
        border = page * self._pool.page_tokens
        if border - held.snapshot >= OUTPUT_TOKENS and page <= len(held.keys):
            self.store.put(slot, held.keys)
            held.snapshot = border

    def leave(self, slot: int, held: SequencePages) -> None:
        """Keep what a sequence that ends has passed."""
        border = held.behind + STEP_TOKENS  # it may have been passed
        if self.store is not None and border - border % self._pool.page_tokens > held.snapshot:
            self.store.put(slot, held.keys)

    def lose(self, held: SequencePages) -> bool:
        """Note that a pass failed, in which some layers advanced; False: nothing has a state."""
        if self._states is None:
            return False
        held.behind = held.filled + 1  # none of the places that are known
        held.snapshot = min(held.snapshot, held.filled)
        return True

    def forget(self, held: SequencePages) -> None:
        """Forget snapshots of a sequence whose values may not be finite."""
        if self.store is not None:
            self.store.forget(held.keys)

    def place(self, held: SequencePages, tokens: int) -> int:
        """Return the last position, at most `tokens`, from which prefill can resume."""
        if self.store is None:
            return tokens
        if held.behind <= tokens:
            return held.behind
        if held.waits_at is not None and held.waits_at <= tokens:
            return held.waits_at
        for page in range(tokens // self._pool.page_tokens, 0, -1):
            if page <= len(held.keys) and self.store.holds(held.keys[page - 1]):
                return page * self._pool.page_tokens
        return 0

    def go_back(self, slot: int, held: SequencePages) -> None:
        """Bring the state to the end of what is filled, one of the places that `place` returns."""
        if self._states is None or self.store is None or held.filled == held.behind:
            return
        if held.filled == held.waits_at:
            self._states.go_back(slot, held.filled)
        elif held.filled:
            page = held.filled // self._pool.page_tokens
            self.store.load(slot, held.keys[page - 1], held.filled)
        else:
            self._states.clear(slot)
        held.behind = held.filled
        held.snapshot = min(held.snapshot, held.filled)
