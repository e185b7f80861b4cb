"""Bans under a constraint, which may allow no other token than the one that begins a banned string.

A passage that was cut back must not begin again. If the constraint allows nothing else there, the
passage may begin, and is blocked at its next token that has an alternative.
"""

from collections.abc import Collection, Sequence

from exl2flow.core.errors import FilterDeadEnd
from exl2flow.engine.filters import Allowed, Combined

Cut = Sequence[tuple[int, ...]]


def firsts(cut: Cut) -> frozenset[int]:
    """Return the ids with which passages begin."""
    return frozenset(ids[0] for ids in cut)


def allowed_by(
    constraint: Combined, only: Collection[int] | None, blocked: frozenset[int], cut: Cut
) -> Allowed:
    """Return the allowed tokens, as `Combined.allowed` does, without banned passages if possible.

    cut: passages that must not follow; their first ids are among the blocked.

    Raises:
        FilterDeadEnd: every matching text continues like one of the passages.
    """
    try:
        return constraint.allowed(only, blocked)
    except FilterDeadEnd:
        leading = {token for token in firsts(cut) if _leads_on(constraint, token, cut)}
        if not leading:
            raise
        return constraint.allowed(only, blocked - leading)


def _leads_on(constraint: Combined, token: int, cut: Cut) -> bool:
    """Return whether a text may go on with a token and then differ from the passages."""
    todo, depth = [(0, token, cut)], 0  # passages may have thousands of tokens: no recursion
    try:
        while todo:
            before, token, cut = todo.pop()
            if depth > before:
                constraint.rollback(depth - before)
            depth = before
            rests = [ids[1:] for ids in cut if ids[0] == token]
            if () in rests:
                continue
            constraint.accept(token)
            depth += 1
            try:
                constraint.allowed(None, firsts(rests))
            except FilterDeadEnd:
                todo += [(depth, first, rests) for first in firsts(rests)]
            else:
                return True
        return False
    finally:
        if depth:
            constraint.rollback(depth)
