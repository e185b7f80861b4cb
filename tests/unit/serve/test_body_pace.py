"""Large bodies are parsed one at a time, with pauses; clients take turns, and small bodies none."""

import asyncio
import json
import time
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Body, FastAPI

from exl2flow.serve import body_pace
from exl2flow.serve.answers.bounds import LARGEST_BODY
from exl2flow.serve.body_pace import SHARE, SMALL, BodyPace, PacedRoute, seconds_of

JSON = {"content-type": "application/json"}


def test_large_bodies_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_pace, "SHARE", 1 / 2)
    order = list[str]()

    async def run() -> float:
        pace, began = BodyPace(), time.monotonic()

        async def one(client: str) -> None:
            await pace.wait(client, SMALL)
            order.append(client)

        await asyncio.gather(*map(one, ("a", "a", "a", "b")))
        return time.monotonic() - began

    assert asyncio.run(run()) >= 3 * SMALL * 2
    assert order == ["a", "a", "b", "a"]


def test_small_bodies_wait_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> float:
        pace = BodyPace()
        await pace.wait("a", 1e6)  # the next large one would wait for weeks
        await pace.wait("a", SMALL / 2)
        return pace._free_at

    assert asyncio.run(run()) > 1e6 / SHARE


def test_a_body_of_numbers_takes_longer_than_one_text() -> None:
    text, numbers = b'"' + b"a" * (LARGEST_BODY - 2) + b'"', b"[" + b"1," * (LARGEST_BODY // 2)

    assert seconds_of(b'{"prompt": "The cat"}') < SMALL < seconds_of(text) < seconds_of(numbers)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"a": [1, 0.1, "b", null]}', 200),
        ('{"a": "\u00e9"}'.encode("utf-16"), 200),
        (b'{"a": "\\ud800"}', 200),
        (b"[NaN, 1e400]", 200),
        (b'{"a": ', 422),
        (b"9" * 5000, 400),
        (b"[" * 100_000, 400),
    ],
)
def test_json_that_the_faster_parser_does_not_know_is_parsed(data: bytes, status: int) -> None:
    router, app = APIRouter(route_class=PacedRoute), FastAPI()

    @router.post("/")
    async def same(given: Annotated[Any, Body()]) -> bool:
        return repr(given) == repr(json.loads(data))

    app.include_router(router)

    async def answered() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.post("/", content=data, headers=JSON)

    answer = asyncio.run(answered())

    assert (answer.status_code, status != 200 or answer.json()) == (status, True)
