"""Readers of what a server takes from others: bodies of requests, keys, pages on a disk."""

import json
import os
import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import bodies
from mutations import changed_bytes, changed_json
from pydantic import ValidationError
from reader import Reader
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.serving import ServeOptions
from exl2flow.engine.cache.page_files import PageFiles
from exl2flow.engine.cache.prefix_tree import FullPage
from exl2flow.engine.chat import all_formats
from exl2flow.inference import Generator, load_model
from exl2flow.serve.answers.answer import AnswerPlan
from exl2flow.serve.answers.fields import Body, ChatBody, CompletionBody
from exl2flow.serve.apis import agents, chats, completions
from exl2flow.serve.apis.messages import MessagesBody
from exl2flow.serve.apis.responses import ResponsesBody
from exl2flow.serve.apis.tabby import LlamaBody
from exl2flow.serve.hosts.keys import read_keys
from exl2flow.serve.hosts.model_host import ModelHost

CONTEXT = 8192
BODIES_EACH = 12  # whole ones of each endpoint
KINDS: dict[str, tuple[type[Body], Callable[[Any, ModelHost], AnswerPlan]]] = {
    "/v1/chat/completions": (ChatBody, chats.plan_of),
    "/v1/completions": (CompletionBody, completions.plan_of),
    "/v1/messages": (MessagesBody, agents.plan_of),
    "/v1/responses": (ResponsesBody, agents.plan_of),
    "/completion": (LlamaBody, completions.plan_of),
}


class Refused(Exl2FlowError):
    """The server answers 400 or 422."""


def behind_the_path(rng: random.Random, data: bytes) -> bytes:
    """Return a request with another body."""
    path, _, body = data.partition(b"\n")
    return path + b"\n" + rng.choice((changed_json, changed_json, changed_bytes))(rng, body)


class RequestBody(Reader):
    """A line with the path, and a body: read, and planned as texts for the generator."""

    file = "request"
    changes = (behind_the_path,)

    def prepare(self) -> list[bytes]:
        model = load_model(
            make_tiny("llama", self.folder / "model", max_position_embeddings=CONTEXT), device="cpu"
        )
        options = ServeOptions(slots=2, tool_grammar="off")
        fmt = all_formats()["chatml"]
        self.generator = Generator(model, slots=2, tokens=CONTEXT)
        self.host = ModelHost(model, lambda: self.generator, options, fmt=fmt, defaults={})
        self.host.has_grammars = True  # which `start` would find; calls may be forced
        return [
            f"{path}\n{json.dumps(self._whole(path, number))}".encode()
            for path in KINDS
            for number in range(BODIES_EACH)
        ]

    def _whole(self, path: str, number: int) -> dict[str, Any]:
        rng = random.Random(f"{path}/{number}")
        body = {**bodies.BODIES[path](rng), bodies.ANSWERED[path]: 8, "model": self.host.name}
        samplers = {name: draw(rng) for name, draw in bodies.SAMPLERS.items()}
        return {**body, **samplers, "logit_bias": {"7": -1.0}}

    def use(self) -> None:
        path, _, data = self.path.read_bytes().partition(b"\n")
        kind, plan_of = KINDS[path.decode()]
        try:
            plan = plan_of(kind.model_validate(json.loads(data)), self.host)
        except (ValidationError, ValueError, RecursionError) as error:
            if not isinstance(error, Exl2FlowError):
                raise Refused(repr(error)) from error
            raise
        assert all(0 <= token < VOCAB_SIZE for prompt in plan.prompts for token in prompt)
        for request in plan.requests:
            self.generator.prepare(request)


class KeyFile(Reader):
    """The file of keys."""

    file = "keys.toml"

    def prepare(self) -> list[bytes]:
        rows = (
            '[[key]]\nname = "a"\nkey = "sk-plain"\nadmin = true\n',
            f'[[key]]\nname = "b"\nsha256 = "{"0f" * 32}"\nrunning = 2\nwaiting = 3\n',
        )
        return ["\n".join(rows).encode(), rows[0].encode()]

    def use(self) -> None:
        os.chmod(self.path, 0o600)
        keys = read_keys(self.path)
        assert len({key.name for key in keys}) == len({key.digest for key in keys}) == len(keys)


class PageFile(Reader):
    """A page of the prefix cache on a disk: nothing but what was written is taken."""

    file = "page"

    def prepare(self) -> list[bytes]:
        content = bytes(range(256)) * 4
        key = blake2b(content, digest_size=16).digest()
        self.page = FullPage(key=key, before=b"", content=content)
        self.files = PageFiles(self.folder / "pages", "n" * 32, size=1 << 20)
        self.data = random.Random(0).randbytes(4096)
        self.files.write(self.page, memoryview(self.data))
        [self.stored] = (self.folder / "pages").rglob("*.page")
        return [self.stored.read_bytes()]

    def use(self) -> None:
        data, out = self.path.read_bytes(), bytearray(len(self.data))
        self.stored.write_bytes(data)
        is_read = self.files.read(self.page, memoryview(out))
        assert is_read == (data == self.seeds[0]) == self.stored.exists()
        assert not is_read or out == self.data
