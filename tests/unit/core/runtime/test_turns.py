"""Turns between clients."""

import asyncio

from exl2flow.core.runtime.turns import Turns


async def served(clients: str, *, places: int = 1, leaves: tuple[int, ...] = ()) -> str:
    """Return the order in which requests of clients come while the first ones hold all places."""
    turns, order, hold = Turns(places), list[str](), asyncio.Event()

    async def one(client: str) -> None:
        async with turns.of(client):
            order.append(client)
            await hold.wait()

    tasks = [asyncio.create_task(one(client)) for client in clients]
    await asyncio.sleep(0)
    assert len(order) == places
    for index in leaves:
        tasks[index].cancel()
    hold.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(1), turns.of("last"):
        order.append("!")
    return "".join(order)


def test_clients_take_turns() -> None:
    assert asyncio.run(served("aaaabbc")) == "aabcaba!"


def test_several_run_at_once() -> None:
    assert asyncio.run(served("aaaab", places=2)) == "aaaba!"


def test_one_that_leaves_does_not_keep_its_turn() -> None:
    assert asyncio.run(served("aabb", leaves=(0, 1, 2))) == "ab!"
