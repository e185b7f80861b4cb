"""What is refused before a handler runs: foreign hosts and pages, wrong keys, large or slow bodies.

`Guard` is plain ASGI. `Connection` bounds what clients can hold without asking for anything.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.serve.errors import ApiError, response

LARGEST_BODY = 8 << 20  # bytes
LARGEST_HEADERS = 32 << 10  # bytes, with the request line
HEADER_SECONDS, BODY_SECONDS = 10.0, 30.0
STALLED_SECONDS = 60.0  # without a byte that the client takes
MOST_CONNECTIONS = 256
OPEN = {"/health", "/v1/health"}
METRICS = {"/metrics", "/v1/status", "/status"}
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """A client's key: its SHA-256, and a name for the log."""

    name: str
    digest: bytes


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file.

    Raises:
        ConfigError: it cannot be read, or a table has no name, or not one of `key` and `sha256`.
    """
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("key", [])
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the keys in `{path}`: {words.cause(error)}") from error
    keys = list[Key]()
    for row in rows if isinstance(rows, list) else [rows]:
        name, plain, digest = (row.get(n) for n in ("name", "key", "sha256"))
        try:
            if not name or bool(plain) == bool(digest):
                raise ValueError
            keys.append(key_of(plain, name) if plain else Key(name, bytes.fromhex(digest)))
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"`{path}` has a [[key]] without `name`, or not with one of `key` and `sha256`"
            ) from None
    if not keys:
        raise ConfigError(f"`{path}` has no [[key]]; add one with `name` and `key`")
    return tuple(keys)


def key_of(plain: str, name: str) -> Key:
    """Return the key that a text is."""
    return Key(name, hashlib.sha256(plain.encode()).digest())


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Checks a request's headers, and counts its body."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[Key],
        hosts: Sequence[str],
        origins: Sequence[str],
        open_metrics: bool,
        on_status: Callable[[str, int], object],
    ) -> None:
        """on_status: is told the path of the route, and the status, of each answer."""
        self._on_status = on_status
        self._app, self._keys = app, keys
        self._hosts, self._origins = {*hosts}, {*origins}
        self._open = OPEN | (METRICS if open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        own = given.get("x-request-id", "")
        request_id = own if REQUEST_ID.fullmatch(own) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(request_id=request_id, key="-")
        is_begun = False

        async def told(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                route = getattr(scope.get("route"), "path", "other")
                self._on_status(route, message["status"])
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    *self._cors(given),
                ]
            await send(message)

        async def answered(message: Message) -> None:
            if body.error is None:
                await told(message)

        body = _Body(receive)
        try:
            self._check(scope, given)
            if scope["method"] == "OPTIONS" and given.get("origin") in self._origins:
                await Response(status_code=204)(scope, receive, told)
                return
            await self._app(scope, body, answered)
            if body.error is not None:  # the framework has answered in its own way
                raise body.error
        except ApiError as error:
            if not is_begun:
                more = {"connection": "close"} if error.status in (408, 413) else {}
                await response(error, request_id, more)(scope, receive, told)

    def _check(self, scope: Scope, given: Mapping[str, str]) -> None:
        """Refuse a request by its headers."""
        if sum(len(k) + len(v) for k, v in scope["headers"]) > LARGEST_HEADERS:
            raise ApiError(431, f"the headers have more than {LARGEST_HEADERS} bytes")
        host = urlsplit(f"//{given.get('host', '')}").hostname or ""
        if not (is_loopback(host) or host in self._hosts):
            raise ApiError(403, f"the host {host!r:.80} is not ours; `--allow-host` adds a name")
        origin = given.get("origin")
        if origin is not None and not self._is_ours(origin, given["host"]):
            raise ApiError(403, f"the origin {origin!r:.80} is not ours; `--origin` adds a page")
        if scope["method"] == "OPTIONS" and origin in self._origins:
            return
        if scope["path"] not in self._open:
            self._check_key(scope, given)
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = given.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, f"`content-type` is {kind!r:.80}; send application/json")
            length = given.get("content-length", "0")
            if not length.isdecimal() or int(length[:20]) > LARGEST_BODY:
                raise ApiError(413, f"the body has more than {LARGEST_BODY} bytes")

    def _is_ours(self, origin: str, host: str) -> bool:
        return origin in self._origins or urlsplit(origin).netloc == host

    def _check_key(self, scope: Scope, given: Mapping[str, str]) -> None:
        if not self._keys:
            return
        scheme, _, bearer = given.get("authorization", "").partition(" ")
        plain = bearer.strip() if scheme.lower() == "bearer" else given.get("x-api-key", "")
        digest = hashlib.sha256(plain.encode()).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if not found:
            raise ApiError(401, "no or a wrong key; send `Authorization: Bearer KEY`")
        scope["state"]["key"] = found[0].name

    def _cors(self, given: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        origin = given.get("origin", "")
        if origin not in self._origins:
            return []
        allowed = b"authorization, content-type, x-api-key, x-request-id"
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-headers", allowed),
            (b"vary", b"origin"),
        ]


class _Body:
    """The body of a request, of which size and time are bounded; error: which of them was not."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._size, self._is_over = receive, 0, False
        self.error: ApiError | None = None
        self._deadline = time.monotonic() + BODY_SECONDS

    async def __call__(self) -> Message:
        if self._is_over:
            return await self._receive()
        left = max(self._deadline - time.monotonic(), 0)
        try:
            message = await asyncio.wait_for(self._receive(), left)
        except TimeoutError:
            self.error = ApiError(408, f"the body was not here in {BODY_SECONDS:.0f} s")
            raise self.error from None
        self._size += len(message.get("body", b""))
        if self._size > LARGEST_BODY:
            self.error = ApiError(413, f"the body has more than {LARGEST_BODY} bytes")
            raise self.error
        self._is_over = not message.get("more_body", False)
        return message


class Connection(H11Protocol):
    """A connection that ends if headers come slowly, if the client stands still, or for others."""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self.used = time.monotonic()
        self._waiting: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._await_headers()
        if len(self.connections) > MOST_CONNECTIONS:
            ours = [c for c in self.connections if isinstance(c, Connection)]
            idle = [c for c in ours if c.is_idle]
            oldest = min(idle, key=lambda c: c.used)  # this one is idle, too
            self.connections.discard(oldest)
            oldest.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no whole request is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.used = time.monotonic()
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self._waiting is None:
            self._await_headers()  # of the next request, which has begun
        elif self.conn.their_state is not h11.IDLE and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        self.used = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        for timer in (self._waiting, self._stalled):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client does not take what is written."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or one whose headers are too large, in our form."""
        size = len(self.conn.trailing_data[0])
        status = 431 if size >= LARGEST_HEADERS else 400
        text = f"headers above {LARGEST_HEADERS} bytes" if status == 431 else "no HTTP request"
        answer = response(ApiError(status, text), "-", {"connection": "close"})
        for event in (
            h11.Response(status_code=status, headers=answer.raw_headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_headers(self) -> None:
        self._waiting = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _watch(self, size: int) -> None:
        def check() -> None:
            left = self.transport.get_write_buffer_size()
            if left >= size:
                self.transport.abort()
            else:
                self._watch(left)

        self._stalled = self.loop.call_later(STALLED_SECONDS, check)
