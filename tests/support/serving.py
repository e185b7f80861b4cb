"""A real server of the demo model, in a process of its own, and its clients."""

import asyncio
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import anthropic
import forked
import httpx
import openai
from leftovers import end_with_this_process
from sources import ROOT

DEMO = ROOT / "demo" / "model"
START_SECONDS = 120.0
BEGIN = "serving on "
NO_TLS = ssl.create_default_context()  # made once, which takes longer than a request


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its process, its address, its log."""

    process: BaseProcess
    url: str
    log: Path

    def openai(self, key: str = "none") -> openai.OpenAI:
        """Return the official client, which tries once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        """Return the official client, which tries once."""
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    async def texts(self, prompts: Sequence[Any], key: str = "none", **options: Any) -> list[str]:
        """Return what completes some prompts, all asked for at once by the official client."""
        url = f"{self.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            create = client.completions.create
            asked = [create(model="m", prompt=prompt, **options) for prompt in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    def http(self, **options: Any) -> httpx.Client:
        """Return a client for bare requests."""
        return httpx.Client(base_url=self.url, timeout=60.0, verify=NO_TLS, **options)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send one request."""
        with self.http() as client:
            return client.post(path, json=body, headers=headers)

    @property
    def lines(self) -> list[str]:
        """The log."""
        return self.log.read_text(encoding="utf-8").splitlines()

    def status(self, **headers: str) -> dict[str, Any]:
        """Return what runs."""
        with self.http() as client:
            found: dict[str, Any] = client.get("/v1/status", headers=headers).json()
        return found


@contextmanager
def serving(*flags: str, model: Path = DEMO, env: dict[str, str] | None = None) -> Iterator[Served]:
    """Start `exl2flow serve`, and end it behind the block."""
    end_with_this_process()
    words = ["serve", str(model.absolute()), "--device", "cpu", "--port", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="exl2flow-serve-") as folder:
        log = Path(folder) / "log"
        process = forked.start(words, log, env or {})
        try:
            yield Served(process, _address(process, log), log)
        finally:
            process.kill()
            process.join()


def _address(process: BaseProcess, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.startswith(BEGIN):
                return line.removeprefix(BEGIN).removesuffix("/v1")
        assert process.is_alive(), text
        time.sleep(0.02)
    raise AssertionError("the server does not start")
