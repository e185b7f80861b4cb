"""Compile a stranger's grammar in another process before it is compiled in this one.

llguidance's own limits do not hold for all grammars: one of 100 characters kept it busy for over a
minute, others overflow its stack. The process is kept, with its vocabulary; each grammar has a fork
of it to itself. Grammars that take longer than most queue up a second time, apart from the others,
and clients take turns in both queues.
"""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.core.runtime.turns import Turns
from exl2flow.engine.filters.grammar import GrammarFilter, brief
from exl2flow.model import Tokenizer

PROGRAM = Path(__file__).with_name("trial_program.py")
SECONDS = (0.2, 5.0)  # of processor time: for the first try, and for the second
START_SECONDS = 120.0  # for the vocabulary
PATIENCE = 4.0  # seconds that a try may take beyond four times its processor time
MOST_KNOWN, MOST_KEPT = 1024, 32 << 20  # verdicts, and characters of all of them
TOO_MUCH = "it takes more than 5 s or 1 GiB to compile, or it is nested too deeply"
Verdict = dict[str, Any]  # see `trial_program`


class Trial:
    """Tries grammars for one vocabulary; belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        """Take the vocabulary of a model whose logits have a width; nothing starts yet."""
        self._tokenizer, self._ids = tokenizer, max(width, tokenizer.vocab_size)
        self._known, self._kept = OrderedDict[bytes, tuple[Verdict, int]](), 0
        self._turns = [Turns(1) for _ in SECONDS]
        self._threads = ThreadPoolExecutor(len(SECONDS), "exl2flow-trial")
        self._lock, self._is_closed = Lock(), False
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def check(self, given: GrammarFilter, client: str = "") -> tuple[str, ...]:
        """Settle a grammar, and return its warnings.

        Raises:
            ConfigError: it does not compile, or takes too much time, memory or stack.
        """
        source = json.dumps(given.source())
        digest = hashlib.sha256(source.encode()).digest()
        if digest not in self._known:
            await self._learn(digest, source, client)
        self._known.move_to_end(digest)
        verdict, _ = self._known[digest]
        if verdict["wrong"]:
            raise ConfigError(f"a grammar cannot be used: {brief(verdict['wrong'])}")
        given.settle(verdict["grammars"], verdict["warnings"])
        return given.warnings

    def close(self) -> None:
        """End the threads and the process."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._end()

    async def _learn(self, digest: bytes, source: str, client: str) -> None:
        """Keep the verdict on a grammar, which is tried for a short and then for a longer time."""
        verdict, loop = None, asyncio.get_running_loop()
        for turns, seconds in zip(self._turns, SECONDS, strict=True):
            async with turns.of(client):
                if digest in self._known:  # others may have waited for the same one
                    return
                verdict = await loop.run_in_executor(self._threads, self._tried, source, seconds)
            if verdict is not None:
                break
        verdict = verdict or {"wrong": TOO_MUCH}
        size = len(json.dumps(verdict))
        self._known[digest], self._kept = (verdict, size), self._kept + size
        while len(self._known) > 1 and (len(self._known) > MOST_KNOWN or self._kept > MOST_KEPT):
            self._kept -= self._known.popitem(last=False)[1][1]

    def _tried(self, source: str, seconds: float) -> Verdict | None:
        """Return the verdict on a grammar, None if it takes longer."""
        request = f'{{"seconds": {seconds}, "source": {source}}}'
        for _ in range(2):  # the process may have ended meanwhile
            with self._lock:
                control = self._control or self._started()
            began = time.monotonic()
            try:
                pid, _, answer = _asked(control, request, PATIENCE + 4 * seconds).partition(b"\n")
            except TimeoutError as error:
                self._stop(error.args[0], control)
                return None
            if answer:
                return dict(json.loads(answer))
            if pid:
                return {"wrong": TOO_MUCH} if time.monotonic() - began < seconds else None
            self._stop(b"", control)
        return {"wrong": "the process that tries grammars ends at once; try again later"}

    def _started(self) -> socket.socket:
        """Start the process, and return the socket that brings it requests.

        Raises:
            ConfigError: it cannot read the vocabulary, or this is closed.
        """
        if self._is_closed:
            raise ConfigError("a grammar cannot be used: the model is being unloaded")
        self._control, there = socket.socketpair()
        with there:
            command, null = [sys.executable, "-P", str(PROGRAM)], subprocess.DEVNULL
            self._child = subprocess.Popen(
                command, stdin=there.fileno(), stdout=null, stderr=null, start_new_session=True
            )
        backend, eos = self._tokenizer.backend.to_str(), list(self._tokenizer.eos_token_ids)
        vocabulary = json.dumps({"tokenizer": backend, "ids": self._ids, "eos": eos})
        wrong = '"the process that tries grammars does not start"'
        with suppress(TimeoutError):
            wrong = _asked(self._control, vocabulary, START_SECONDS).decode() or wrong
        if wrong != '""':
            self._end()
            raise ConfigError(f"a grammar cannot be used: {json.loads(wrong)}")
        return self._control

    def _stop(self, pid: bytes, control: socket.socket) -> None:
        """End the fork of a grammar that does not answer, or else the process."""
        if pid:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            return
        with self._lock:
            if self._control is control:
                self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its forks, too
            child.wait()


def _asked(control: socket.socket, request: str, seconds: float) -> bytes:
    """Return all that the process answers to a request, by a socket that is sent to it.

    Raises:
        TimeoutError: it does not answer in time; its argument is what came, up to the first line.
    """
    answer, ends = b"", time.monotonic() + seconds
    here, there = socket.socketpair()
    with here, suppress(ConnectionError):
        with there:
            control.settimeout(seconds)
            socket.send_fds(control, [b"."], [there.fileno()])
        try:
            here.settimeout(seconds)
            here.sendall(request.encode())
            here.shutdown(socket.SHUT_WR)
            while True:
                here.settimeout(max(ends - time.monotonic(), 0.001))
                if not (more := here.recv(1 << 16)):
                    break
                answer += more
        except TimeoutError as error:
            with suppress(TimeoutError, BlockingIOError):
                here.settimeout(0)
                answer += here.recv(1 << 10)
            raise TimeoutError(answer.partition(b"\n")[0]) from error
    return answer
