"""The page that the server answers at `/`: in what it may do, and in a real browser."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import Browser, program, running, window
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import expect
from serving import Served, serving
from sources import ROOT

PAGES = ROOT / "serve" / "http" / "pages"
OWN = ("index.html", "page.css", "markdown.js", "store.js", "page.js")
LIBRARY = "markdown-it.umd.min.js"
CONTRAST = (ROOT / "tests" / "support" / "contrast.js").read_text(encoding="utf-8")
KEY = {"EXL2FLOW_API_KEY": "a-key"}
PHONE, DESKTOP = (390, 844), (1280, 900)
ANSWER = """# Ferries

A **ferry**, [a list](https://example.org/a), [one](javascript:alert(1)), [two](data:text/html,x),
![picture](https://example.org/p.png) <img src=x onerror="document.title='run'"> `code`

<script>document.title = "run"</script>

```python
def ferries() -> None:
    return "<b>" + "a long line" * 40
```

| harbour | ferries |
|---|--:|
| Wenlow | 12 |
"""
KEPT = {
    "id": "kept1",
    "title": "Which ferries?",
    "changed": 1,
    "messages": [
        {"role": "user", "content": "Which ferries?"},
        {"role": "assistant", "content": ANSWER, "reasoning": "There are two."},
    ],
}
KEEP = f"localStorage.setItem('exl2flow/conversation/kept1', {json.dumps(json.dumps(KEPT))});"
WITH_KEY = "sessionStorage.setItem('key', 'a-key');"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--format", "chatml", "--max-tokens", "512", env=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    found = program()
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with running(found) as started:
        yield started


@pytest.fixture
def seen(served: Served, chromium: Chromium, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """A window; its parameters are its size and whether it is dark."""
    size, is_dark = getattr(request, "param", (DESKTOP, False))
    with window(chromium, served.url, size=size, is_dark=is_dark) as opened:
        yield opened


def test_the_page_may_run_its_own_scripts_and_ask_its_own_server_only(served: Served) -> None:
    answer = httpx.get(served.url)

    assert answer.status_code == 200
    allowed = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    for kind, count in (("script", 4), ("style", 1)):
        own = re.findall(f"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digests = [b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in own]
        assert len(own) == count
        assert allowed[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert allowed["require-trusted-types-for"] == "'script'"
    assert " src=" not in answer.text.partition("<script>")[0]
    for name in OWN:
        text = (PAGES / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|innerHTML|eval\(|\son\w+=", text), name


def test_the_library_is_the_one_that_the_dependencies_name() -> None:
    table = (ROOT / "docs" / "reference" / "dependencies.md").read_text(encoding="utf-8")
    [digest] = re.findall(rf"`{re.escape(LIBRARY)}`.*`([0-9a-f]{{64}})`", table)

    found = (PAGES / LIBRARY).read_bytes()

    assert hashlib.sha256(found).hexdigest() == digest
    assert not re.search(rb"</?script", found)  # it becomes part of the page
    assert "Permission is hereby granted" in (PAGES / "markdown-it.LICENSE").read_text("utf-8")


def test_no_page_where_none_is_wanted() -> None:
    with serving("--no-page") as server:
        assert httpx.get(server.url).status_code in (404, 405)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_answer_is_markdown_and_runs_nothing(seen: Browser) -> None:
    no_clipboard = "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
    seen.page.add_init_script(KEEP + WITH_KEY + no_clipboard)  # as on a phone, without TLS

    page = seen.open("/#kept1", "Wenlow")

    answer = page.get_by_role("article", name="Model")
    [link, picture] = answer.locator("a").all()
    assert link.get_attribute("href") == "https://example.org/a"
    assert "noopener" in (link.get_attribute("rel") or "")
    assert picture.inner_text() == "picture"
    assert answer.locator("img, script, b").count() == 0
    for text in ("[one](javascript:alert(1))", "<img src=x", "<script>document"):
        assert text in answer.inner_text()
    assert answer.get_by_role("heading", level=3).inner_text() == "Ferries"
    assert answer.get_by_role("cell").all_inner_texts() == ["Wenlow", "12"]
    assert not answer.get_by_text("There are two.").is_visible()
    answer.get_by_text("Thoughts").click()
    assert answer.get_by_text("There are two.").is_visible()

    answer.get_by_role("button", name="Copy").click()
    answer.get_by_role("button", name="Copied").wait_for()
    page.locator("#text").press("Control+V")

    assert (
        page.locator("#text").input_value().startswith('def ferries() -> None:\n    return "<b>"')
    )
    assert page.title() == "exl2flow"
    assert (seen.problems, seen.asked) == ([], [])


@pytest.mark.parametrize(
    "seen", [(size, dark) for size in (PHONE, DESKTOP) for dark in (False, True)], indirect=True
)
def test_everything_fits_the_window_and_can_be_read(seen: Browser) -> None:
    seen.page.add_init_script(KEEP + WITH_KEY)
    page = seen.open("/#kept1", "Wenlow")
    size = page.viewport_size
    assert size is not None
    panels = ["Conversations", "Settings"] if size["width"] == PHONE[0] else []
    page.get_by_text("Thoughts").click()
    page.locator("#warnings", has_text="template").wait_for(state="attached")
    page.locator("#temperature").evaluate("field => { field.value = '-1'; }")
    page.locator("#text").fill("Go on.")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("alert").wait_for()

    readings = [page.evaluate(CONTRAST)]
    for name in panels:
        page.get_by_role("button", name=name).click()
        readings.append(page.evaluate(CONTRAST))
        page.get_by_role("button", name="Close").click()

    assert [low for reading in readings for low in reading["low"]] == []
    assert sum(reading["count"] for reading in readings) > 30
    talk, form = page.locator("#talk").bounding_box(), page.locator("#form").bounding_box()
    assert talk is not None
    assert form is not None
    assert form["y"] + form["height"] == size["height"]
    assert talk["height"] > 0.75 * size["height"]
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    assert page.locator("#key").is_visible() == (not panels)
    assert page.locator("#text").input_value() == "Go on."


@pytest.mark.parametrize("seen", [(PHONE, True)], indirect=True)
def test_a_refused_message_returns_and_the_error_leads_to_the_key(seen: Browser) -> None:
    page = seen.open("/", "key needed")
    page.locator("#text").fill("Where do horses live?")
    page.get_by_role("button", name="Send").click()

    expect(page.locator("#text")).to_have_value("Where do horses live?")
    assert page.get_by_role("article", name="You").count() == 0
    assert "in the field “Key”" in page.get_by_role("alert").inner_text()
    page.get_by_role("button", name="Enter the key").click()
    page.keyboard.type("a-key")
    page.keyboard.press("Enter")
    page.get_by_text("ready").wait_for()

    assert page.get_by_role("alert").count() == 0
    assert page.locator("#talks li").count() == 0


def test_conversations_are_kept_and_answered_anew(seen: Browser) -> None:
    seen.page.add_init_script(WITH_KEY)
    page = seen.open("/", "ready")
    bodies = list[dict[str, Any]]()
    page.on("request", lambda request: bodies.append(request.post_data_json or {}))
    page.locator("#temperature[placeholder='1']").wait_for()
    page.locator("#most[placeholder='all that fit']").wait_for()
    page.locator("#most").fill("16")
    page.locator("#text").fill("Where do <b>horses</b> live?")
    page.locator("#text").press("Enter")
    page.locator("#said", has_text="complete").wait_for(state="attached")
    page.get_by_text("tokens/s").wait_for()
    first = page.get_by_role("article", name="Model").inner_text()
    page.reload()
    page.get_by_role("button", name="Retry").wait_for()

    assert page.get_by_role("article", name="Model").inner_text() == first
    assert (
        page.get_by_role("article", name="You")
        .inner_text()
        .endswith("Where do <b>horses</b> live?")
    )
    assert page.locator("#most").input_value() == "16"

    page.get_by_role("button", name="Retry").click()
    page.locator("#said", has_text="complete").wait_for(state="attached")

    asked = [body for body in bodies if "messages" in body]
    assert [{*body} for body in asked] == [
        {"messages", "stream", "stream_options", "max_tokens"}
    ] * 2
    assert asked[0] == asked[1]
    assert page.get_by_role("article").count() == 2

    page.get_by_role("button", name="New conversation").click()
    assert page.get_by_role("article").count() == 0
    page.get_by_role("link", name="Where do").click()
    page.get_by_role("article", name="Model").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Where do").click()

    assert page.locator("#talks li, article").count() == 0
    assert page.evaluate("localStorage.length") == 0
    assert (seen.problems, seen.asked) == ([], [])


def test_a_stopped_answer_is_kept(seen: Browser) -> None:
    seen.page.add_init_script(WITH_KEY)
    page = seen.open("/", "ready")
    page.locator("#text").fill("Tell me all.")
    page.locator("#text").press("Enter")
    page.locator("article.assistant .words > *").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()

    page.get_by_role("button", name="Retry").wait_for()
    shown = page.locator("article.assistant .words").inner_text()
    [kept] = page.evaluate("Object.values(localStorage).map(JSON.parse)")
    assert shown
    assert shown.split() == kept["messages"][1]["content"].split()
    assert seen.problems == []


def test_a_refused_retry_leaves_the_answer(seen: Browser) -> None:
    seen.page.add_init_script(KEEP + WITH_KEY)
    page = seen.open("/#kept1", "Wenlow")
    page.locator("#temperature").fill("-1")

    page.get_by_role("button", name="Retry").click()
    page.get_by_role("alert").wait_for()

    assert page.get_by_role("cell", name="Wenlow").is_visible()
    assert page.locator("#text").input_value() == ""
