"""`exl2flow soak`: a real server through its turns, and what is said of one that fails."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from serving import DEMO, serving
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.work.soak import SoakResult
from exl2flow.cli.work.soak_client import SoakClient

STATUS = {"slots": 2, "max_model_len": 512, "cache_pages": 4}


def test_a_server_gets_turns_of_all_kinds() -> None:
    verdict = SoakResult(device="cpu")
    with serving("--slots", "2", "--tokens", "512") as served:
        client = SoakClient(int(served.url.rpartition(":")[2]))
        for turn, kind in enumerate(client.kinds):
            verdict.note(kind, client.turn(kind, turn))

    assert verdict.has_passed, verdict.failures
    assert verdict.requests == {"conversation": 6, "long prompt": 1, "cancelled": 1}
    assert 0.85 * (512 - 32) <= verdict.longest_prompt <= 512 - 32
    assert all(verdict.first.values())


@pytest.mark.slow
def test_the_command_starts_a_server_and_tells_its_memory() -> None:
    command = ["soak", str(DEMO), "--turns", "5", "--slots", "2", "--tokens", "512", "--json"]
    done = CliRunner().invoke(app, command)

    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["turns"] == 5
    assert found["peak"] > 0
    assert found["planned"] is None


@pytest.fixture
def failing() -> int:
    """The port of a server that tells its status, and refuses each second text."""

    class Refusing(BaseHTTPRequestHandler):
        asked = 0

        def answer(self, status: int, body: object) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            is_status = self.path == "/v1/status"
            self.answer(200, STATUS if is_status else {"data": [{"id": "a"}, {"id": "b"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            type(self).asked += 1
            if self.asked % 2 == 0:
                self.answer(500, {"error": {"message": "out of memory"}})
                return
            usage = {"prompt_tokens": 128}
            event = {"choices": [{"text": " a"}], "usage": usage}
            text = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_refused_text_is_a_failure_with_its_turn(failing: int) -> None:
    client, verdict = SoakClient(failing), SoakResult(device="cpu")

    assert client.kinds[-1] == "swap"
    verdict.note("swap", client.turn("swap", 0))

    assert not verdict.has_passed
    assert verdict.failures == ["turn 1, swap: out of memory"]
    assert verdict.longest_prompt == 128
    assert verdict.requests == {"swap": 2}


def test_the_peak_is_compared_with_the_plan() -> None:
    assert SoakResult(device="cuda", peak=103, planned=100).over_plan == 1.03
    assert SoakResult(device="cpu", peak=103).over_plan is None
