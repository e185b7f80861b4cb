"""Errors as HTTP answers, in the form of a path's dialect; the status of each class is data."""

import logging
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from exl2flow.core import errors

log = logging.getLogger("exl2flow.serve")
INVALID = "invalid_request_error"
TYPES = {  # of other statuses than 400
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented",
    503: "unavailable_error",
}
LATER = {"retry-after": "5"}
NEVER = {"x-should-retry": "false"}
HEADERS = {500: NEVER, 501: NEVER, 429: LATER, 503: LATER, 529: LATER}
MESSAGES = re.compile(r"(/v1)?/messages(/|$)")
MESSAGES_STATUSES = {429: 529}
MESSAGES_TYPES = TYPES | {413: "request_too_large", 529: "overloaded_error"}
MESSAGES_TYPES |= dict.fromkeys((500, 501, 503), "api_error")
# the first class that an error is an instance of; all others are 500
STATUSES: tuple[tuple[type[Exception], int, str | None], ...] = (
    (errors.ContextOverflow, 400, "context_length_exceeded"),
    (errors.CacheFull, 400, "context_length_exceeded"),
    (errors.FilterDeadEnd, 400, "filter_dead_end"),
    (errors.TextStuck, 400, None),
    (errors.ConfigError, 400, None),
    (errors.ChatTemplateError, 400, None),
    (errors.UnknownPromptFormat, 400, None),
)
PARAM = re.compile(r"`([a-z_]+)`")
# absolute paths: whole, in quotes; else without spaces, from two levels on
QUOTED_PATH = re.compile(r"([`'\"])(/(?:(?!\1)[^\n])+)\1")
PLAIN_PATH = re.compile(r"(?<![^\s(=:,])/(?:[\w.@+~-]+/)+([\w.@+~-]+)(?![\w/])")


class ApiError(errors.Exl2FlowError):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """retry_after: seconds, other than those of the status."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Return the error with the client's names of our fields."""
        if not names or self.status != 400:
            return self
        text = PARAM.sub(lambda found: f"`{names.get(found[1], found[1])}`", str(self))
        param = self.param and names.get(self.param, self.param)
        return ApiError(self.status, text, code=self.code, param=param)


def shown(error: Exception) -> str:
    """Return what is wrong as clients may read it: files by their names, without the folders."""
    text = QUOTED_PATH.sub(lambda at: f"{at[1]}{PurePosixPath(at[2]).name}{at[1]}", str(error))
    return PLAIN_PATH.sub(r"\1", text)


def as_api_error(error: Exception, request_id: str, *, is_input: bool = False) -> ApiError:
    """Return what a client is told of an error; a defect goes to the log, and tells only an id.

    is_input: it was raised while the request was prepared, before anything ran.
    """
    if isinstance(error, ApiError):
        return error
    text, found = shown(error), PARAM.search(str(error))
    if is_input and type(error) is errors.InferenceError:  # such as ids out of range
        return ApiError(400, text, param=found and found[1])
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(status, text, code=code, param=found and found[1])
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"internal error; the server's log says more about request {request_id}")


def body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error."""
    kind = TYPES.get(error.status, INVALID)
    row = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": row}


def messages_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error in Anthropic's form."""
    kind = MESSAGES_TYPES.get(MESSAGES_STATUSES.get(error.status, error.status), INVALID)
    row = {"type": kind, "message": str(error)}
    return {"type": "error", "error": row, "request_id": request_id}


def response(error: ApiError, scope: Scope, more: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer of a request that fails."""
    content, status = body(error), error.status
    if MESSAGES.match(scope["path"]):
        content = messages_body(error, scope["state"]["request_id"])
        status = MESSAGES_STATUSES.get(status, status)
    headers = {**HEADERS.get(status, {}), **error.headers, **(more or {})}
    return JSONResponse(content, status, headers)
