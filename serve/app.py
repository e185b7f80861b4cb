"""The application: routes and the OpenAPI document."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from exl2flow.serve import agents, chats, completions
from exl2flow.serve.engine import Engine
from exl2flow.serve.errors import ApiError, as_api_error, response
from exl2flow.serve.fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    TokenizeBody,
)
from exl2flow.serve.guard import Guard, Key
from exl2flow.serve.messages import MessagesBody, MessagesDialect
from exl2flow.serve.metrics import Metrics
from exl2flow.serve.openai import ChatDialect, CompletionDialect
from exl2flow.serve.page import page
from exl2flow.serve.reply import AnswerResponse
from exl2flow.serve.responses import ResponsesBody, ResponsesDialect
from exl2flow.serve.tabby import ids_of, tabby, text_of

MISSING = "embeddings rerank batches files moderations images/generations images/edits audio/speech"
MISSING += " audio/transcriptions audio/translations"


def create_app(engine: Engine, *, keys: tuple[Key, ...] = ()) -> FastAPI:
    """Return the application of an engine, which ends with it; `/v1` may be left out of paths."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(title="exl2flow", lifespan=life, docs_url=None, redoc_url=None)
    metrics = Metrics(engine)
    told: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": ErrorBody},
        "5XX": {"model": ErrorBody},
    }
    for router in (_answers(engine, metrics), _tokens(engine), _descriptions(engine, metrics)):
        app.include_router(router, prefix="/v1", responses=told)
        app.include_router(router, include_in_schema=False)

    @app.head("/", include_in_schema=False)
    async def root() -> None:
        """Tell that a server is here."""

    if not engine.options.no_page:
        app.add_api_route("/", page, response_class=HTMLResponse, include_in_schema=False)
    for kind in (RequestValidationError, HTTPException, ApiError, Exception):
        app.add_exception_handler(kind, _refused)
    app.add_middleware(Guard, options=engine.options, keys=keys, metrics=metrics)
    return app


def _answers(engine: Engine, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.post("/chat/completions")
    async def chat(given: ChatBody) -> Response:
        """Answer a conversation."""
        return AnswerResponse(engine, metrics, given, chats.plan_of, ChatDialect)

    @router.post("/completions")
    async def complete(given: CompletionBody) -> Response:
        """Continue prompts."""
        return AnswerResponse(engine, metrics, given, completions.plan_of, CompletionDialect)

    @router.post("/messages")
    async def message(given: MessagesBody) -> Response:
        """Answer a conversation in Anthropic's form."""
        return AnswerResponse(engine, metrics, given, agents.plan_of, MessagesDialect)

    @router.post("/messages/count_tokens")
    async def count_message(given: MessagesBody) -> dict[str, int]:
        """Return the length of a prompt."""
        return {"input_tokens": await engine.in_thread(lambda: chats.length_of(given, engine))}

    @router.post("/responses")
    async def respond(given: ResponsesBody) -> Response:
        """Answer a conversation in the form of OpenAI's Responses."""
        return AnswerResponse(engine, metrics, given, agents.plan_of, ResponsesDialect)

    @router.post("/responses/input_tokens")
    async def count_response(given: ResponsesBody) -> dict[str, Any]:
        """Return the length of a prompt."""
        tokens = await engine.in_thread(lambda: chats.length_of(given, engine))
        return {"object": "response.input_tokens", "input_tokens": tokens}

    return router


def _tokens(engine: Engine) -> APIRouter:
    router, tokenizer = APIRouter(), engine.tokenizer

    @router.post("/tokenize")
    async def tokenize(given: TokenizeBody) -> dict[str, Any]:
        """Return the ids of a text or a conversation."""
        found = await ids_of(given, engine)
        return {
            "count": len(found),
            "max_model_len": engine.room,
            "tokens": found,
            "token_strs": [engine.tokens.text(i) for i in found]
            if given.return_token_strs
            else None,
        }

    @router.post("/detokenize")
    async def detokenize(given: DetokenizeBody) -> dict[str, str]:
        """Return the text of ids."""
        text = text_of(given.tokens, engine)
        return {"prompt": text, "content": text}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return what clients that encode themselves want to know."""
        ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        names = {n: None if i is None else engine.tokens.text(i) for n, i in ids.items()}
        return {
            "tokenizer_class": type(tokenizer.backend).__name__,
            "vocab_size": engine.width,
            "model_max_length": engine.room,
            "chat_template": engine.reader and engine.reader.format.template,
            **names,
        }

    return router


def _descriptions(engine: Engine, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    def row(name: str) -> dict[str, Any]:
        meta = {
            "n_ctx_train": engine.model.max_tokens,
            "n_vocab": engine.width,
            "tool_format": engine.tool_format.name,
            "warnings": engine.warnings,
        }
        about = {"created": engine.created, "owned_by": "exl2flow", "max_model_len": engine.room}
        return {"id": name, "object": "model", **about, "meta": meta}

    router.include_router(tabby(engine, metrics, row))

    @router.get("/model/list")
    @router.get("/models")
    async def models() -> dict[str, Any]:
        """List the model, alone and with each adapter."""
        return {"object": "list", "data": [row(name) for name in engine.names], "models": []}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the model."""
        if name not in engine.names:
            raise ApiError(404, f"there is no model {name!r:.80}", code="model_not_found")
        return row(name)

    @router.get("/health", responses={503: {"description": "not ready"}})
    async def health() -> JSONResponse:
        """Tell whether requests are answered."""
        is_ready = engine.state == "ready"
        return JSONResponse(
            {"status": "ok" if is_ready else engine.state}, 200 if is_ready else 503
        )

    @router.get("/status")
    async def status() -> dict[str, Any]:
        """Tell what runs."""
        return metrics.status()

    @router.get("/metrics")
    async def measured() -> Response:
        """Return metrics for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def missing(request: Request) -> Response:
        raise ApiError(501, f"{request.url.path} is not served: this server makes text only")

    for name in MISSING.split():
        methods = ["GET", "POST"]
        router.add_api_route(f"/{name}", missing, methods=methods, include_in_schema=False)
    return router


def _refused(request: Request, error: Exception) -> Response:
    """Return what is wrong with a request, by name."""
    if isinstance(error, RequestValidationError):
        problem = error.errors()[0]
        place = [str(part) for part in problem["loc"] if part != "body"]
        words = str(problem["msg"]).removeprefix("Value error, ")
        where = f"`{'.'.join(place)[:100]}`: " if place else ""
        if problem["type"] == "json_invalid":
            where, words, place = "", "the body is no JSON", []
        error = ApiError(400, f"{where}{words}", param=place[0][:100] if place else None)
    elif isinstance(error, HTTPException):
        return response(
            ApiError(error.status_code, str(error.detail)), request.scope, error.headers
        )
    request_id = request.scope["state"]["request_id"]
    return response(as_api_error(error, request_id, is_input=True), request.scope)
