"""The application: routes and the OpenAPI document."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from exl2flow.serve.answers.answer_schemas import (
    ChatAnswer,
    CompletionAnswer,
    Decoded,
    MessageAnswer,
    ModelRow,
    ModelRows,
    ResponseAnswer,
    Tokens,
    documented,
)
from exl2flow.serve.answers.fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    TokenizeBody,
)
from exl2flow.serve.apis import agents, chats, completions
from exl2flow.serve.apis.messages import MessagesBody, MessagesDialect
from exl2flow.serve.apis.openai import ChatDialect, CompletionDialect
from exl2flow.serve.apis.reply import AnswerResponse
from exl2flow.serve.apis.responses import ResponsesBody, ResponsesDialect
from exl2flow.serve.apis.tabby import encoded, names_of, tabby, text_of
from exl2flow.serve.body_pace import PacedRoute
from exl2flow.serve.errors import ApiError, as_api_error, response
from exl2flow.serve.hosts.keys import Keys
from exl2flow.serve.hosts.metrics import Metrics
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models
from exl2flow.serve.http.admin import admin_router
from exl2flow.serve.http.guard import Guard
from exl2flow.serve.http.page import page

MISSING = "embeddings rerank batches files moderations images/generations images/edits audio/speech"
MISSING += " audio/transcriptions audio/translations"


def create_app(models: Models, keys: Keys | None = None) -> FastAPI:
    """Return the application of models, which end with it; `/v1` may be left out of paths."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await models.close()

    app = FastAPI(title="exl2flow", lifespan=life, docs_url=None, redoc_url=None)
    metrics = Metrics(models)
    row = {"model": ErrorBody}
    refusals: dict[int | str, dict[str, Any]] = {"4XX": row, "5XX": row}
    routers = [
        _answers(models, metrics),
        _tokens(models),
        tabby(models, metrics, partial(_row, models)),
        _descriptions(models, metrics),
        admin_router(models),
    ]
    for router in routers:
        app.include_router(router, prefix="/v1", responses=refusals)
        app.include_router(router, include_in_schema=False)

    @app.head("/", include_in_schema=False)
    async def root() -> None:
        """Tell that a server is here."""

    if not models.options.no_page:
        app.add_api_route("/", page, response_class=HTMLResponse, include_in_schema=False)
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    metrics.paths = sorted({route.path for route in routes if isinstance(route, Route)})
    for kind in (RequestValidationError, HTTPException, ApiError):  # `Guard` answers the others
        app.add_exception_handler(kind, _refused)
    app.add_middleware(Guard, options=models.options, keys=keys or Keys(), metrics=metrics)
    return app


def _answers(models: Models, metrics: Metrics) -> APIRouter:
    router = APIRouter(route_class=PacedRoute)

    @router.post("/chat/completions", responses=documented(ChatAnswer, streams=True))
    async def chat(given: ChatBody) -> Response:
        """Answer a conversation."""
        return AnswerResponse(models, metrics, given, chats.plan_of, ChatDialect)

    @router.post("/completions", responses=documented(CompletionAnswer, streams=True))
    async def complete(given: CompletionBody) -> Response:
        """Continue prompts."""
        return AnswerResponse(models, metrics, given, completions.plan_of, CompletionDialect)

    @router.post("/messages", responses=documented(MessageAnswer, streams=True))
    async def message(given: MessagesBody) -> Response:
        """Answer a conversation in Anthropic's form."""
        return AnswerResponse(models, metrics, given, agents.plan_of, MessagesDialect)

    @router.post("/messages/count_tokens")
    async def count_message(given: MessagesBody) -> dict[str, int]:
        """Return the length of a prompt."""
        return {"input_tokens": await _length_of(given, models)}

    @router.post("/responses", responses=documented(ResponseAnswer, streams=True))
    async def respond(given: ResponsesBody) -> Response:
        """Answer a conversation in the form of OpenAI's Responses."""
        return AnswerResponse(models, metrics, given, agents.plan_of, ResponsesDialect)

    @router.post("/responses/input_tokens")
    async def count_response(given: ResponsesBody) -> dict[str, Any]:
        """Return the length of a prompt."""
        tokens = await _length_of(given, models)
        return {"object": "response.input_tokens", "input_tokens": tokens}

    return router


