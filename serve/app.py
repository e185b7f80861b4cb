"""The application: routes, the OpenAPI document, and what all answers of a model share."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from exl2flow.serve import chats, completions
from exl2flow.serve.answers import AnswerPlan, RunningAnswer
from exl2flow.serve.engine import Engine
from exl2flow.serve.errors import ApiError, body, logged, response
from exl2flow.serve.fields import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from exl2flow.serve.guard import Guard, Key
from exl2flow.serve.logprobs import Names
from exl2flow.serve.metrics import METRICS_TYPE, Metrics
from exl2flow.serve.openai import ChatDialect, CompletionDialect, Dialect
from exl2flow.serve.stream import ClientLeft, EventStream, sse, while_connected

log = logging.getLogger("exl2flow.serve")
MISSING = (
    "embeddings",
    "images/generations",
    "images/edits",
    "audio/speech",
    "audio/transcriptions",
    "audio/translations",
    "rerank",
    "batches",
    "files",
    "moderations",
)
MOST_NAMED, LONGEST_NAME = 20, 40  # unknown fields in a header
LEFT = 499  # nobody reads it
Begun = Callable[[RunningAnswer], Dialect]


class Server:
    """Answers requests with one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.metrics = engine, Metrics(engine)
        self.names = Names(engine.tokenizer)

    async def answer(
        self, request: Request, given: Body, plan: Callable[[], AnswerPlan], begun: Begun
    ) -> Response:
        """Answer a request, plain or streamed; all checks come before the status."""
        state, path = request.scope["state"], request.url.path
        headers = self._headers(given)
        self._check_name(given.model)
        answer: RunningAnswer | None = None
        code = "200"
        try:
            try:
                answer = await while_connected(request, self.engine.begin(plan))
                headers |= self._headers_of(answer.plan)
                dialect = begun(answer)
                if given.stream:
                    source = self._streamed(dialect, state, path)
                    answer = None  # which ends with the stream
                    return EventStream(source, headers=headers, on_leave=self._left)
                whole = await while_connected(request, dialect.whole())
                return JSONResponse(whole, headers=headers)
            except ClientLeft:
                code = str(LEFT)
                self._left()
                return Response(status_code=LEFT)
            except Exception as error:
                told = logged(error, state["request_id"], is_input=answer is None)
                code = str(told.status)
                self.metrics.add("request_errors", code=code)
                return response(told, state["request_id"], headers)
        finally:
            if answer is not None:
                self._end(answer, state, path, code)

    async def _streamed(
        self, dialect: Dialect, state: dict[str, Any], path: str
    ) -> AsyncGenerator[bytes]:
        code = "200"
        try:
            async for piece in dialect.stream():
                yield piece
        except (GeneratorExit, asyncio.CancelledError):
            code = str(LEFT)
            raise
        except Exception as error:
            told = logged(error, state["request_id"])
            code = str(told.status)
            self.metrics.add("request_errors", code=code)
            yield sse(body(told, state["request_id"]))
        finally:
            self._end(dialect.answer, state, path, code)

    def _end(self, answer: RunningAnswer, state: dict[str, Any], path: str, code: str) -> None:
        self.engine.end(answer)
        self.metrics.ended(answer, state, path, code)

    def _left(self) -> None:
        self.metrics.add("client_disconnects")

    def _check_name(self, name: str) -> None:
        if self.engine.options.strict_names and name not in ("", self.engine.name):
            raise ApiError(
                404,
                f"there is no model {name!r:.80}; there is `{self.engine.name}`",
                code="model_not_found",
                param="model",
            )

    def _headers(self, given: Body) -> dict[str, str]:
        unknown = given.unknown
        if unknown and self.engine.options.strict:
            raise ApiError(400, f"`{unknown[0]:.80}` is an unknown field", param=unknown[0][:80])
        shown = [
            n[:LONGEST_NAME] for n in unknown if n.replace("_", "").isascii() and n.isprintable()
        ]
        return {"x-exl2flow-ignored": ", ".join(shown[:MOST_NAMED])} if shown else {}

    def _headers_of(self, plan: AnswerPlan) -> dict[str, str]:
        headers = {"x-exl2flow-seed": str(plan.seed)}
        if plan.warnings:
            text = "; ".join(plan.warnings).encode("ascii", "replace").decode()
            headers["x-exl2flow-warnings"] = "".join(c if c.isprintable() else " " for c in text)[
                :500
            ]
        return headers

    def model(self) -> dict[str, Any]:
        """Return the row of `/v1/models`."""
        engine = self.engine
        return {
            "id": engine.name,
            "object": "model",
            "created": engine.created,
            "owned_by": "exl2flow",
            "max_model_len": engine.room,
            "meta": {
                "n_ctx_train": engine.model.max_tokens,
                "n_vocab": engine.width,
                "tool_format": engine.tool_format.name,
                "warnings": engine.warnings,
            },
        }


