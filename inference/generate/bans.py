"""Bans under a constraint: the first token of a banned string may be the only one that is allowed.

A passage that was cut back is not to begin again. Where a constraint leaves no other token, it may
begin, and is blocked at the next token for which there is another.
"""

from collections.abc import Collection, Sequence

from exl2flow.core.errors import FilterDeadEnd
from exl2flow.inference.filters import Allowed, Combined

Cut = Sequence[tuple[int, ...]]


def firsts(cut: Cut) -> frozenset[int]:
    """Return the ids with which passages begin."""
    return frozenset(ids[0] for ids in cut)


def allowed_by(
    constraint: Combined, only: Collection[int] | None, blocked: frozenset[int], cut: Cut
) -> Allowed:
    """Return what may follow, as `Combined.allowed` does.

    Args:
        constraint: of the filters.
        only: the ids to choose from; None: all.
        blocked: ids that must not follow.
        cut: passages that must not; their first ids are among the blocked.

    Raises:
        FilterDeadEnd: every text that matches goes on as one of the passages does.
    """
    try:
        return constraint.allowed(only, blocked)
    except FilterDeadEnd:
        leading = {token for token in firsts(cut) if _leads_on(constraint, token, cut)}
        if not leading:
            raise
        return constraint.allowed(only, blocked - leading)


def _leads_on(constraint: Combined, token: int, cut: Cut) -> bool:
    """Return whether a text may begin with a token and not go on as the passages do."""
    rests = [ids[1:] for ids in cut if ids[0] == token]
    if () in rests:
        return False
    constraint.accept(token)
    try:
        allowed_by(constraint, None, firsts(rests), rests)
    except FilterDeadEnd:
        return False
    finally:
        constraint.rollback(1)
    return True