async def _length_of(given: ChatBody, models: Models) -> int:
    async with models.using(given.model) as host:
        return await host.in_thread(lambda: chats.length_of(given, host))


def _tokens(models: Models) -> APIRouter:
    router = APIRouter(route_class=PacedRoute)

    @router.post("/tokenize", responses=documented(Tokens))
    async def tokenize(given: TokenizeBody) -> Response:
        """Return the ids of a text or a conversation."""

        def row(ids: list[int], host: ModelHost) -> dict[str, Any]:
            return {
                "count": len(ids),
                "max_model_len": host.room,
                "tokens": ids,
                "token_strs": names_of(ids, host) if given.return_token_strs else None,
            }

        async with models.using() as host:
            return await encoded(given, host, row)

    @router.post("/detokenize", responses=documented(Decoded))
    async def detokenize(given: DetokenizeBody) -> dict[str, str]:
        """Return the text of ids."""
        async with models.using() as host:
            text = await host.in_thread(lambda: text_of(given.tokens, host))
            return {"prompt": text, "content": text}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return what clients that encode themselves want to know."""
        async with models.using() as host:
            tokenizer = host.tokenizer
            ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
            names = {n: None if i is None else host.tokens.text(i) for n, i in ids.items()}
            return {
                "tokenizer_class": type(tokenizer.backend).__name__,
                "vocab_size": host.width,
                "model_max_length": host.room,
                "chat_template": host.reader and host.reader.format.template,
                **names,
            }

    return router


def _descriptions(models: Models, metrics: Metrics) -> APIRouter:
    router = APIRouter(route_class=PacedRoute)

    @router.get("/model/list")
    async def folders() -> dict[str, Any]:
        """List what an admin can load."""
        return {"object": "list", "data": [_row(models, name) for name in models.folders]}

    @router.get("/models", responses=documented(ModelRows))
    async def listed() -> dict[str, Any]:
        """List the model, alone and with each adapter, and others that requests may name."""
        rows = [_row(models, name) for name in models.names]
        return {"object": "list", "data": rows, "models": []}

    @router.get("/models/{name:path}", responses=documented(ModelRow))
    async def model(name: str) -> dict[str, Any]:
        """Describe a model."""
        if name not in models.names:
            raise ApiError(404, f"no model {name!r:.80}", code="model_not_found")
        return _row(models, name)

    @router.get("/health", responses={503: {"description": "not ready"}})
    async def health() -> JSONResponse:
        """Tell whether requests are answered."""
        state = models.state
        if state in ("ready", "idle"):
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": state}, 503)

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


def _row(models: Models, name: str) -> dict[str, Any]:
    """Describe a model; more of the one that is loaded."""
    row: dict[str, Any] = {"id": name, "object": "model", "owned_by": "exl2flow"}
    host = models.host
    if host is None or models.options.aliases.get(name, name) not in host.names:
        return row | {"created": models.created}
    meta = {
        "n_ctx_train": host.model.max_tokens,
        "n_vocab": host.width,
        "tool_format": host.tool_format.name,
        "warnings": host.warnings,
    }
    return row | {"created": host.created, "max_model_len": host.room, "meta": meta}


def _refused(request: Request, error: Exception) -> Response:
    """Return what is wrong with a request, by name."""
    if isinstance(error, RequestValidationError):
        problem = error.errors()[0]
        place = [str(part) for part in problem["loc"] if part != "body"]
        words = str(problem["msg"]).removeprefix("Value error, ")
        where = f"`{'.'.join(place)[:100]}`: " if place else ""
        if problem["type"] == "json_invalid":
            where, words, place = "", "the body is not JSON", []
        error = ApiError(400, f"{where}{words}", param=place[0][:100] if place else None)
    elif isinstance(error, HTTPException):
        told = ApiError(error.status_code, str(error.detail))
        return response(told, request.scope, error.headers)
    request_id = request.scope["state"]["request_id"]
    return response(as_api_error(error, request_id, is_input=True), request.scope)
