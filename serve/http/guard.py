"""Refusals before a handler runs: foreign hosts and pages, wrong keys, large or slow bodies.

Plain ASGI. What clients hold without asking for anything is bounded in `running`.
"""

import asyncio
import ipaddress
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exl2flow.core.options.serving import ServeOptions
from exl2flow.serve.answers.bounds import LARGEST_BODY, check_body
from exl2flow.serve.body_pace import BodyPace, seconds_of
from exl2flow.serve.errors import ApiError, as_api_error, response
from exl2flow.serve.hosts.keys import Key, Keys
from exl2flow.serve.hosts.metrics import OTHER, Metrics
from exl2flow.serve.http.listening import UNIX

LARGEST_HEADERS = 32 << 10  # bytes
BODY_SECONDS = 30.0
MOST_DISCARDED = 64 << 20  # bytes of a body that is refused; then the connection breaks
OPEN, MEASURES = {"/", "/health", "/v1/health"}, {"/metrics", "/v1/status", "/status"}
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ALLOWED = ("authorization", "content-type", "x-api-key", "x-request-id")  # headers of pages
HEADER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")  # a name that a page may ask for
MOST_HEADERS = 64  # of a page
BODILESS = {"/v1/model/unload", "/model/unload"}  # take no body, so none needs a type
SLASHES = re.compile(r"//+")
CLOSING = {408: {"connection": "close"}, 413: {"connection": "close"}}


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    found = _address(host.strip("[]"))
    return host == "localhost" if found is None else found.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host that is given as an IP address, None for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def is_open(host: str) -> bool:
    """Return whether other machines reach what listens on an address."""
    return not (host.startswith(UNIX) or is_loopback(host))


class Guard:
    """Checks a request's headers, and reads its body."""

    def __init__(
        self, app: ASGIApp, *, options: ServeOptions, keys: Keys, metrics: Metrics
    ) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics
        self._hosts, self._origins = {options.host, *options.allow_host}, {*options.origin}
        self._is_open_to_others = is_open(options.host)
        self._pace = BodyPace()
        self._open = OPEN | (MEASURES if options.open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _plainly(scope)
        given = Headers(scope=scope)
        own = given.get("x-request-id", "")
        request_id = own if REQUEST_ID.fullmatch(own) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(request_id=request_id, key=_anyone(scope))
        is_begun = False

        async def noted(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                self._finish(message, scope, given)
            await send(message)

        try:
            is_question = self._is_question(scope, given)
            body = b"" if is_question else await self._body(scope, receive)
        except ApiError as error:
            if error.status == 413 and "expect" not in given:
                await _discard(receive)
            await response(error, scope, CLOSING.get(error.status))(scope, receive, noted)
            return
        except ClientDisconnect:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Message:
            return messages.pop() if messages else await receive()

        app = Response(status_code=204) if is_question else self._app
        try:
            await app(scope, read, noted)
        except Exception as error:  # else the framework answers, without our headers and counts
            if is_begun:
                raise
            answer = response(as_api_error(error, request_id, is_input=True), scope)
            await answer(scope, receive, noted)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Return a body that may be parsed now."""
        body = await _read(receive)
        host, _ = scope.get("client") or ("", 0)
        await self._pace.wait(f"{scope['state']['key'].name} {host}", seconds_of(body))
        return check_body(body)

    def _finish(self, start: Message, scope: Scope, given: Headers) -> None:
        """Count an answer that begins, log it if it refuses, and add its headers."""
        path, status = getattr(scope.get("route"), "path", OTHER), start["status"]
        self._metrics.add("http_requests", path=path, code=str(status))
        if status >= 400:
            self._metrics.refused(scope["state"], scope["path"], status)
        headers = MutableHeaders(raw=start["headers"])
        headers["x-request-id"] = headers["request-id"] = scope["state"]["request_id"]
        if given.get("origin") in self._origins:
            headers["access-control-allow-origin"] = given["origin"]
            headers["access-control-allow-headers"] = _allowed(given)
            headers["access-control-expose-headers"] = "*"
            headers["vary"] = "origin, access-control-request-headers"

    def _is_question(self, scope: Scope, given: Headers) -> bool:
        """Refuse a request by its headers; return whether a page asks what it may send."""
        if sum(len(k) + len(v) for k, v in given.raw) > LARGEST_HEADERS:
            raise ApiError(431, f"the headers have more than {LARGEST_HEADERS} bytes")
        host, origin = _host_of(f"//{given.get('host', '')}"), given.get("origin")
        is_ours = is_loopback(host) or host in self._hosts
        # a page that rebinds its name to this machine needs a name, so an address is none
        if not (is_ours or (self._is_open_to_others and _address(host))):
            raise ApiError(403, f"the host {host!r:.80} is not ours; `--allow-host` adds a name")
        is_own = origin is None or origin.partition("://")[2] == given["host"]
        if not is_own and origin not in self._origins:
            raise ApiError(403, f"the origin {origin!r:.80} is not ours; `--origin` adds a page")
        if scope["method"] == "OPTIONS" and origin in self._origins:
            return True
        self._keys.look()
        if self._keys and scope["path"] not in self._open:
            scope["state"]["key"] = self._keys.find(_plain(given))
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = given.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not (scope["path"] in BODILESS and _is_empty(given)):
                raise ApiError(415, f"`content-type` is {kind!r:.80}; send application/json")
            if int(given.get("content-length", "0")[:20]) > LARGEST_BODY:  # h11 checks digits
                raise ApiError(413, f"the body has more than {LARGEST_BODY} bytes")
        return False


def _plainly(scope: Scope) -> Scope:
    """Return a request without doubled and trailing slashes; what GET answers, HEAD does too.

    The server leaves out the body. The root has a route of its own for HEAD.
    """
    path = SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
    is_head = scope["method"] == "HEAD" and path != "/"
    return {**scope, "path": path, "method": "GET" if is_head else scope["method"]}


def _allowed(given: Mapping[str, str]) -> str:
    """Return the headers that a page of a known origin may send: what it asks for."""
    asked = given.get("access-control-request-headers", "").lower().split(",")
    names = [name.strip() for name in asked[:MOST_HEADERS]]
    return ", ".join(dict.fromkeys([*ALLOWED, *filter(HEADER.fullmatch, names)]))


def _is_empty(given: Mapping[str, str]) -> bool:
    return "transfer-encoding" not in given and given.get("content-length", "0") == "0"


def _anyone(scope: Scope) -> Key:
    """Return what a client without a key is: on this machine, an admin."""
    host, _ = scope.get("client") or ("localhost", 0)  # a Unix socket has none
    return Key("-", is_admin=is_loopback(host), waiting=None)


def _plain(given: Mapping[str, str]) -> str:
    scheme, _, bearer = given.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    return given.get("x-api-key") or given.get("x-admin-key", "")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # a broken IPv6 address
        return ""


async def _read(receive: Receive) -> bytes:
    """Return the body of a request; raises `ApiError` if it is too large or slow."""
    body, goes_on = bytearray(), True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while goes_on:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                goes_on = message.get("more_body", False)
                if len(body) > LARGEST_BODY:
                    raise ApiError(413, f"the body has more than {LARGEST_BODY} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body was not here in {BODY_SECONDS:.0f} s") from None
    return bytes(body)


async def _discard(receive: Receive) -> None:
    """Take the rest of a body: a client that still sends when we close never sees the answer."""
    left, goes_on = MOST_DISCARDED, True
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while goes_on and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                goes_on = message.get("more_body", False)
