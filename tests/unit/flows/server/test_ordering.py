"""`events.ordering.memory` of Prefect, and what ours changes: events from before a restart."""

import asyncio
from uuid import UUID, uuid4

import pytest
from prefect.server.database import provide_database_interface
from prefect.server.events.ordering import EventArrivedEarly, memory
from prefect.server.events.schemas.events import ReceivedEvent, Resource
from prefect.server.schemas.states import Running
from prefect.types import DateTime

from exl2flow.flows.server.ordering import BEGUN, CausalOrdering, is_earlier

MINUTE = 60_000  # milliseconds


def uuid7(milliseconds: int) -> UUID:
    """Return an id of this time after the begin of the server."""
    time = int(BEGUN.timestamp() * 1000) + milliseconds
    return UUID(int=time << 80 | 7 << 76 | 2 << 62)


EARLIER, LATER = uuid7(-MINUTE), uuid7(MINUTE)


def wait(ordering: memory.CausalOrdering, leader: UUID) -> None:
    now = DateTime.now("UTC")
    follower = ReceivedEvent(
        id=uuid4(),
        occurred=now,
        received=now,
        event="prefect.flow-run.Running",
        resource=Resource({"prefect.resource.id": "prefect.flow-run.x"}),
        follows=leader,
    )
    asyncio.run(ordering.wait_for_leader(follower))


def test_event_that_follows_one_from_before_the_restart_does_not_wait() -> None:
    wait(CausalOrdering(scope="ours"), EARLIER)


@pytest.mark.parametrize("leader", [LATER, uuid4()])
def test_event_that_follows_another_waits(leader: UUID) -> None:
    with pytest.raises(EventArrivedEarly):
        wait(CausalOrdering(scope=f"ours-{leader}"), leader)


def test_prefect_waits_for_both() -> None:
    for leader in (EARLIER, LATER):
        with pytest.raises(EventArrivedEarly):
            wait(memory.CausalOrdering(scope=f"theirs-{leader}"), leader)


def test_ids_of_events_of_states_tell_their_time() -> None:
    """A state has the id of its event."""
    state = provide_database_interface().FlowRunState(**Running().orm_dict())

    assert state.id.version == 7
    assert not is_earlier(state.id)
