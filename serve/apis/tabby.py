"""Endpoints of TabbyAPI and of llama.cpp's server that SillyTavern asks, beside OpenAI's."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import Response

from exl2flow.core.errors import ChatTemplateError
from exl2flow.serve.answers.answer import Update
from exl2flow.serve.answers.bounds import Ids, Messages, Text
from exl2flow.serve.answers.fields import CompletionBody, Json, TokenizeBody
from exl2flow.serve.apis import chats, completions
from exl2flow.serve.apis.mapping import settings_of
from exl2flow.serve.apis.openai import Chunk, CompletionDialect, sse, timings_of
from exl2flow.serve.apis.reply import AnswerResponse
from exl2flow.serve.body_pace import PacedRoute
from exl2flow.serve.errors import ApiError, shown
from exl2flow.serve.hosts.metrics import Metrics
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models

SLICE = 1 << 13  # values that are written as JSON at once


class EncodeBody(Json):
    """A text or a conversation, as TabbyAPI takes it."""

    text: Text | Messages
    add_bos_token: bool = True
    encode_special_tokens: bool = True


class DecodeBody(Json):
    """Ids, as TabbyAPI takes them."""

    tokens: Ids
    decode_special_tokens: bool = True


class LlamaBody(CompletionBody):
    """A completion in the form of llama.cpp; `false` as a bias excludes the token."""

    dialect: ClassVar[Mapping[str, str]] = {"logprobs": "n_probs"}

    @classmethod
    def ours(cls, given: dict[str, Any]) -> dict[str, Any]:
        """See `Body`."""
        values, top = dict(given), given.get("n_probs", 0)
        values.pop("n_probs", None)
        if top:
            values["logprobs"] = top
        if isinstance(rows := given.get("logit_bias"), list):
            pairs = [row for row in rows if isinstance(row, list) and len(row) == 2]
            if len(pairs) < len(rows):
                raise ValueError("`logit_bias` takes pairs of an id and a bias")
            bias = {str(token): -100 if value is False else value for token, value in pairs}
            values["logit_bias"] = bias
        return values


class LlamaDialect(CompletionDialect):
    """A completion whose chunks are events of their own, without choices around them."""

    done = b""

    def chunk(self, update: Update) -> Chunk:
        chunk = super().chunk(update)
        if self._has_logs and (logs := self.names.chat(update.event)):
            chunk["completion_probabilities"] = [{"content": row["token"], **row} for row in logs]
        return chunk

    async def whole(self) -> Any:
        """Return an object, or a list of them for several choices."""
        shown = [self._shown(index, chunk) for index, chunk in enumerate(await self.choices())]
        return shown[0] if len(shown) == 1 else shown

    def _event(self, index: int, chunk: Chunk) -> bytes:
        return sse(self._shown(index, chunk))

    def _shown(self, index: int, chunk: Chunk) -> Chunk:
        """Return new text of a choice, and how it ended if it has."""
        end, word = chunk.get("finish_reason"), chunk.get("stop_reason")
        shown = {"index": index, "content": chunk.get("text", ""), "stop": end is not None}
        if "completion_probabilities" in chunk:
            shown["completion_probabilities"] = chunk["completion_probabilities"]
        if end is None:
            return shown
        is_word = isinstance(word, str)
        shown |= {"model": self._head["model"], "stopping_word": word if is_word else ""}
        shown["stop_type"] = "limit" if end == "length" else "word" if is_word else "eos"
        if (counts := self.answer.ends[index].statistics) is not None:
            shown["tokens_evaluated"] = counts.prompt_tokens
            shown["tokens_predicted"] = counts.new_tokens
            shown |= {"timings": timings_of(counts), "truncated": False}
        return shown


async def encoded(
    given: TokenizeBody, host: ModelHost, row: Callable[[list[int], ModelHost], dict[str, Any]]
) -> Response:
    """Answer with the ids of a text or a conversation, all of it made in a thread.

    Raises:
        ApiError: no way to encode it.
    """

    def made() -> bytes:
        if given.messages is None:
            bos, special = given.add_special_tokens, given.parse_special
            ids = host.tokenizer.encode(given.prompt, add_bos=bos, special=special)
        else:
            ids = chats.reader_of(host).prompt(chats.messages_of(given.messages))[0]
        return b",".join(_json(row(ids, host))).join((b"{", b"}"))

    try:
        return Response(await host.in_thread(made), media_type="application/json")
    except ChatTemplateError as error:
        raise ApiError(400, shown(error), param="messages") from error


def _json(row: dict[str, Any]) -> Iterator[bytes]:
    """Yield the members of an object; long lists in slices, between which others get the GIL."""
    for name, value in row.items():
        if isinstance(value, list):
            slices = (value[at : at + SLICE] for at in range(0, len(value), SLICE))
            text = b"[%s]" % b",".join(to_json(each)[1:-1] for each in slices)
        else:
            text = to_json(value)
        yield to_json(name) + b":" + text


def names_of(ids: list[int], host: ModelHost) -> list[str]:
    """Return the texts of tokens one by one; raises `ApiError` if they are more than a prompt."""
    if len(ids) > host.room:
        why = f"`return_token_strs` takes texts of {host.room} tokens, not {len(ids)}"
        raise ApiError(400, why, param="return_token_strs")
    return [host.tokens.text(i) for i in ids]


def text_of(ids: list[int], host: ModelHost, *, special: bool = True) -> str:
    """Return the text of ids; raises `ApiError` if one is none, or they are more than a prompt."""
    if len(ids) > host.room:
        why = f"`tokens` has {len(ids)} ids; it takes {host.room}, as many as a prompt"
        raise ApiError(400, why, param="tokens")
    if wrong := [i for i in ids if not 0 <= i < host.width]:
        raise ApiError(400, f"`tokens` has {wrong[0]}, which is not an id", param="tokens")
    return host.tokenizer.decode(ids, special=special)


def _defaults(host: ModelHost) -> dict[str, Any]:
    """Return what holds for a request without settings, under llama-server's names."""
    settings = settings_of(LlamaBody.model_validate({"prompt": ""}), host)
    names = ("temperature", "top_k", "top_p", "min_p")
    most = host.options.max_answer
    return {**{n: getattr(settings, n) for n in names}, "n_predict": -1 if most is None else most}


