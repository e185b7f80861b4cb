"""Errors as HTTP answers: the status of each class is data, the body has OpenAI's form."""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from exl2flow.core import errors

log = logging.getLogger("exl2flow.serve")
RETRY_SECONDS = "5"
SERVER_ERROR = "server_error"
# by status
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: SERVER_ERROR,
    501: "not_implemented",
    503: "unavailable_error",
}
# the first class that an error is an instance of; all others are 500
STATUSES: tuple[tuple[type[Exception], int, str | None], ...] = (
    (errors.ContextOverflow, 400, "context_length_exceeded"),
    (errors.CacheFull, 400, "context_length_exceeded"),
    (errors.FilterDeadEnd, 400, "filter_dead_end"),
    (errors.ConfigError, 400, None),
    (errors.ChatTemplateError, 400, None),
    (errors.UnknownPromptFormat, 400, None),
)
INPUT_STATUS = 400  # of ids outside the vocabulary, found before anything runs
PARAM = re.compile(r"`([a-z_]+)`")


class ApiError(errors.Exl2FlowError):
    """An answer other than 200."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def as_api_error(error: Exception, *, is_input: bool = False) -> ApiError:
    """Return what a client is told of an error.

    is_input: it was raised while the request was prepared, before anything ran.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, param=_param(str(error)))
    is_refusal = is_input and type(error) is errors.InferenceError
    if is_refusal or isinstance(error, UnicodeEncodeError):
        return ApiError(INPUT_STATUS, str(error), param=_param(str(error)))
    return ApiError(500, "")


def _param(message: str) -> str | None:
    found = PARAM.search(message)
    return found[1] if found else None


def body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the JSON of an error; that of a defect tells nothing but the request's id."""
    message = str(error)
    if error.status == 500:
        message = f"internal error; the server's log says more about request {request_id}"
    kind = TYPES.get(error.status, TYPES[400])
    inner = {"message": message, "type": kind, "param": error.param, "code": error.code}
    return {"error": inner}


def headers(status: int) -> dict[str, str]:
    """Return what tells clients whether to try again."""
    if status == 500:
        return {"x-should-retry": "false"}
    return {"retry-after": RETRY_SECONDS} if status in (429, 503) else {}


def response(error: ApiError, request_id: str, more: Mapping[str, str] | None = None) -> Response:
    """Return the answer of a request that fails."""
    return Response(
        json.dumps(body(error, request_id)),
        status_code=error.status,
        media_type="application/json",
        headers={**headers(error.status), **(more or {})},
    )


def logged(error: Exception, request_id: str, *, is_input: bool = False) -> ApiError:
    """Return what a client is told of an error; a defect goes to the log."""
    told = as_api_error(error, is_input=is_input)
    if told.status == 500:
        log.error("request %s failed", request_id, exc_info=error)
    return told
