"""Headless Chromium, from Debian's package `chromium`, that reaches this machine only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser as Chromium
from playwright.sync_api import ConsoleMessage, Page, Route, ViewportSize, sync_playwright

# What Prefect's pages complain of without any of ours: pictures that it does not have, and that
# they may not ask an analytics service
THEIR_OWN = ("/ico/undefined.svg", "/completed.svg")
THEIR_WORDS = ("ERR_BLOCKED_BY_CLIENT", "amplitude.com")
SIZE = (1280, 900)  # of the window, in pixels


def program() -> str | None:
    """Return Chromium's path, installing it if that can be done."""
    if not shutil.which("chromium") and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
        subprocess.run(install, check=False, stdout=subprocess.DEVNULL)
    return shutil.which("chromium")


@dataclass(slots=True)
class Browser:
    """One page of the UI at `url`.

    `problems` is what its pages complained of so far, `asked` which foreign addresses they asked.
    """

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, path: str, *texts: str) -> Page:
        """Go to a page of the UI and return it when all the texts are to be seen on it."""
        self.page.goto(f"{self.url}{path}")
        for text in texts:
            self.page.get_by_text(text).filter(visible=True).first.wait_for()
        return self.page

    def picture_sizes(self) -> list[tuple[int, int]]:
        """Return width and height in pixels of the pictures on the page; 0 if one is broken."""
        self.page.wait_for_function("[...document.images].every(picture => picture.complete)")
        sizes = "[...document.images].map(p => [p.naturalWidth, p.naturalHeight])"
        return [(int(width), int(height)) for width, height in self.page.evaluate(sizes)]


@contextmanager
def running(program: str) -> Iterator[Chromium]:
    """Run Chromium without a window."""
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=flags)
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def window(
    chromium: Chromium, url: str, *, size: tuple[int, int] = SIZE, is_dark: bool = False
) -> Iterator[Browser]:
    """Open a window for a UI that shares nothing with others."""
    scheme: Literal["dark", "light"] = "dark" if is_dark else "light"
    viewport = ViewportSize(width=size[0], height=size[1])
    context = chromium.new_context(viewport=viewport, color_scheme=scheme)
    opened = Browser(context.new_page(), url)
    context.route(_is_foreign, lambda route: _refuse(opened, route))
    opened.page.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.page.on("console", lambda message: _note(opened, message))
    try:
        yield opened
    finally:
        context.close()


@contextmanager
def browser(program: str, url: str, *, size: tuple[int, int] = SIZE) -> Iterator[Browser]:
    """Run a browser for a UI."""
    with running(program) as chromium, window(chromium, url, size=size) as opened:
        yield opened


def _is_foreign(address: str) -> bool:
    return urlsplit(address).hostname != "127.0.0.1"


def _refuse(opened: Browser, route: Route) -> None:
    """Let nothing of the internet be asked for; what a page holds itself is not."""
    if route.request.url.startswith(("data:", "blob:")):
        route.continue_()
    else:
        opened.asked.append(route.request.url)
        route.abort("blockedbyclient")


def _note(opened: Browser, message: ConsoleMessage) -> None:
    """Note errors, but neither those of pages without ours nor those of refused addresses."""
    place = message.location.get("url", "")
    is_theirs = place.endswith(THEIR_OWN) or any(word in message.text for word in THEIR_WORDS)
    if message.type == "error" and not is_theirs:
        opened.problems.append(f"{message.text} ({place})")
