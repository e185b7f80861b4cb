"""What clients read of errors: no folders of the server, wherever a message has them."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from hosts import make_host
from tiny import make_tiny

from exl2flow.core import errors
from exl2flow.engine.chat import choose_format
from exl2flow.inference import load_model
from exl2flow.serve.errors import STATUSES, as_api_error, shown
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models
from exl2flow.serve.http.app import create_app

FOLDERS = ["/", "/srv/", "/home/joe/.cache/x~1/é+@/", "/a b/c/"]
NAMES = ["model", "chat_template.jinja", "a b.c", ".x"]


@pytest.mark.parametrize("quote", "`'\"")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_quoted_paths_are_names(folder: str, name: str, quote: str) -> None:
    assert shown(ValueError(f"in {quote}{folder}{name}{quote}: x")) == f"in {quote}{name}{quote}: x"


def test_a_quoted_path_may_have_other_quotes() -> None:
    assert shown(ValueError("in `/it's/a/b`")) == "in `b`"


@pytest.mark.parametrize("folder", FOLDERS[1:-1])
def test_other_paths_are_names(folder: str) -> None:
    error = OSError(2, "nothing there", f"{folder}a b.c")
    text = f"no file {folder}model: x (see {folder}model) "

    assert shown(ValueError(f"{text}{error}")) == (
        "no file model: x (see model) [Errno 2] nothing there: 'a b.c'"
    )


@pytest.mark.parametrize(
    "text",
    [
        "`a/b` is not a type; `model` and/or `x`",
        "see https://example.org/a/b",
        "`#/$defs/a` is missing",
        "/a/b/ is an expression",
        "at most 4/s, 3 / 4",
    ],
)
def test_what_is_no_path_stays(text: str) -> None:
    assert shown(ValueError(text)) == text


@pytest.mark.parametrize("kind", [kind for kind, _, _ in STATUSES] + [errors.InferenceError])
def test_no_class_of_errors_tells_folders(kind: Any) -> None:
    told = as_api_error(kind("`/srv/models/m/file` is wrong"), "req_1", is_input=True)

    assert str(told) == "`file` is wrong"


def models_in(folder: Path) -> Models:
    """Return the models of an application whose folder nobody may read of."""

    def make(each: Path) -> ModelHost:
        model = load_model(each, device="cpu")
        fmt, _ = choose_format(each, model.tokenizer, None)
        host = make_host(model, fmt=fmt, models=folder, loras=folder, swap=True)
        host.start()
        return host

    return Models(make(folder / "good"), make)


REFUSING = "{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: one whose template refuses all, one that is cut off; and broken adapters."""
    folder = tmp_path_factory.mktemp("secret-folder")
    (make_tiny("llama", folder / "good") / "chat_template.jinja").write_text(REFUSING)
    shutil.copytree(folder / "good", folder / "cut")
    (folder / "cut" / "model.safetensors").write_bytes(b"\0" * 9)
    make_adapter(folder / "other", folder / "good", r=-1)
    make_adapter(folder / "gone", folder / "good")
    (folder / "gone" / "adapter_model.safetensors").unlink()
    return folder


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/token/encode", {"text": [{"role": "user", "content": "a"}]}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "other"}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "gone"}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "nothing"}),
    ("/v1/completions", {"model": "cut", "prompt": "a"}),
]


def test_no_answer_tells_folders(folder: Path) -> None:
    """Templates, adapters and models that are broken: the file's name is told."""
    models = models_in(folder)

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(models))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            told = [await client.post(path, json=body) for path, body in REQUESTS]
        await models.close()
        return told

    answers = asyncio.run(run())
    texts = [answer.text for answer in answers]
    assert all(answer.status_code in (400, 404, 503) for answer in answers), texts
    assert not any("secret-folder" in text or str(folder.parent) in text for text in texts), texts
    assert all("chat_template.jinja" in text for text in texts[:6])
