"""Outline a model on the Hub: fetch its small files, and of its weights only the headers.

A run can thus be checked, or refused, before the download. What cannot be outlined, because a
mirror serves no parts of files or the disk has no room, is checked after it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from exl2flow.core.errors import Exl2FlowError, HubError, HubUnavailable
from exl2flow.core.runtime.progress import reporting_to
from exl2flow.core.store.files import digest
from exl2flow.core.store.model_files import CONFIG_FILE, is_shard
from exl2flow.core.store.outline import Outline
from exl2flow.core.store.shard_index import INDEX_FILE
from exl2flow.core.store.source import HubModel, hub_model
from exl2flow.pipeline.hub.client import TIMEOUT, Hub
from exl2flow.pipeline.hub.fetch import (
    USING_HUB,
    download,
    fetched,
    folder_of,
    is_here,
    needed_files,
    pinned_commit,
)
from exl2flow.pipeline.hub.variants import Variant

log = logging.getLogger(__name__)

ATTEMPTS = 2  # retries of a request; the download itself is tried more often
READERS = 8  # files whose headers are fetched at a time
LENGTH_BYTES = 8  # a file begins with its header's length, little-endian
LONGEST_HEADER = 100_000_000  # bytes; the safetensors library reads no longer ones
PARTIAL_CONTENT = 206


@contextmanager
def outlined(
    source: Path,
    work_root: Path,
    opened: Callable[[], Hub],
    *,
    renew: bool = False,
    say: Callable[[str], None] = log.debug,
) -> Iterator[Path | None]:
    """Provide the outline of a source while the block runs.

    It is None for folders, for models that are fetched already, and for models that cannot be
    outlined. Errors of the block name the model on the Hub, not the temporary folder.

    Args:
        source: a folder, or `org/name` or `org/name@revision`.
        work_root: where the model would be fetched to.
        opened: returns a client.
        renew: whether to use the newest commit of the revision.
        say: receives a line for the user if the choice of the Hub may surprise.

    Raises:
        HubError: no such model, or the token may not read it.
        SourceModelError: the source is a mistyped path, or has no safetensors.
    """
    wanted = hub_model(source, work_root)
    if wanted is None:
        yield None
        return
    say(USING_HUB.format(source))
    try:
        temporary = TemporaryDirectory(prefix="exl2flow-", ignore_cleanup_errors=True)
    except OSError as error:
        _say_not_outlined(wanted, error)
        yield None
        return
    with temporary:
        root = Path(temporary.name).resolve()
        folder = _outline(wanted, work_root, root, opened(), renew=renew)
        if folder is not None:
            say(f"source  `{source}` is commit {folder.parent.name}; checked before it is fetched")
        try:
            yield folder
        except Exl2FlowError as error:
            if folder is not None:
                name = f"{wanted.repo}@{folder.parent.name}"
                error.args = (str(error).replace(str(folder), name),)
            raise


def _outline(
    wanted: HubModel, work_root: Path, root: Path, hub: Hub, *, renew: bool
) -> Path | None:
    """Make the outline of a model below `root`; None if it is here, or cannot be outlined."""
    if not renew and fetched(wanted, work_root) is not None:
        return None
    hub = replace(hub, waits=hub.waits[:ATTEMPTS])
    begun = None if renew else pinned_commit(wanted, work_root)
    revision = begun or wanted.revision
    try:
        info = hub.call(wanted.repo, lambda: hub.api.model_info(wanted.repo, revision=revision))
        commit = str(info.sha)
        if is_here(folder_of(wanted, work_root, commit), wanted):
            return None
        files = hub.call(wanted.repo, lambda: needed_files(hub, wanted.repo, commit))
    except HubUnavailable as error:
        _say_not_outlined(wanted, error)
        return None
    folder, place = (folder_of(wanted, where, commit) for where in (root, work_root))
    shards = [file for file in files if file.lfs is not None and is_shard(file.path)]
    small = [file for file in files if file not in shards]
    try:
        with reporting_to(lambda tick: None):  # it is not yet the fetch that a run reports
            fetch_small = partial(download, hub, wanted, commit, folder, small)
            hub.call(wanted.repo, fetch_small, transfers=True)
        placed = [(commit, file, folder / file.path) for file in shards]
        write = partial(_write_headers, hub, wanted.repo, placed)
        hub.call(wanted.repo, write, transfers=True)
        digests = {file.path: digest(folder / file.path) for file in small}
        digests |= {file.path: file.lfs.sha256 for file in shards if file.lfs is not None}
        left = max(sum(file.size for file in files) - _bytes_in(place), 0)
        record = Outline(place=str(place.resolve()), download_bytes=left, digests=digests)
        record.write(folder)
    except (HubError, OSError) as error:
        _say_not_outlined(wanted, error)
        return None
    return folder


@contextmanager
def headers_of(hub: Hub, models: Sequence[Variant]) -> Iterator[list[Path]]:
    """Provide, while the block runs, a folder for each model: its config and headers of weights.

    Args:
        hub: a client.
        models: of one repository, as the Hub lists them.

    Raises:
        HubError: they cannot be read, or the server sends no parts of files.
    """
    with TemporaryDirectory(prefix="exl2flow-", ignore_cleanup_errors=True) as temporary:
        root = Path(temporary).resolve()
        folders = [root / f"{index:04}" for index in range(len(models))]  # none begins another
        shards = list[tuple[str, RepoFile, Path]]()
        for model, folder in zip(models, folders, strict=True):
            folder.mkdir()
            for file in model.files:
                place = folder / Path(file.path).name
                if is_shard(place.name):
                    shards.append((model.commit, file, place))
                elif place.name in (CONFIG_FILE, INDEX_FILE):
                    _copy(hub, model, file, place)
            Outline(place=str(folder), download_bytes=model.size, digests={}).write(folder)
        if shards:
            repo = models[0].repo
            hub.call(repo, partial(_write_headers, hub, repo, shards), transfers=True)
        yield folders


def _copy(hub: Hub, model: Variant, file: RepoFile, place: Path) -> None:
    """Copy a small file of a model; the Hub's cache keeps it."""
    fetch = partial(hub.api.hf_hub_download, model.repo, file.path, revision=model.commit)
    place.write_bytes(Path(hub.call(model.repo, fetch)).read_bytes())


