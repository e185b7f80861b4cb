"""Run a coding agent on a model: find or start its server, start the agent, end the server."""

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from exl2flow.cli.output.console import say
from exl2flow.cli.work.agents import AGENTS, NO_KEY, Agent, Endpoint, Launch
from exl2flow.core import words
from exl2flow.core.errors import AgentFailed, ConfigError
from exl2flow.core.model_name import name_of
from exl2flow.core.options.serving import KEY_VARIABLE

HOST = "127.0.0.1"
SERVER = "exl2flow.cli.work.agent_server"
READY = b"READY=1"  # of sd_notify(3)
ANSWER_SECONDS = 10.0
STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
LOG_LINES = 15
SHORT_CONTEXT = 32_768  # tokens; prompts of agents begin with 10,000 to 30,000
ERROR = "error: "


def run_agent(
    name: str, model: Path, arguments: Sequence[str], *, port: int, options: Sequence[str]
) -> int:
    """Run an agent on a model, and return its exit code.

    Args:
        name: of the agent.
        model: the folder.
        arguments: of the agent.
        port: where a server runs or shall run.
        options: words of `exl2flow serve`, for a server that is started here.

    Raises:
        AgentFailed: the agent is not installed, or there is no server for the model.
    """
    if (agent := AGENTS.get(name)) is None:
        raise ConfigError(f"no agent `{name}`{words.nearest(name, AGENTS)}")
    if (program := shutil.which(agent.program)) is None:
        raise AgentFailed(f"`{agent.program}` is not installed; install it: `{agent.install}`")
    if (found := _endpoint(model, port)) is not None:
        ignored = f"; {' '.join(options)} has no effect" if options else ""
        say(f"using the server that runs at {found.url}{ignored}", style="dim")
        return _run(agent, program, found, arguments)
    with _serving(model, port, options):
        if (found := _endpoint(model, port)) is None:
            raise AgentFailed(f"the server at {_url(port)} ended before the agent was started")
        return _run(agent, program, found, arguments)


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"


def _endpoint(model: Path, port: int) -> Endpoint | None:
    """Return the server that runs at a port; None: nothing listens there.

    Raises:
        AgentFailed: it does not serve the model.
    """
    url, key = _url(port), os.environ.get(KEY_VARIABLE) or NO_KEY
    otherwise = "end it, or choose another `--port`"
    try:
        rows = _models(url, key)
    except HTTPError as error:
        if error.code == 401:
            why = f"the server at {url} refuses the key; set `{KEY_VARIABLE}` to one of its keys"
            raise AgentFailed(why) from error
        raise AgentFailed(f"the program at {url} is no server of models; {otherwise}") from error
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        why = f"the program at {url} does not answer: {words.cause(error)}"
        raise AgentFailed(f"{why}; {otherwise}") from error
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise AgentFailed(f"the program at {url} is no server of models; {otherwise}") from error
    name = name_of(model.expanduser())
    if name not in rows:
        served = ", ".join(f"`{one}`" for one in rows)
        raise AgentFailed(f"the server at {url} has {served}, not `{name}`; {otherwise}")
    if (context := rows[name]) is None:
        raise AgentFailed(f"the server at {url} has not loaded `{name}`; load it, or {otherwise}")
    return Endpoint(url=url, key=key, model=name, context=context)


def _models(url: str, key: str) -> Mapping[str, int | None]:
    """Return the names that a server knows, with the context of those that are loaded."""
    request = Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as answer:
        listed: list[dict[str, Any]] = json.load(answer)["data"]
        return {row["id"]: row.get("max_model_len") for row in listed}


@contextmanager
def _serving(model: Path, port: int, options: Sequence[str]) -> Iterator[None]:
    """Run a server of our own during the block, which begins when it is ready.

    It has a session of its own, so that Ctrl-C is the agent's alone.
    """
    address = ("--host", HOST, "--port", str(port), "--drain", "0")
    command = [sys.executable, "-P", "-m", SERVER, "serve", str(model), *address, *options]
    with (
        tempfile.NamedTemporaryFile(prefix="exl2flow-serve-", suffix=".log", delete=False) as log,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices,
    ):
        notices.bind("")  # Linux chooses a name, which begins with a zero byte
        name = notices.getsockname().decode().replace("\0", "@", 1)
        say(f"starting a server for `{model}`; its log is `{log.name}`", style="dim")
        process = subprocess.Popen(
            command,
            env=os.environ | {"NOTIFY_SOCKET": name},
            stdin=subprocess.PIPE,  # ends when this process does
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, notices, Path(log.name))
            notices.close()
            yield
            if process.poll() is not None:
                say(f"warning: the server has ended; its log is `{log.name}`", style="yellow")
        finally:
            _end(process)


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", notices: socket.socket, log: Path
) -> None:
    """Return when the server says so.

    Raises:
        AgentFailed: it ended instead, with what it said.
    """
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as events:
            events.register(ended, selectors.EVENT_READ)
            events.register(notices, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in events.select()}
                if notices in ready and READY in notices.recv(4096).split(b"\n"):
                    return
                if ended in ready:
                    raise AgentFailed(f"{_reason(log)}; the server's log is `{log}`")
    finally:
        os.close(ended)


def _reason(log: Path) -> str:
    """Return why a server ended: its error, else its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    _, mark, error = text.rpartition(f"\n{ERROR}" if f"\n{ERROR}" in text else ERROR)
    return error.strip() if mark else "\n".join(text.splitlines()[-LOG_LINES:]).strip()


def _run(agent: Agent, program: str, at: Endpoint, arguments: Sequence[str]) -> int:
    """Run an agent to its end; a signal that ended it counts as in a shell: 128 and its number.

    Ctrl-C is for the agent, which gets it from the terminal. SIGTERM raises, and ends it.
    """
    if at.context < SHORT_CONTEXT:
        why = f"the context has {at.context} tokens, which agents may fill before they begin"
        say(f"warning: {why}; use a model with more, or raise `--max-tokens`", style="yellow")
    launch = agent.launch(at)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # `SIG_IGN` would be inherited
    process = None
    try:
        process = subprocess.Popen(
            [program, *launch.arguments, *arguments], env=_environment(launch)
        )
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        if process is not None:
            _end(process)
        signal.signal(signal.SIGINT, before)


def _environment(launch: Launch) -> dict[str, str]:
    """Return the environment of an agent, which reaches the server without a proxy."""
    others = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    direct = f"{others},{HOST}" if others else HOST
    variables = {**os.environ, "NO_PROXY": direct, "no_proxy": direct, **launch.environment}
    return {name: value for name, value in variables.items() if value is not None}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that may have ended: by SIGTERM, then by SIGKILL."""
    process.terminate()
    if process.stdin is not None:
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
        return
    process.kill()
    process.wait()