def create_app(
    engine: Engine,
    *,
    keys: tuple[Key, ...] = (),
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    open_metrics: bool = False,
) -> FastAPI:
    """Return the application of an engine, which starts and ends with it."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(
        title="exl2flow",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.server = server = Server(engine)
    for prefix in ("/v1", ""):
        _add_answers(app, server, prefix)
        _add_tokens(app, server, prefix)
        _add_rows(app, server, prefix)
    _add_errors(app)
    app.add_middleware(
        Guard,
        keys=keys,
        hosts=hosts,
        origins=origins,
        open_metrics=open_metrics,
        on_status=lambda path, code: server.metrics.add("http_requests", path=path, code=str(code)),
    )
    return app


def _add_answers(app: FastAPI, server: Server, prefix: str) -> None:
    engine, shown = server.engine, bool(prefix)
    thoughts = engine.options.reasoning_field

    @app.post(f"{prefix}/chat/completions", include_in_schema=shown)
    async def chat(request: Request, given: ChatBody) -> Response:
        """Answer a conversation."""
        return await server.answer(
            request,
            given,
            lambda: chats.plan_of(given, engine),
            lambda answer: ChatDialect(answer, given, engine.name, server.names, thoughts=thoughts),
        )

    @app.post(f"{prefix}/completions", include_in_schema=shown)
    async def complete(request: Request, given: CompletionBody) -> Response:
        """Continue prompts."""
        return await server.answer(
            request,
            given,
            lambda: completions.plan_of(given, engine),
            lambda answer: CompletionDialect(answer, given, engine.name, server.names),
        )


def _add_tokens(app: FastAPI, server: Server, prefix: str) -> None:
    engine, shown = server.engine, not prefix

    @app.post(f"{prefix}/tokenize", include_in_schema=shown)
    async def tokenize(given: TokenizeBody) -> dict[str, Any]:
        """Return the ids of a text or a conversation."""

        def ids() -> list[int]:
            if given.messages is not None:
                return chats.counted(given.messages, engine)
            bos = given.add_special_tokens
            return engine.tokenizer.encode(given.prompt or "", add_bos=bos)

        found: list[int] = await engine.in_thread(ids)
        texts = [server.names.text(i) for i in found] if given.return_token_strs else None
        return {
            "count": len(found),
            "max_model_len": engine.room,
            "tokens": found,
            "token_strs": texts,
        }

    @app.post(f"{prefix}/detokenize", include_in_schema=shown)
    async def detokenize(given: DetokenizeBody) -> dict[str, str]:
        """Return the text of ids."""
        if wrong := [i for i in given.tokens if not 0 <= i < engine.width]:
            raise ApiError(400, f"`tokens` has {wrong[0]}, which is no id", param="tokens")
        return {"prompt": engine.tokenizer.decode(given.tokens, special=True)}

    @app.get(f"{prefix}/tokenizer_info", include_in_schema=shown)
    async def tokenizer_info() -> dict[str, Any]:
        """Return what clients that encode themselves want to know."""
        tokenizer, reader = engine.tokenizer, engine.reader
        ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        return {
            "tokenizer_class": type(tokenizer.backend).__name__,
            "vocab_size": engine.width,
            "model_max_length": engine.room,
            "chat_template": None if reader is None else reader.format.template,
            **{n: None if i is None else tokenizer.backend.id_to_token(i) for n, i in ids.items()},
        }


def _add_rows(app: FastAPI, server: Server, prefix: str) -> None:
    engine, shown = server.engine, bool(prefix)

    @app.get(f"{prefix}/health", include_in_schema=not shown)
    async def health() -> JSONResponse:
        """Tell whether requests are answered."""
        is_ready = engine.state == "ready"
        status = "ok" if is_ready else engine.state
        return JSONResponse({"status": status}, status_code=200 if is_ready else 503)

    @app.get(f"{prefix}/models", include_in_schema=shown)
    async def models() -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [server.model()], "models": []}

    @app.get(f"{prefix}/models/{{name:path}}", include_in_schema=shown)
    async def model(name: str) -> dict[str, Any]:
        """Describe the model."""
        if name != engine.name:
            raise ApiError(404, f"there is no model {name!r:.80}", code="model_not_found")
        return server.model()

    @app.get(f"{prefix}/status", include_in_schema=shown)
    async def status() -> dict[str, Any]:
        """Tell what runs."""
        return server.metrics.status()

    if not prefix:

        @app.get("/metrics")
        async def metrics() -> Response:
            """Return metrics for Prometheus."""
            return Response(server.metrics.text(), media_type=METRICS_TYPE)

    async def missing(request: Request) -> Response:
        raise ApiError(501, f"{request.url.path} is not served: this server makes text only")

    for name in MISSING:
        app.add_api_route(
            f"{prefix}/{name}", missing, methods=["GET", "POST"], include_in_schema=False
        )


def _add_errors(app: FastAPI) -> None:
    def refused(request: Request, error: Exception) -> Response:
        request_id = request.scope["state"]["request_id"]
        if isinstance(error, RequestValidationError):
            return response(_in_words(error), request_id)
        if isinstance(error, HTTPException):
            told = ApiError(error.status_code, str(error.detail))
            return response(told, request_id, error.headers)
        return response(logged(error, request_id, is_input=True), request_id)

    for kind in (RequestValidationError, HTTPException, ApiError, Exception):
        app.add_exception_handler(kind, refused)


def _in_words(error: RequestValidationError) -> ApiError:
    """Return what is wrong with a body, by name."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        return ApiError(400, "the body is no JSON")
    where = f"`{'.'.join(place)[:100]}`: " if place else ""
    message = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{where}{message}", param=place[0][:100] if place else None)