def _say_not_outlined(wanted: HubModel, error: Exception) -> None:
    log.warning("cannot check `%s` before it is fetched (%s); checking it then", wanted.repo, error)


def _bytes_in(folder: Path) -> int:
    """Return the bytes that an interrupted download left in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_headers(hub: Hub, repo: str, shards: Sequence[tuple[str, RepoFile, Path]]) -> None:
    """Write sparse files of the shards' sizes that begin with their headers.

    Args:
        hub: a client.
        repo: `org/name`.
        shards: commit, file and where to write it, of each.
    """

    def write(placed: tuple[str, RepoFile, Path]) -> None:
        commit, shard, path = placed
        part = partial(_part, hub, repo, commit, shard.path)
        start = part(range(min(LENGTH_BYTES, shard.size)))
        length = int.from_bytes(start, "little")
        is_header = 0 < length <= min(LONGEST_HEADER, shard.size - LENGTH_BYTES)
        with path.open("wb") as file:
            file.write(start)
            if is_header:  # else the check of the file says what is wrong
                file.write(part(range(LENGTH_BYTES, LENGTH_BYTES + length)))
            file.truncate(shard.size)

    with ThreadPoolExecutor(READERS, thread_name_prefix="exl2flow-header") as threads:
        list(threads.map(write, shards))


def _part(hub: Hub, repo: str, commit: str, name: str, where: range) -> bytes:
    """Return bytes of a file on the Hub.

    Raises:
        HubError: the server sends something else, such as the whole file.
    """
    if not where:
        return b""
    api = hub.api
    headers = build_hf_headers(
        token=api.token,
        library_name=api.library_name,
        library_version=api.library_version,
        headers=api.headers,
    )
    asked = {"Range": f"bytes={where[0]}-{where[-1]}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    with get_session().stream("GET", url, headers={**headers, **asked}, timeout=TIMEOUT) as answer:
        if answer.is_error:
            answer.read()
        hf_raise_for_status(answer)
        if answer.status_code != PARTIAL_CONTENT:
            raise HubError(f"the server of `{name}` sends no parts of files")
        content = answer.read()
    if len(content) != len(where):
        raise HubUnavailable(f"`{name}` of `{repo}` arrived in part")
    return content
