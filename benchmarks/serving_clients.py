"""Clients of `serving.py`, a process of their own: groups of requests over bare connections.

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

LARGEST_LINE = 16 << 20  # bytes


class Answer:
    """What came back for one request: its status, and lines of events with their times."""

    def __init__(self) -> None:
        self.status, self.sent, self.ended = 0, 0.0, False
        self.lines = list[tuple[float, bytes]]()

    def row(self) -> dict[str, Any]:
        """Return the times of text, and the counts of tokens, as JSON can hold them."""
        times, usage, ends = list[float](), dict[str, Any](), 0
        for when, line in self.lines:
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


async def ask(port: int, asked: dict[str, Any], answer: Answer) -> None:
    """Send a request on a connection of its own, and note what comes until the end."""
    body = json.dumps(asked["body"]).encode()
    head = (
        f"POST {asked['path']} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LARGEST_LINE)
    try:
        answer.sent = time.perf_counter()
        writer.write(head.encode() + body)
        while line := await reader.readline():
            answer.status = answer.status or int(line.split()[1])
            answer.lines.append((time.perf_counter(), line))
        answer.ended = True
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def ask_all(port: int, group: list[dict[str, Any]], answers: list[Answer]) -> None:
    """Send the requests of a group one after the other; some leave early."""
    for asked in group:
        await asyncio.sleep(asked.get("pause", 0.0))
        answers.append(Answer())
        with suppress(TimeoutError):
            await asyncio.wait_for(ask(port, asked, answers[-1]), asked.get("leave"))


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
