"""Order of events for triggers; the server's setting `causal_ordering` names this module.

`prefect.server.events.ordering.memory` holds an event back for up to 15 minutes until it has seen
the event that this one follows, and forgets what it has seen when the server ends. The crash of a
run that began before a restart would be noticed that late. Here an event does not wait for one that
an earlier server stored. Upstream has the same fault for Redis:
https://github.com/PrefectHQ/prefect/issues/20954
"""

import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.server.events.ordering import memory
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.types import DateTime

BEGUN = DateTime.now("UTC")


class CausalOrdering(memory.CausalOrdering):
    """Prefect's own ordering, except for events from before this server."""

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        """Return when the event may be processed.

        Raises:
            EventArrivedEarly: the event that it follows is yet to come.
        """
        leader = event.follows
        if leader is None or await self.event_has_been_seen(leader):
            return
        db = provide_database_interface()
        query = sa.select(db.Event.id).where(db.Event.id == leader, db.Event.received < BEGUN)
        async with db.session_context() as session:
            found = await session.execute(query)
        if found.first() is None:
            await super().wait_for_leader(event)
