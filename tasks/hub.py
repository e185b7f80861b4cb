"""The Hugging Face Hub: what is asked of it, again where that helps, and errors with advice.

`fetch` brings a model here: the revision is resolved to a commit first, only the files that a
conversion needs are downloaded, each is compared with the Hub's digest, and a record of where they
came from lies beside the folder. A download that was cut goes on; finished files stay.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoFile
from huggingface_hub.utils.tqdm import tqdm

from exl2flow.core.errors import Exl2FlowError, HubError, HubUnavailable, SourceModelError
from exl2flow.core.files import write_json
from exl2flow.core.progress import Progress, Tick, current
from exl2flow.core.source import HubModel, digests, hub_model, provenance, provenance_file

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITS = (1.0, 5.0, 20.0, 60.0)  # seconds before further attempts
LONGEST_WAIT = 600.0  # that the Hub may ask for
HTTP_LIBRARIES = ("httpx", "httpx2", "requests")  # which of them depends on the client's version
NEEDED = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "LICENSE*", "README.md")
NOT_NEEDED = ("consolidated*", "*.bin.index.json", "*/*")  # second copies of weights, folders
MEBIBYTE = 1 << 20
STEPS = 50  # ticks of a download


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A client, how patient it is, and whether the Hub has answered it."""

    api: HfApi
    waits: tuple[float, ...] = WAITS
    has_answered: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def open(cls, token: str | None = None) -> "Hub":
        """Return a client; without a token it takes the one of the environment, if there is one."""
        name = "exl2flow"
        return cls(api=HfApi(token=token, library_name=name, library_version=version(name)))

    def call(self, subject: str, function: Callable[[], T]) -> T:
        """Return what a function that asks the Hub returns, asking again where that can help.

        A Hub whose name has no address at the first request has none some seconds later.

        Args:
            subject: the repository, for messages.
            function: must be harmless to repeat.

        Raises:
            HubError: what failed and what to do.
        """
        for wait in (*self.waits, None):
            try:
                answer = function()
                self.has_answered.set()
                return answer
            except Exl2FlowError as error:
                found = error
            except Exception as error:
                found = self.explained(error, subject)
                if _is_unresolved(error) and not self.has_answered.is_set():
                    raise found from None
            if not isinstance(found, HubUnavailable) or wait is None:
                # The client's errors hold the request, whose headers hold the token
                raise found from None
            seconds = max(wait, found.wait or 0.0)
            if seconds > LONGEST_WAIT:
                raise found from None
            log.warning("%s; next attempt in %.0f s", found, seconds)
            time.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def explained(self, error: Exception, subject: str) -> HubError:
        """Return an error of the client as one with advice; what may pass is `HubUnavailable`."""
        for cause in _causes(error):
            found = self._explained(cause, subject)
            if found is not None:
                return found
        text = f"{type(cause).__name__}: {cause}".strip().partition("\n")[0]
        return HubError(f"the Hub's client failed on `{subject}`: {text}")

    def _explained(self, error: BaseException, subject: str) -> HubError | None:
        page = f"{self.api.endpoint}/{subject}"
        match error:
            case LocalEntryNotFoundError():
                return None  # its cause tells more
            case LocalTokenNotFoundError():
                return HubError(
                    f"`{subject}` asks for a token and there is none; set HF_TOKEN (or name a "
                    "Secret block with `--token-block`)"
                )
            case OfflineModeIsEnabled():
                return HubError(f"`{subject}`: HF_HUB_OFFLINE is set; unset it to ask the Hub")
            case GatedRepoError():
                return HubError(
                    f"`{subject}` is gated: accept its terms at {page} with the account whose "
                    "token is in HF_TOKEN, then repeat the command"
                )
            case RevisionNotFoundError():
                return HubError(f"`{subject}` has no such revision; see {page}/refs")
            case RepositoryNotFoundError():
                return HubError(
                    f"there is no `{subject}` on the Hub, or it is private: check the name; for a "
                    "private one set HF_TOKEN to a token that may read it"
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
            if error.errno is None:  # the client found a file of another size
                return HubUnavailable(f"`{subject}`: {str(error).partition(chr(10))[0]}")
            return HubError(f"`{error.filename or subject}`: {error.strerror}; free space or fix "
                            "the permissions, then repeat the command")  # fmt: skip
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_unresolved(error: BaseException | None) -> bool:
    """Tell whether the Hub's name has no address."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def _of_status(error: HfHubHTTPError, subject: str) -> HubError:
    """Return what an HTTP status means."""
    response = error.response
    status = response.status_code
    said = response.headers.get("X-Error-Message") or response.reason_phrase
    if status == 401:
        return HubError(
            f"the Hub does not accept the token for `{subject}`: it is missing, wrong or expired; "
            "set HF_TOKEN to a valid one (or name a Secret block with `--token-block`)"
        )
    if status == 403:
        return HubError(
            f"the token may not do this to `{subject}` ({said}); use one with write access to it"
        )
    if status == 429 or status >= 500:
        after = response.headers.get("Retry-After", "")
        wait = float(after) if after.isdigit() else None
        return HubUnavailable(f"the Hub answered {status} ({said}) for `{subject}`", wait=wait)
    return HubError(f"the Hub answered {status} ({said}) for `{subject}`")


def local_source(source: Path, work_root: Path, hub: Hub) -> Path:
    """Return the folder of a source: itself if it exists, else fetched if it names a Hub model.

    Anything else is returned as it is, for the checks before a conversion to complain about.

    Raises:
        HubError: the model cannot be had.
        SourceModelError: it has no safetensors, or is a mistyped path.
    """
    wanted = hub_model(source, work_root)
    return source if wanted is None else fetch(wanted, work_root, hub)


def fetch(wanted: HubModel, work_root: Path, hub: Hub) -> Path:
    """Download what a conversion needs of a model, and return the folder.

    It is `<work root>/sources/<commit>/<name>`; a record of its origin lies beside it.

    Raises:
        HubError: the model cannot be had.
        SourceModelError: it has no safetensors.
    """
    info = hub.call(wanted.repo, lambda: hub.api.model_info(wanted.repo, revision=wanted.revision))
    folder = work_root / "sources" / str(info.sha) / wanted.name
    log.info("`%s` is commit %s on the Hub, taken to `%s`", wanted.repo, info.sha, folder)
    if provenance(folder) is None:
        files = hub.call(wanted.repo, lambda: needed_files(hub, wanted.repo, str(info.sha)))
        hub.call(wanted.repo, lambda: _download(hub, wanted, str(info.sha), folder, files))
        write_json(provenance_file(folder), _record(wanted, info))
    return folder


def needed_files(hub: Hub, repo: str, commit: str) -> list[RepoFile]:
    """Return the files of a commit that a conversion needs.

    Raises:
        SourceModelError: there is no safetensors among them.
    """
    tree = hub.api.list_repo_tree(repo, revision=commit, recursive=True)
    everything = [entry for entry in tree if isinstance(entry, RepoFile)]
    files = [
        file
        for file in everything
        if any(Path(file.path).match(pattern) for pattern in NEEDED)
        and not any(Path(file.path).match(pattern) for pattern in NOT_NEEDED)
    ]
    if not any(file.path.endswith(".safetensors") for file in files):
        names = ", ".join(sorted(file.path for file in everything)) or "nothing"
        raise SourceModelError(
            f"`{repo}` has no *.safetensors at its top, but {names}; choose a repository or "
            "revision with the weights in that format"
        )
    return files


def _download(hub: Hub, wanted: HubModel, commit: str, folder: Path, files: list[RepoFile]) -> None:
    """Bring the files here and compare the large ones with the Hub's digests.

    Raises:
        HubUnavailable: one differs; it is gone, so that another attempt fetches it again.
    """
    hub.api.snapshot_download(
        wanted.repo,
        revision=commit,
        local_dir=folder,
        allow_patterns=[file.path for file in files],
        tqdm_class=_meter(current(), sum(file.size for file in files), wanted.repo),
    )
    large = {file.path: file.lfs.sha256 for file in files if file.lfs is not None}
    memory = folder.parents[2] / "digests.json"
    for name, sha256 in digests([folder / name for name in sorted(large)], memory).items():
        if sha256 != large[name]:
            (folder / name).unlink()
            raise HubUnavailable(
                f"`{name}` of `{wanted.repo}` arrived with sha256 {sha256}, the Hub says "
                f"{large[name]}: it was damaged there or on the way"
            )


def _tick(received: int, total: int, repo: str) -> Tick:
    """Return the progress of a download; the last part of a mebibyte counts as one."""
    done, whole = (-(-size // MEBIBYTE) for size in (min(received, total), total))
    return Tick(stage="fetch", done=done, total=max(whole, 1), detail=f"MiB of {repo}")


def _meter(progress: Progress, total: int, repo: str) -> type[tqdm]:
    """Return a class of bars that the client moves and that draw nothing but tick."""

    class Meter(tqdm):
        _shown = -1

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = str(kwargs.get("name", "")).endswith(".transfer")
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # tqdm
            self._received = 0

        def update(self, n: float | None = 1) -> None:
            """Count, and tick when another part of the download has come."""
            if not self._counts_bytes:
                return
            self._received += int(n or 0)
            step = self._received * STEPS // max(total, 1)
            if step != self._shown:
                self._shown = step
                progress(_tick(self._received, total, repo))

    return Meter


def _record(wanted: HubModel, info: ModelInfo) -> dict[str, object]:
    """Return what `core.source.provenance` reads."""
    card = dict(info.card_data.to_dict()) if info.card_data else {}  # type: ignore[no-untyped-call]  # theirs
    return {
        "repo": wanted.repo,
        "revision": wanted.revision,
        "commit": info.sha,
        **{key: card.get(key) for key in ("license", "license_name", "license_link")},
        "gated": bool(info.gated),
    }