def tabby(models: Models, metrics: Metrics, row: Callable[[str], dict[str, Any]]) -> APIRouter:
    """Return the endpoints; row: describes a model by its name."""
    router = APIRouter(route_class=PacedRoute)

    @router.get("/model")
    async def model() -> dict[str, Any]:
        """Describe the loaded model, as TabbyAPI does."""
        async with models.using() as host:
            about = {"max_seq_len": host.room, "max_batch_size": host.options.slots}
            return {**row(host.name), "parameters": about}

    @router.post("/token/encode")
    async def encode(given: EncodeBody) -> Response:
        """Return the ids of a text or a conversation, as TabbyAPI does."""
        name = "prompt" if isinstance(given.text, str) else "messages"
        bos, special = given.add_bos_token, given.encode_special_tokens
        fields = {name: given.text, "add_special_tokens": bos, "parse_special": special}
        same = TokenizeBody.model_validate(fields)
        async with models.using() as host:
            return await encoded(same, host, lambda ids, _: {"tokens": ids, "length": len(ids)})

    @router.post("/token/decode")
    async def decode(given: DecodeBody) -> dict[str, str]:
        """Return the text of ids, as TabbyAPI does."""
        async with models.using() as host:
            special = given.decode_special_tokens
            work = partial(text_of, given.tokens, host, special=special)
            return {"text": await host.in_thread(work)}

    @router.get("/props")
    async def props() -> dict[str, Any]:
        """Tell the template and the context, as llama.cpp does."""
        async with models.using() as host:
            return {
                "chat_template": "" if host.reader is None else host.reader.format.template,
                "default_generation_settings": {"n_ctx": host.room, "params": _defaults(host)},
                "model_alias": host.name,
                "total_slots": host.options.slots,
            }

    @router.post("/completion")
    async def complete(given: LlamaBody) -> Response:
        """Continue a prompt, as llama.cpp does."""
        return AnswerResponse(models, metrics, given, completions.plan_of, LlamaDialect)

    return router
