"""Tells the rules of `automations.yaml` again in which state runs are.

Rules hear of a state once, by an event that the server keeps in memory: if the server is killed
then, the run stays as it is for ever. Nor does a rule begin to wait while it still keeps the
fulfilled wait of an earlier attempt at the same run. So runs of deployments that are taken, at work
or crashed are looked up from time to time. The events of this module, `exl2flow.run.*`, are
not stored.
"""

from datetime import timedelta
from uuid import uuid4

import sqlalchemy as sa
from docket import Perpetual
from prefect.server.database import provide_database_interface
from prefect.server.events import triggers
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.models.events import flow_run_state_change_event
from prefect.server.schemas.states import StateType
from prefect.types import DateTime

EVENTS = {
    StateType.PENDING: "exl2flow.run.pending",
    StateType.RUNNING: "exl2flow.run.running",
    StateType.CRASHED: "exl2flow.run.crashed",
}
EVERY = timedelta(seconds=30)
SETTLED = timedelta(seconds=30)  # age of a state whose own event has been processed, or is lost
REPEATED = Perpetual(automatic=True, every=EVERY)
FORGOTTEN = timedelta(days=1)  # age of a crash that nobody expects to go on


async def due(moment: DateTime) -> list[ReceivedEvent]:
    """Return the reminders of a moment, one for each run."""
    db = provide_database_interface()
    run = db.FlowRun
    lately = sa.or_(run.state_type != StateType.CRASHED, run.state_timestamp > moment - FORGOTTEN)
    query = sa.select(run).where(
        run.deployment_id.is_not(None),
        run.state_type.in_(EVENTS),
        run.state_timestamp < moment - SETTLED,
        lately,
    )
    reminders = []
    async with db.session_context() as session:
        for row in await session.scalars(query):
            event = await flow_run_state_change_event(
                session=session,
                occurred=moment,
                flow_run=row,
                initial_state_id=None,
                initial_state=None,
                validated_state_id=uuid4(),
                validated_state=row.state.as_state(),
            )
            name = EVENTS[row.state_type]
            reminders.append(event.model_copy(update={"event": name}).receive())
    return reminders


async def remind(perpetual: Perpetual = REPEATED) -> None:
    """Tell the rules of all runs that are not finished; Prefect calls this again and again."""
    for event in await due(DateTime.now("UTC")):
        await triggers.reactive_evaluation(event)
