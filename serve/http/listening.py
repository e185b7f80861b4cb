"""The socket of a server: an address and a port, or a path that only its user reaches."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exl2flow.core import words
from exl2flow.core.errors import ConfigError

UNIX = "unix:"  # before a path
OWN = 0o177  # mask of what others may do
EVERYWHERE = (  # the address of all interfaces, and one in another network, for documents only
    ("0.0.0.0", socket.AF_INET, "192.0.2.1"),
    ("::", socket.AF_INET6, "2001:db8::1"),
)


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Yield a bound socket, which takes connections later, and its address for people.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    path = Path(host.removeprefix(UNIX)) if host.startswith(UNIX) else None
    if path is None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # without the protocol, asyncio leaves Nagle's algorithm on, which delays answers by 40 ms
        protocol, where, remedy = socket.IPPROTO_TCP, f"{host}:{port}", "`--port`"
    else:
        family, protocol, where, remedy = socket.AF_UNIX, 0, host, "path"
    with socket.socket(family, socket.SOCK_STREAM, protocol) as listener:
        try:
            if path is None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
            else:
                _bind(listener, path)
        except OSError as error:
            why = f"cannot listen on {where}: {words.cause(error)}"
            raise ConfigError(f"{why}; choose another {remedy}") from error
        try:
            yield listener, host if path else url_of(host, listener.getsockname()[1])
        finally:
            if path is not None:
                path.unlink(missing_ok=True)


def url_of(host: str, port: int) -> str:
    """Return the address of a server for its clients."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def own_address(host: str) -> str | None:
    """Return how others reach this machine if a server listens on all addresses; None: unknown.

    It is the address that packets to other networks would have; none is sent.
    """
    for everywhere, family, other in EVERYWHERE:
        if host == everywhere:
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((other, 9))
                return str(probe.getsockname()[0])
    return None


def _bind(listener: socket.socket, path: Path) -> None:
    """Bind a path, instead of a socket on which nobody listens any more.

    Clients wait from now on: a second server must find that somebody listens.
    """
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as other:
        if stat.S_ISSOCK(path.stat().st_mode):
            other.setblocking(False)
            try:
                other.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
    mask = os.umask(OWN)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen()
