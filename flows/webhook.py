"""A receiver of the Hub's webhooks: a push to a model's main branch becomes an event.

Anybody may connect, so every connection has little time and memory, and too many of them close the
oldest. The Hub repeats messages that it got no answer to; each revision is announced once, until
another one of its repository arrives or the receiver restarts.
"""

import asyncio
import hmac
import logging
import socket
import time
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from httpx import HTTPError
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from exl2flow.core.options.watch import RepoId
from exl2flow.tasks.revisions import Revision, announce

MAIN = "refs/heads/main"
BAD_REQUEST, UNAUTHORIZED, TOO_LARGE, UNAVAILABLE = 400, 401, 413, 503
LARGEST_BODY = 1 << 20  # bytes; the Hub's messages have a few thousand
LARGEST_HEADERS = 1 << 14  # bytes, with the request line
MOST_FIELDS = 5  # of a wrong message, in the answer
MOST_REMEMBERED = 10_000  # repositories whose newest revision is known
MOST_CONNECTIONS, MOST_ANSWERS = 100, 128  # at the same time
RECEIVE_SECONDS = 10.0  # from the connection to the end of the request

log = logging.getLogger("uvicorn.error")  # whose lines appear on stderr


class _Event(BaseModel):
    action: str
    scope: str


class _Repo(BaseModel):
    type: str
    name: RepoId


class _Ref(BaseModel):
    ref: str
    newSha: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None


class _HubMessage(BaseModel):
    """The fields of the Hub's message that are used here; it has more."""

    event: _Event
    repo: _Repo
    updatedRefs: tuple[_Ref, ...] = ()

    def revision(self) -> Revision | None:
        """Return the new head of a model's main branch, None for any other message."""
        is_push = self.event.action == "update" and self.event.scope.startswith("repo.content")
        heads = [ref.newSha for ref in self.updatedRefs if ref.ref == MAIN and ref.newSha]
        if not (is_push and self.repo.type == "model" and heads):
            return None
        return Revision(repo_id=self.repo.name, revision=heads[-1])


class Impatient(H11Protocol):
    """A connection that ends if its request is not there in time, or if many newer ones come."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of TCP
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self.started = time.monotonic()
        self._deadline = self.loop.call_later(RECEIVE_SECONDS, self._end_unless_received)
        if len(self.connections) > MOST_CONNECTIONS:
            ours = (other for other in self.connections if isinstance(other, Impatient))
            waiting = [other for other in ours if not other.has_received()]
            oldest = min(waiting, key=lambda other: other.started)  # this one waits, too
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._deadline.cancel()

    def has_received(self) -> bool:
        """Return whether the whole request is there."""
        return self.cycle is not None and not self.cycle.more_body

    def _end_unless_received(self) -> None:
        if not self.has_received():
            self.transport.abort()


async def _body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: it is too large, or ends too early.
    """
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_BODY:
                raise HTTPException(TOO_LARGE, f"the body has more than {LARGEST_BODY} bytes")
    except ClientDisconnect:
        raise HTTPException(BAD_REQUEST, "the body is not complete") from None
    return bytes(body)


class Announcer:
    """Announces revisions, unless they are the newest known ones of their repositories."""

    def __init__(self) -> None:
        self._newest: dict[str, str] = {}  # by repository, the last to arrive at the end
        self._sending: dict[Revision, asyncio.Task[None]] = {}

    async def announce(self, revision: Revision) -> None:
        """Return when the event is on the server; repetitions wait for the event of the first.

        Raises:
            httpx.HTTPError: the server does not answer or refuses the event.
        """
        sending = self._sending.get(revision)
        if sending is None:
            if self._newest.get(revision.repo_id) == revision.revision:
                return
            self._newest.pop(revision.repo_id, None)
            self._newest[revision.repo_id] = revision.revision
            if len(self._newest) > MOST_REMEMBERED:
                del self._newest[next(iter(self._newest))]
            sending = self._sending[revision] = asyncio.create_task(self._send(revision))
        await asyncio.shield(sending)  # whoever gives up takes the event from nobody else

    async def _send(self, revision: Revision) -> None:
        is_sent = False
        try:
            await run_in_threadpool(announce, [revision])
            is_sent = True
        finally:
            del self._sending[revision]
            if not is_sent and self._newest.get(revision.repo_id) == revision.revision:
                del self._newest[revision.repo_id]
        log.info("announced %s at %s", revision.repo_id, revision.revision)


def receiver(secret: str) -> FastAPI:
    """Return the application, which answers `POST /` and requires this secret."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    announcer = Announcer()

    @app.post("/")
    async def receive(
        request: Request, x_webhook_secret: Annotated[str, Header()] = ""
    ) -> dict[str, str]:
        given = x_webhook_secret.encode("latin-1")  # as it was sent
        if not hmac.compare_digest(given, secret.encode()):
            raise HTTPException(UNAUTHORIZED, "X-Webhook-Secret is wrong")
        try:
            message = _HubMessage.model_validate_json(await _body(request))
        except ValidationError as error:
            problems = error.errors(include_input=False, include_url=False)[:MOST_FIELDS]
            fields = ", ".join(".".join(map(str, e["loc"])) or "JSON" for e in problems)
            raise HTTPException(BAD_REQUEST, f"not a message of the Hub: {fields}") from error
        revision = message.revision()
        if revision is None:
            raise HTTPException(
                BAD_REQUEST, "only pushes to the main branch of a model are accepted"
            )
        try:
            await announcer.announce(revision)
        except HTTPError as error:
            log.warning("%s: the Prefect server has not received it: %s", revision, error)
            raise HTTPException(UNAVAILABLE, "the Prefect server does not answer") from None
        return {"repo_id": revision.repo_id, "revision": revision.revision}

    return app


def serve(listener: socket.socket, secret: str) -> None:
    """Receive until a signal ends the process; addresses, which may hold keys, are not logged."""
    config = uvicorn.Config(
        receiver(secret),
        http=Impatient,
        ws="none",
        access_log=False,
        headers=[("Connection", "close")],
        limit_concurrency=MOST_ANSWERS,
        h11_max_incomplete_event_size=LARGEST_HEADERS,
    )
    uvicorn.Server(config).run([listener])
