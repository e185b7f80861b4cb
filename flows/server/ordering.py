"""Which events triggers wait for; the server's setting `causal_ordering` names this module.

Prefect holds an event back, for up to 15 minutes, until the one that it follows has been seen. What
was seen is forgotten when a server ends. The crash of a run that began before a restart would then
be noticed too late; here events that an earlier server received are not waited for.
"""

from uuid import UUID

import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.server.events.ordering import memory
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.types import DateTime

BEGUN = DateTime.now("UTC")


class CausalOrdering(memory.CausalOrdering):
    """Prefect's own ordering, but for what came before this server."""

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        """Return when the event may be processed.

        Raises:
            EventArrivedEarly: the event that it follows will come yet.
        """
        leader = event.follows
        if leader is None or await self.event_has_been_seen(leader) or await _came_before(leader):
            return
        await super().wait_for_leader(event)


async def _came_before(event: UUID) -> bool:
    """Tell whether an earlier server stored the event."""
    db = provide_database_interface()
    query = sa.select(db.Event.id).where(db.Event.id == event, db.Event.received < BEGUN)
    async with db.session_context() as session:
        return (await session.execute(query)).first() is not None
