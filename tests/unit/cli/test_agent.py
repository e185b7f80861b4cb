"""`exl2flow agent`: a script on PATH in place of the agent, which asks a real server once."""

import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from leftovers import end_with_this_process
from servers import free_port, wait_for
from serving import DEMO, Served, serving
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.cli.work.agents import AGENTS

# Its last arguments are the file for what it was given and got, and its exit code, or `wait`.
AGENT = """#!{python} -IS
import json, os, pathlib, signal, sys, tomllib, urllib.request

*given, out, code = sys.argv[1:]
variables, text = dict(os.environ), "Hello"
chat = {{"messages": [{{"role": "user", "content": text}}], "max_tokens": 2}}
match os.path.basename(sys.argv[0]):
    case "claude":
        url = variables["ANTHROPIC_BASE_URL"] + "/v1/messages"
        key, body = variables["ANTHROPIC_AUTH_TOKEN"], {{"model": given[1], **chat}}
    case "codex":
        config = tomllib.loads("\\n".join(given[1::2]))
        provider = config["model_providers"][config["model_provider"]]
        url, key = provider["base_url"] + "/responses", variables[provider["env_key"]]
        body = {{"model": config["model"], "input": text, "max_output_tokens": 2}}
    case "opencode":
        config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
        provider, model = config["model"].split("/")
        options = config["provider"][provider]["options"]
        url, key = options["baseURL"] + "/chat/completions", options["apiKey"]
        body = {{"model": model, **chat}}
headers = {{"authorization": "Bearer " + key, "content-type": "application/json"}}
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
answer = json.load(opener.open(request))
told = {{"pid": os.getpid(), "given": given, "variables": variables, "answer": answer}}
draft = pathlib.Path(out + ".draft")
draft.write_text(json.dumps(told))
draft.rename(out)
if code == "wait":
    signal.pause()
sys.exit(int(code))
"""
CONTEXT = 2048  # of the demo model


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, with all agents."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        program = folder / agent.program
        program.write_text(AGENT.format(python=sys.executable))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of logs, in other processes and in this one
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--format", "chatml") as server:
        yield server


def port_of(server: Served) -> str:
    return server.url.rpartition(":")[2]


def called(*words: object) -> Result:
    return CliRunner().invoke(app, ["agent", *map(str, words)])


def started(tmp_path: Path, *words: object) -> BaseProcess:
    """Start the command in a process of its own, with a log in the test's folder."""
    end_with_this_process()
    return forked.start(["agent", *map(str, words)], tmp_path / "said", {})


def told_in(out: Path) -> Any:
    """Return what an agent wrote, once it has."""
    wait_for(out.exists, pause=0.01)
    return json.loads(out.read_bytes())


def send(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def is_free(port: int) -> bool:
    """Tell whether nothing has a port any more."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_an_answer_of_a_running_server_which_goes_on(
    name: str, path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the vendor")
    monkeypatch.setenv("NO_PROXY", "example.com")
    out = path / "out"

    result = called(name, DEMO, "--port", port_of(served), "--tokens", 512, "--", "-p", out, 7)

    assert result.exit_code == 7
    assert f"using the server that runs at {served.url}; --tokens 512 has no" in result.stderr
    assert f"warning: the context has {CONTEXT} tokens" in result.stderr
    told = told_in(out)
    assert told["given"][-1] == "-p"
    assert told["answer"]["model"] == DEMO.name
    assert str(CONTEXT) in json.dumps([told["given"], told["variables"]])
    assert ("ANTHROPIC_API_KEY" in told["variables"]) == (name != "claude")
    assert told["variables"]["no_proxy"] == "example.com,127.0.0.1"
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_server_of_our_own_ends_behind_the_agent(path: Path, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"

    process = started(
        tmp_path, "claude", DEMO, "--port", port, "--format", "chatml", "--", out, "3"
    )
    process.join()

    assert process.exitcode == 3
    assert told_in(out)["variables"]["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert is_free(port)
    [log] = tmp_path.glob("exl2flow-serve-*.log")
    assert f"its log is `{log}`" in (tmp_path / "said").read_text()
    assert f"serving on http://127.0.0.1:{port}/v1" in log.read_text()


@pytest.mark.slow
def test_a_server_of_our_own_ends_if_the_command_is_killed(path: Path, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"
    words = ("codex", DEMO, "--port", port, "--format", "chatml", "--", out, "wait")
    process = started(tmp_path, *words)
    agent = told_in(out)["pid"]

    send(process, signal.SIGKILL)
    process.join()

    wait_for(lambda: is_free(port), pause=0.01)
    os.kill(agent, signal.SIGKILL)  # which learns nothing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_agent_and_no_server_that_was_there(
    number: signal.Signals, path: Path, tmp_path: Path, served: Served
) -> None:
    out = tmp_path / "out"
    process = started(tmp_path, "claude", DEMO, "--port", port_of(served), "--", out, "wait")
    agent = told_in(out)["pid"]

    send(process, number)
    if number == signal.SIGINT:  # a terminal sends it to both
        os.kill(agent, number)
    process.join()

    assert process.exitcode == 128 + number
    assert not Path(f"/proc/{agent}").exists()
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_ctrl_c_while_the_server_starts_ends_it(path: Path, tmp_path: Path) -> None:
    port = free_port()
    process = started(tmp_path, "claude", DEMO, "--port", port, "--", "nowhere", "0")
    wait_for(lambda: "its log is" in (tmp_path / "said").read_text(), pause=0.01)

    send(process, signal.SIGINT)
    process.join()

    assert process.exitcode == 130
    assert is_free(port)


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(path: Path, tmp_path: Path) -> None:
    result = called("claude", tmp_path, "--port", free_port())

    assert result.exit_code == 1
    assert f"error: `{tmp_path / 'config.json'}` does not exist; give the folder" in result.stderr
    assert f"the server's log is `{tmp_path}/exl2flow-serve-" in result.stderr


def test_an_agent_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    result = called("codex", tmp_path)

    assert result.exit_code == 1
    assert "`codex` is not installed; install it: `npm install -g @openai/codex`" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("claud", DEMO), "no agent `claud`; near are `claude`"),
        (("claude", DEMO, "--tokens", "0"), "`--tokens` is 0: "),
        (("claude", DEMO, "--port", "0"), "invalid value for `--port`"),
    ],
)
def test_wrong_usage_is_refused(words: tuple[object, ...], told: str) -> None:
    result = called(*words)

    assert result.exit_code == 2
    assert told in result.stderr


def test_a_server_of_another_model_is_refused(path: Path, tmp_path: Path, served: Served) -> None:
    result = called("claude", tmp_path, "--port", port_of(served))

    assert result.exit_code == 1
    told = f"the server at {served.url} has `{DEMO.name}`, not `{tmp_path.name}`; end it, or choose"
    assert told in result.stderr


class _Other(BaseHTTPRequestHandler):
    """A program that knows no models, and another that wants a key."""

    def do_GET(self) -> None:
        self.send_error(self.server.code)  # type: ignore[attr-defined]  # set below

    def log_message(self, *_: object) -> None:
        """See the base class."""


@pytest.mark.parametrize(
    ("code", "told"), [(404, "is not a model server; end it"), (401, "refuses the key; set")]
)
def test_other_programs_at_the_port_are_refused(code: int, told: str, path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), _Other) as other:
        other.code = code  # type: ignore[attr-defined]  # read above
        threading.Thread(target=other.handle_request).start()
        result = called("claude", DEMO, "--port", other.server_port)

    assert result.exit_code == 1
    assert told in result.stderr
