"""A receiver of the Hub's webhooks: a push to a model's main branch becomes an event."""

import hmac
import socket
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field, ValidationError

from exl2flow.flows.watch import RepoId
from exl2flow.tasks.revisions import Revision, announce

MAIN = "refs/heads/main"
UNAUTHORIZED, BAD_REQUEST = 401, 400


class _Event(BaseModel):
    action: str
    scope: str


class _Repo(BaseModel):
    type: str
    name: RepoId


class _Ref(BaseModel):
    ref: str
    newSha: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None


class _Message(BaseModel):
    """The fields of the Hub's message that are used here; it has more."""

    event: _Event
    repo: _Repo
    updatedRefs: tuple[_Ref, ...] = ()

    def revision(self) -> Revision | None:
        """Return the new head of a model's main branch, None for any other message."""
        is_push = self.event.action == "update" and self.event.scope.startswith("repo.content")
        heads = [ref.newSha for ref in self.updatedRefs if ref.ref == MAIN and ref.newSha]
        if not (is_push and self.repo.type == "model" and heads):
            return None
        return Revision(repo_id=self.repo.name, revision=heads[-1])


def receiver(secret: str) -> FastAPI:
    """Return the application, which answers `POST /` and requires this secret."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/")
    async def receive(
        request: Request, x_webhook_secret: Annotated[str, Header()] = ""
    ) -> dict[str, str]:
        if not hmac.compare_digest(x_webhook_secret.encode(), secret.encode()):
            raise HTTPException(UNAUTHORIZED, "X-Webhook-Secret is wrong")
        try:
            message = _Message.model_validate_json(await request.body())
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, e["loc"])) or "JSON" for e in error.errors())
            raise HTTPException(BAD_REQUEST, f"not a message of the Hub: {fields}") from error
        revision = message.revision()
        if revision is None:
            raise HTTPException(
                BAD_REQUEST, "only pushes to the main branch of a model are accepted"
            )
        await run_in_threadpool(announce, [revision])
        return {"repo_id": revision.repo_id, "revision": revision.revision}

    return app


def serve(listener: socket.socket, secret: str) -> None:
    """Receive until a signal ends the process."""
    uvicorn.Server(uvicorn.Config(receiver(secret), log_level="info")).run([listener])
