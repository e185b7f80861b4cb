"""The answer of a request, plain or streamed; it ends when its client leaves.

Nothing here rests on the framework's notice of disconnects, which plain handlers never get. The
status of a stream waits for its first text, so what fails before has a status of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from exl2flow.serve.answers.answer import BROKEN, AnswerPlan, RunningAnswer
from exl2flow.serve.answers.fields import HARMLESS, Body
from exl2flow.serve.apis.openai import Dialect
from exl2flow.serve.errors import ApiError, as_api_error, response
from exl2flow.serve.hosts.keys import Key
from exl2flow.serve.hosts.metrics import OTHER, Metrics
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models

MOST_NAMED, LONGEST_NAME, LONGEST_WARNINGS = 20, 40, 500  # in headers
LEFT = 499  # nobody reads it
STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}
B = TypeVar("B", bound=Body)


class AnswerResponse(Response):
    """Generates and sends the answer of one request."""

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        given: B,
        plan: Callable[[B, ModelHost], AnswerPlan],
        dialect: Callable[[RunningAnswer, B, ModelHost], Dialect],
    ) -> None:
        """plan: makes texts of the fields, in a thread. dialect: puts the texts in a form."""
        self.background: BackgroundTask | None = None
        self._models, self._metrics, self._given = models, metrics, given
        self._plan: Callable[[ModelHost], AnswerPlan] = lambda host: plan(given, host)
        self._form: Callable[[RunningAnswer, ModelHost], Dialect] = lambda answer, host: dialect(
            answer, given, host
        )
        self._answer: RunningAnswer | None = None
        self._dialect: Dialect | None = None
        self._is_begun, self._more = False, dict[str, str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        work = asyncio.ensure_future(self._work(scope, receive, send))
        leaving = asyncio.ensure_future(_left(receive))
        code = LEFT
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                code = work.result()
            else:
                self._metrics.add("client_disconnects")
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
            if self._answer is not None:
                await self._answer.ended()
                self._metrics.ended(self._answer, scope["state"], scope["path"], code)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            self._check()
            key: Key = scope["state"]["key"]
            if self._models.options.isolate:
                self._given.cache_salt = f"{key.name}\0{self._given.cache_salt}"
            async with self._models.using(self._given.model) as host:
                await self._generate(host, scope, receive, send)
            return 200
        except Exception as error:
            request_id = scope["state"]["request_id"]
            told = as_api_error(error, request_id, is_input=self._answer is None)
            told = told.renamed(self._given.names)
            self._metrics.add("request_errors", code=str(told.status))
            if self._dialect is not None and self._is_begun:
                await _send(send, self._dialect.failed(told), more=False)
            else:
                await response(told, scope, self._added())(scope, receive, send)
            return told.status

    async def _generate(self, host: ModelHost, scope: Scope, receive: Receive, send: Send) -> None:
        self._answer = answer = await host.begin(lambda: self._plan(host), scope["state"]["key"])
        try:
            self._more["x-exl2flow-seed"] = str(answer.plan.seed)
            self._dialect = dialect = self._form(answer, host)
            if self._given.stream:
                await self._stream(dialect.stream(), send)
            else:
                whole = await dialect.whole()
                await JSONResponse(whole, headers=self._added())(scope, receive, send)
        finally:
            host.end(answer)

    async def _stream(self, pieces: AsyncGenerator[bytes], send: Send) -> None:
        async for piece in pieces:
            if not self._is_begun:
                head = Response(media_type="text/event-stream", headers=STREAM | self._added())
                del head.headers["content-length"]
                self._is_begun, start = True, {"status": 200, "headers": head.raw_headers}
                await send({"type": "http.response.start", **start})
            await _send(send, piece, more=True)
        await _send(send, b"", more=False)

    def _check(self) -> None:
        ignored = sorted(self._given.ignored)
        for field in ignored:
            shown = field if field in HARMLESS else OTHER
            self._metrics.add("ignored_fields", field=shown)
        unknown = [field for field in ignored if field not in HARMLESS]
        if unknown and self._models.options.strict:
            raise ApiError(400, f"`{unknown[0]:.80}` is an unknown field", param=unknown[0][:80])
        plain = [n for n in unknown if n.isascii() and n.replace("_", "").isalnum()]
        if plain:
            names = [field[:LONGEST_NAME] for field in plain[:MOST_NAMED]]
            self._more["x-exl2flow-ignored"] = ", ".join(names)

    def _added(self) -> dict[str, str]:
        if self._answer is None:
            return self._more
        warnings = [*self._answer.warnings]
        warnings += [BROKEN] * any(choice.is_broken for choice in self._answer.choices)
        text = "; ".join(warnings).encode("ascii", "replace").decode()[:LONGEST_WARNINGS]
        shown = "".join(c if c.isprintable() else " " for c in text)
        return self._more | ({"x-exl2flow-warnings": shown} if shown else {})


async def _send(send: Send, piece: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": more})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
