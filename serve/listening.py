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
            shown = host if path else f"http://{host}:{listener.getsockname()[1]}/v1"
            yield listener, shown
        finally:
            if path is not None:
                path.unlink(missing_ok=True)


def _bind(listener: socket.socket, path: Path) -> None:
    """Bind a path, in place of a socket on which nobody listens any more.

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
