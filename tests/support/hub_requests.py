"""HTTP below `hub_server.py`: bodies, ranges, and faults that end connections."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

PIECE = 1 << 16


@dataclass(kw_only=True)
class Request:
    """What arrived; `server` is hub or storage."""

    server: str
    method: str
    path: str
    headers: Mapping[str, str]
    query: Mapping[str, list[str]] = field(default_factory=dict)
    body: bytes = b""
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def token(self) -> str | None:
        """The token in its headers."""
        return self.headers.get("authorization", "").removeprefix("Bearer ") or None

    def json(self) -> Any:
        """Return the body's content."""
        return json.loads(self.body or b"{}")


@dataclass(kw_only=True)
class Response:
    """What is answered."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object, *, status: int = 200) -> "Response":
        """Return a JSON answer."""
        kind = {"Content-Type": "application/json"}
        return cls(status=status, body=json.dumps(value).encode(), headers=kind)

    @classmethod
    def error(cls, status: int, message: str, *, code: str = "") -> "Response":
        """Return an error as the Hub does: in the body and in headers."""
        made = cls.of({"error": message}, status=status)
        made.headers["X-Error-Message"] = message
        if code:
            made.headers["X-Error-Code"] = code
        return made

    def part(self, asked: str | None) -> "Response":
        """Return the part of the body that a Range header asks for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
        if match is None or self.status != 200:
            return self
        begin, size = int(match[1]), len(self.body)
        end = int(match[2]) + 1 if match[2] else size
        headers = {**self.headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        return Response(status=206, body=self.body[begin:end], headers=headers)


def handler_of(
    hub: Any, server: str, answer: Callable[..., Response]
) -> type[BaseHTTPRequestHandler]:
    """Return a class of handlers that answer for a Hub, or for its storage."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

        def respond(self) -> None:
            """Answer a request, unless a fault does."""
            headers = {name.lower(): value for name, value in self.headers.items()}
            target = urlsplit(self.path)
            request = Request(
                server=server,
                method=self.command,
                path=target.path,
                headers=headers,
                query=parse_qs(target.query),
            )
            hub.requests.append(request)
            fault = hub.fault(request)
            has_body = self.command in ("POST", "PUT")
            if fault and fault.kind == "cut" and has_body:
                self.rfile.read(fault.after)
                self.close_connection = True
                return
            request.body = self.receive() if has_body else b""
            if fault and fault.kind == "status":
                self.send(Response(status=fault.status, headers=dict(fault.headers)))
                return
            if fault and fault.kind == "damage":
                request.body = bytes([request.body[0] ^ 1]) + request.body[1:]
            response = answer(hub, request, server=server).part(headers.get("range"))
            if fault and fault.kind == "lose":
                self.close_connection = True
                return
            until = fault.after if fault and fault.kind == "cut" else None
            self.send(response, until=until, pause=fault.seconds if fault else 0.0)

        def receive(self) -> bytes:
            """Return the body."""
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def send(self, response: Response, *, until: int | None = None, pause: float = 0.0) -> None:
            """Send a response, with a pause in its middle; end it after `until` bytes, if given."""
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.body)))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if self.command != "HEAD":
                body = response.body[:until]
                if pause:
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    time.sleep(pause)
                    body = body[len(body) // 2 :]
                with suppress(ConnectionError):  # the client may have waited long enough
                    self.wfile.write(body)
                    self.wfile.flush()
            self.close_connection |= until is not None

        do_GET = do_HEAD = do_POST = do_PUT = respond

    return Handler
