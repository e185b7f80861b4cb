"""Compile a stranger's grammar in another process before it is compiled in this one.

llguidance's own limits do not hold for all grammars: one of 100 characters kept it busy for over a
minute. The process is kept, with its vocabulary, until a grammar ends it; a thread of its
own waits for it, so other requests are not held up.
"""

import asyncio
import hashlib
import json
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from exl2flow.core.errors import ConfigError
from exl2flow.inference.filters.grammar import GrammarFilter
from exl2flow.model import Tokenizer

PROGRAM = Path(__file__).with_name("trial_program.py")
MOST_KNOWN = 1024  # verdicts


class Trial:
    """Tries grammars for one vocabulary; belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        """Take the vocabulary of a model whose logits have a width; nothing starts yet."""
        self._tokenizer, self._ids = tokenizer, max(width, tokenizer.vocab_size)
        self._known = OrderedDict[bytes, str]()  # digest → what is wrong, if anything
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "exl2flow-trial")

    async def check(self, given: GrammarFilter) -> None:
        """Raise `ConfigError` if a grammar does not compile, or takes too much time or memory."""
        rules = given.rules("")
        digest = hashlib.sha256(rules.encode()).digest()
        if digest not in self._known:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._learn, digest, rules)
        self._known.move_to_end(digest)
        wrong = self._known[digest]
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        if wrong:
            raise ConfigError(f"a grammar cannot be used: {' '.join(wrong.split())}")

    def close(self) -> None:
        """End the thread and the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(BrokenPipeError), child:
                pass

    def _learn(self, digest: bytes, rules: str) -> None:
        if digest not in self._known:  # others may have waited for the same one
            self._known[digest] = self._tried(rules)

    def _tried(self, rules: str) -> str:
        lines = [rules]
        if self._child is None:
            command, pipe = [sys.executable, "-P", str(PROGRAM)], subprocess.PIPE
            self._child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            )
            backend, eos = self._tokenizer.backend.to_str(), list(self._tokenizer.eos_token_ids)
            lines.insert(0, json.dumps({"tokenizer": backend, "ids": self._ids, "eos": eos}))
        child, answer = self._child, b""
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write("".join(f"{line}\n" for line in lines).encode())
            child.stdin.flush()
            answer = child.stdout.readline()
        if not answer.endswith(b"\n"):
            self._end()
            return "it takes more than 5 s or 1 GiB to compile"
        return str(json.loads(answer))
