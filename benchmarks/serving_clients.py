"""Clients of `serving.py`, a process of their own: groups of requests, a connection each.

Reads a job as JSON from stdin, and writes what each request got to stdout. Nothing is parsed while
the clock runs.
"""

import asyncio
import json
import resource
import sys
import time
from contextlib import suppress
from typing import Any


class Answer:
    """What came back for one request: its status, and pieces of its body with their times."""

    def __init__(self) -> None:
        self.status, self.sent, self.ended = 0, 0.0, False
        self.pieces = list[tuple[float, bytes]]()

    def add(self, piece: bytes) -> None:
        """Note a piece of the body, which holds whole events."""
        self.pieces.append((time.perf_counter(), piece))

    def row(self) -> dict[str, Any]:
        """Return the times of text, and the counts of tokens, as JSON can hold them."""
        times, usage, ends = list[float](), dict[str, Any](), 0
        for when, line in (
            (when, line) for when, piece in self.pieces for line in piece.split(b"\n")
        ):
            if line.startswith(b"{"):  # a plain answer
                value = json.loads(line)
            elif line.startswith(b"data: {"):
                value = json.loads(line[6:])
            else:
                continue
            usage = value.get("usage") or usage
            for choice in value.get("choices", ()):
                delta = choice.get("delta", choice)
                ends += choice.get("finish_reason") is not None
                if delta.get("text") or delta.get("content") or delta.get("tool_calls"):
                    times.append(when - self.sent)
        return {
            "status": self.status,
            "sent": self.sent,
            "times": times,
            "tokens": usage.get("completion_tokens"),
            "prompt": usage.get("prompt_tokens"),
            "ends": ends,
            "ended": self.ended,
        }


class Line:
    """A connection that requests share until one leaves."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, asked: dict[str, Any], answer: Answer) -> None:
        """Send a request, and note what comes until the end of the answer."""
        body = json.dumps(asked["body"]).encode()
        head = (
            f"POST {asked['path']} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        answer.sent = time.perf_counter()
        writer.write(head.encode() + body)
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        answer.status = int(first.split()[1])
        fields = dict(line.split(b": ", 1) for line in rest if line)
        if b"content-length" in fields:
            answer.add(await reader.readexactly(int(fields[b"content-length"])))
        else:
            while size := int(await reader.readline(), 16):
                answer.add((await reader.readexactly(size + 2))[:-2])
            await reader.readline()
        answer.ended = True

    async def close(self) -> None:
        """Leave, whatever is still to come."""
        if self._streams is not None:
            self._streams[1].close()
            with suppress(ConnectionError):
                await self._streams[1].wait_closed()
            self._streams = None


async def ask_all(port: int, group: list[dict[str, Any]], answers: list[Answer]) -> None:
    """Send the requests of a group one after the other; some leave early."""
    line = Line(port)
    try:
        for asked in group:
            await asyncio.sleep(asked.get("pause", 0.0))
            answers.append(Answer())
            try:
                await asyncio.wait_for(line.ask(asked, answers[-1]), asked.get("leave"))
            except TimeoutError:
                await line.close()
    finally:
        await line.close()


async def run(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run all groups at once, until the last one has ended, or all."""
    silent = [await asyncio.open_connection("127.0.0.1", job["port"]) for _ in range(job["silent"])]
    answers: list[list[Answer]] = [[] for _ in job["groups"]]
    tasks = [
        asyncio.create_task(ask_all(job["port"], group, found))
        for group, found in zip(job["groups"], answers, strict=True)
    ]
    await (tasks[-1] if job["ends_with_last"] else asyncio.gather(*tasks))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _, writer in silent:
        writer.close()
    return [[answer.row() for answer in found] for found in answers]


def main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()
