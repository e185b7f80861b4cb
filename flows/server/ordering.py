"""Order of events for triggers; the server's setting `causal_ordering` names this module.

`prefect.server.events.ordering.memory` holds an event back for up to 15 minutes until it has seen
the event that this one follows, and forgets what it has seen when the server ends. The crash of a
run that began before a restart would be noticed that late. Here an event does not wait for one from
before this server began: it was processed, or lost with the server that had it in memory. The
time of an event is in its id. Upstream has the same fault for Redis:
https://github.com/PrefectHQ/prefect/issues/20954
"""

from uuid import UUID

from prefect.server.events.ordering import memory
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.types import DateTime

BEGUN = DateTime.now("UTC")
TIME_VERSION = 7  # of UUIDs whose first 48 bits are milliseconds


def is_earlier(event: UUID) -> bool:
    """Return whether the event with this id is from before this server."""
    return event.version == TIME_VERSION and event.int >> 80 < BEGUN.timestamp() * 1000


class CausalOrdering(memory.CausalOrdering):
    """Prefect's own ordering, except for events from before this server."""

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        """Return when the event may be processed.

        Raises:
            EventArrivedEarly: the event that it follows is yet to come.
        """
        if event.follows is None or not is_earlier(event.follows):
            await super().wait_for_leader(event)
