"""The page that the server answers at `/`: in what it may do, and in a real browser."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import Browser, browser, program
from serving import Served, serving

KEY = {"EXL2FLOW_API_KEY": "a-key"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--format", "chatml", "--max-tokens", "512", env=KEY) as server:
        yield server


@pytest.fixture
def seen(served: Served) -> Iterator[Browser]:
    found = program()
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with browser(found, served.url) as opened:
        yield opened


def test_the_page_may_run_its_own_script_and_ask_its_own_server_only(served: Served) -> None:
    answer = httpx.get(served.url)

    assert answer.status_code == 200
    allowed = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    for kind in ("script", "style"):
        [own] = re.findall(f"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digest = b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert allowed[f"{kind}-src"] == f"'sha256-{digest}'"
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert not re.search(r"https?://|innerHTML|eval\(|\son\w+=", answer.text)


def test_no_page_where_none_is_wanted() -> None:
    with serving("--no-page") as server:
        assert httpx.get(server.url).status_code in (404, 405)
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.slow
def test_a_conversation_in_a_browser(seen: Browser) -> None:
    page = seen.open("/", "this server asks for a key")
    page.locator("#key").fill("a-key")
    page.locator("#key").blur()
    page.get_by_text("ready").wait_for()
    page.locator("#temperature[placeholder='1']").wait_for()
    page.locator("#most[placeholder='all that fit']").wait_for()
    bodies = list[dict[str, Any]]()
    page.on("request", lambda request: bodies.append(request.post_data_json or {}))
    page.locator("#most").fill("24")
    page.locator("#text").fill("Where do <b>horses</b> live?")
    page.locator("#text").press("Enter")

    page.get_by_role("button", name="Send").wait_for()
    answer = page.locator("article.assistant")
    answer.wait_for()
    page.wait_for_function("document.querySelector('article.assistant').textContent.length > 20")

    page.get_by_text("tokens/s").wait_for()
    assert page.locator("article.user").inner_text() == "Where do <b>horses</b> live?"
    assert page.locator("article b").count() == 0
    assert page.locator("article.error").count() == 0
    [body] = [body for body in bodies if "messages" in body]
    assert {*body} == {"messages", "stream", "stream_options", "max_tokens"}
    page.locator("#most").fill("100000")
    page.locator("#text").fill("Go on.")
    page.locator("#text").press("Enter")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("article").count() == 0
    assert not [problem for problem in seen.problems if "401" not in problem]
