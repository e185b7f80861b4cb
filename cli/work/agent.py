"""Run a coding agent on a model: find or start its server, start the agent, end the server."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from exl2flow.cli.output.console import say
from exl2flow.cli.work.agents import AGENTS, NO_KEY, Agent, Endpoint, Launch
from exl2flow.cli.work.own_server import HOST, end, serving
from exl2flow.core import words
from exl2flow.core.errors import AgentFailed, ConfigError
from exl2flow.core.model_name import name_of
from exl2flow.core.options.serving import KEY_VARIABLE

ANSWER_SECONDS = 10.0
SHORT_CONTEXT = 32_768  # tokens; prompts of agents begin with 10,000 to 30,000


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
        AgentFailed: the agent is not installed, or no server serves the model.
    """
    if (agent := AGENTS.get(name)) is None:
        raise ConfigError(f"no agent `{name}`{words.nearest(name, AGENTS)}")
    if (program := shutil.which(agent.program)) is None:
        raise AgentFailed(f"`{agent.program}` is not installed; install it: `{agent.install}`")
    if (found := _endpoint(model, port)) is not None:
        ignored = f"; {' '.join(options)} has no effect" if options else ""
        say(f"using the server that runs at {found.url}{ignored}", style="dim")
        return _run(agent, program, found, arguments)
    with serving(model, port, options):
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
        raise AgentFailed(f"the program at {url} is not a model server; {otherwise}") from error
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        why = f"the program at {url} does not answer: {words.cause(error)}"
        raise AgentFailed(f"{why}; {otherwise}") from error
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise AgentFailed(f"the program at {url} is not a model server; {otherwise}") from error
    name = name_of(model.expanduser())
    if name not in rows:
        served = ", ".join(f"`{one}`" for one in rows)
        raise AgentFailed(f"the server at {url} has {served}, not `{name}`; {otherwise}")
    if (context := rows[name]) is None:
        raise AgentFailed(f"the server at {url} has not loaded `{name}`; load it, or {otherwise}")
    return Endpoint(url=url, key=key, model=name, context=context)


def _models(url: str, key: str) -> Mapping[str, int | None]:
    """Return the model names of a server → context length, None for a model that is not loaded."""
    request = Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as answer:
        listed: list[dict[str, Any]] = json.load(answer)["data"]
        return {row["id"]: row.get("max_model_len") for row in listed}


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
            end(process)
        signal.signal(signal.SIGINT, before)


def _environment(launch: Launch) -> dict[str, str]:
    """Return the environment of an agent, which reaches the server without a proxy."""
    others = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    direct = f"{others},{HOST}" if others else HOST
    variables = {**os.environ, "NO_PROXY": direct, "no_proxy": direct, **launch.environment}
    return {name: value for name, value in variables.items() if value is not None}
