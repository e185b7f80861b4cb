"""Requests that change what is loaded: models of `--models`, adapters of `--loras`."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from pydantic import AliasChoices, Field
from starlette.requests import Request

from exl2flow.serve.answers.bounds import LARGEST_NUMBER, Name, Place
from exl2flow.serve.answers.fields import Json
from exl2flow.serve.body_pace import PacedRoute
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.models import Models


class ModelName(Json):
    """Which model to load, as TabbyAPI's clients say it."""

    name: Name = Field(validation_alias=AliasChoices("name", "model_name", "model"))


class AdapterName(Json):
    """Which adapter to forget, as vLLM's clients say it."""

    lora_name: str = Field(min_length=1, max_length=200)


class AdapterPlace(AdapterName):
    """Which adapter to load."""

    lora_path: Place
    scaling: float = Field(1.0, gt=0, le=LARGEST_NUMBER)


def admin_router(models: Models) -> APIRouter:
    """Return the routes, which an admin's key opens."""

    async def is_admin(request: Request) -> None:
        request.state.key.check_admin()

    router = APIRouter(route_class=PacedRoute, dependencies=[Depends(is_admin)])

    @router.post("/model/load")
    async def load(given: ModelName) -> dict[str, Any]:
        """Replace the loaded model by another one, once running texts have ended."""
        await models.load(given.name)
        return {"id": models.name, "object": "model", "load_seconds": round(models.load_seconds, 3)}

    @router.post("/model/unload")
    async def unload() -> dict[str, Any]:
        """Free the model; requests get 503 until one is loaded."""
        await models.unload()
        return {"id": models.name, "object": "model", "state": models.state}

    @router.post("/load_lora_adapter")
    async def load_adapter(given: AdapterPlace) -> dict[str, Any]:
        """Let requests name an adapter, alone or behind the model's name and a colon."""
        async with models.using() as host:
            if given.lora_name in host.adapters:
                why = f"there is an adapter {given.lora_name!r:.80}; unload it first"
                raise ApiError(400, why, param="lora_name")
            folder = _adapter_in(models.options.loras, given.lora_path)
            work = (given.lora_name, folder, given.scaling)
            await host.in_thread(lambda: host.load_adapter(*work))
            return {"adapters": [*host.adapters]}

    @router.post("/unload_lora_adapter")
    async def unload_adapter(given: AdapterName) -> dict[str, Any]:
        """Forget an adapter; running texts keep it."""
        async with models.using() as host:
            if given.lora_name not in host.adapters:
                there = ", ".join(host.adapters) or "none"
                why = f"no adapter {given.lora_name!r:.80}; there is {there}"
                raise ApiError(404, why, param="lora_name")
            host.unload_adapter(given.lora_name)
            return {"adapters": [*host.adapters]}

    return router


def _adapter_in(folder: Path | None, given: str) -> Path:
    """Return the folder of an adapter, by its path inside `--loras`."""
    if folder is None:
        raise ApiError(400, "adapters are loaded from `--loras FOLDER`, which was not given")
    root = folder.resolve()
    path = (root / given).resolve()
    if not path.is_relative_to(root) or not (path / "adapter_config.json").is_file():
        raise ApiError(404, f"{given!r:.200} is not an adapter inside `--loras`", param="lora_path")
    return path
