"""The client for the Hugging Face Hub: retry transient failures, explain the others."""

import base64
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from exl2flow.core.errors import ConfigError, Exl2FlowError, HubError, HubUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITS = (1.0, 5.0, 20.0, 60.0)  # seconds before further attempts
LONGEST_WAIT = 600.0  # seconds; a longer Retry-After is an error
SILENCE = 5.0  # seconds without an answer before a log line says so
TIMEOUT = 30.0  # seconds that one attempt waits for an answer
HIDDEN = "***"  # replaces secrets in messages
HTTP_LIBRARIES = ("httpx", "httpx2", "requests")  # versions of the client use different ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A client, its timeout in seconds, and whether the Hub has answered it yet.

    login: name and password of a mirror, as `name:password`; empty without.
    """

    api: HfApi
    login: str = ""
    waits: tuple[float, ...] = WAITS
    silence: float = SILENCE
    timeout: float = TIMEOUT
    has_answered: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def open(cls, token: str | None = None) -> "Hub":
        """Return a client; without a token it uses the one in the environment, if any.

        Raises:
            ConfigError: the token cannot be sent.
        """
        _check_token(token or get_token() or "")
        parts = urlsplit(constants.ENDPOINT)
        login, _, host = parts.netloc.rpartition("@")
        login, name = unquote(login), "exl2flow"
        api = HfApi(
            endpoint=parts._replace(netloc=host).geturl(),  # which the client's logs show
            token=token,
            library_name=name,
            library_version=version(name),
            headers={"authorization": f"Basic {_base64(login)}"} if login else None,
        )
        return cls(api=api, login=login)

    def call(self, subject: str, function: Callable[[], T], *, transfers: bool = False) -> T:
        """Call a function that sends requests to the Hub, retrying transient failures.

        A host name that does not resolve is retried only if the Hub has answered before.

        Args:
            subject: the repository, for messages.
            function: must be safe to repeat.
            transfers: whether it transfers files, which has no time limit.

        Raises:
            HubError: what failed and what to do.
        """
        for pause in (*self.waits, None):
            try:
                answer = function() if transfers else self._answer(subject, function)
                self.has_answered.set()
                return answer
            except Exl2FlowError as error:
                failure = error
            except Exception as error:
                failure = self.explained(error, subject)
                if _is_unresolved(error) and not self.has_answered.is_set():
                    raise failure from None
            if not isinstance(failure, HubUnavailable) or pause is None:
                # The client's errors hold the request, whose headers hold the token
                raise failure from None
            seconds = max(pause, failure.wait or 0.0)
            if seconds > LONGEST_WAIT:
                raise failure from None
            log.warning("%s; next attempt in %.0f s", failure, seconds)
            time.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def _answer(self, subject: str, function: Callable[[], T]) -> T:
        """Run one attempt on a thread, because the client itself waits forever.

        A thread without an answer is abandoned; it does not keep the process alive.

        Raises:
            TimeoutError: no answer within `timeout`.
        """
        answer = Future[T]()

        def attempt() -> None:
            try:
                answer.set_result(function())
            except Exception as error:  # raised again below, in the caller's thread
                answer.set_exception(error)

        threading.Thread(target=attempt, name="hub", daemon=True).start()
        if wait([answer], self.silence).not_done:
            log.warning("waiting for %s: no answer for `%s` yet", self.api.endpoint, subject)
            if wait([answer], self.timeout - self.silence).not_done:
                raise TimeoutError(f"no answer within {self.timeout:.0f} s")
        return answer.result()

    def explained(self, error: Exception, subject: str) -> HubError:
        """Turn a client error into one with advice; transient ones become `HubUnavailable`."""
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        text = f"{type(causes[-1]).__name__}: {causes[-1]}".strip().partition("\n")[0]
        explained = HubError(f"the Hub's client failed on `{subject}`: {text}")
        for cause in causes:
            if found := self._explained(cause, subject):
                explained = found
                break
        explained.args = (self._without_secrets(str(explained)),)
        return explained

    def _without_secrets(self, text: str) -> str:
        """Return what the Hub or its client says, without a token or password that it repeats."""
        token = str(self.api.token or get_token() or "")
        password = self.login.partition(":")[2]
        for secret in (token, self.login, _base64(self.login), password, quote(password, safe="")):
            text = text.replace(secret, HIDDEN) if secret else text
        return text

    def _explained(self, error: BaseException, subject: str) -> HubError | None:
        page = f"{self.api.endpoint}/{subject}"
        match error:
            case LocalEntryNotFoundError():
                return None  # its cause explains more
            case LocalTokenNotFoundError():
                return HubError(
                    f"`{subject}` needs a token and there is none; set HF_TOKEN or run "
                    "`hf auth login` (or name a Secret block with `--token-block`)"
                )
            case OfflineModeIsEnabled():
                return HubError(f"`{subject}`: HF_HUB_OFFLINE is set; unset it to use the Hub")
            case GatedRepoError():
                return HubError(
                    f"`{subject}` is gated: accept its terms at {page} with the account whose "
                    "token you use (`hf auth login` or HF_TOKEN), then repeat the command"
                )
            case RevisionNotFoundError():
                return HubError(f"`{subject}` has no such revision; see {page}/refs")
            case RepositoryNotFoundError():
                return HubError(
                    f"no `{subject}` on the Hub, or it is private: check the name; for a "
                    "private one run `hf auth login`, or set HF_TOKEN to a token that may read it"
                )
            case HfHubHTTPError():
                return _of_status(error, subject)
        is_network = type(error).__module__.partition(".")[0] in HTTP_LIBRARIES
        if is_network or (isinstance(error, ConnectionError | TimeoutError)):
            kind = f"{type(error).__name__}: {error}".partition("\n")[0]
            return HubUnavailable(
                f"the Hub cannot be reached for `{subject}` ({kind}); check the connection to "
                f"{self.api.endpoint}"
            )
        if isinstance(error, OSError):
            if error.errno is None:  # the client found a file of the wrong size
                return HubUnavailable(f"`{subject}`: {str(error).partition(chr(10))[0]}")
            return HubError(
                f"`{error.filename or subject}`: {error.strerror}; free space or fix "
                "the permissions, then repeat the command"
            )
        return None


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _is_unresolved(error: BaseException | None) -> bool:
    """Return whether the Hub's host name does not resolve."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def _of_status(error: HfHubHTTPError, subject: str) -> HubError:
    """Turn an HTTP status into an error with advice."""
    response = error.response
    status = response.status_code
    reason = response.headers.get("X-Error-Message") or response.reason_phrase
    if status == 401:
        return HubError(
            f"the Hub does not accept the token for `{subject}`: it is missing, wrong or expired; "
            "set HF_TOKEN to a valid one, or run `hf auth login` (or name a Secret block with "
            "`--token-block`)"
        )
    if status == 403:
        return HubError(
            f"the token does not permit this for `{subject}` ({reason}); use one with write access"
        )
    if status == 429 or status >= 500:
        after = response.headers.get("Retry-After", "")
        wait = float(after) if after.isdigit() else None
        return HubUnavailable(f"the Hub answered {status} ({reason}) for `{subject}`", wait=wait)
    return HubError(f"the Hub answered {status} ({reason}) for `{subject}`")


def _check_token(token: str) -> None:
    """Refuse a token that cannot be sent in a header, without showing it.

    Raises:
        ConfigError: it has spaces or other characters that tokens never have.
    """
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            "the token for the Hub has characters that no token has, such as spaces or accents; "
            "copy it again into HF_TOKEN (or into the Secret block of `--token-block`)"
        )
