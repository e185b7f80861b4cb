"""Fetch models from the Hugging Face Hub: pinned to a commit, downloaded once, verified.

`fetch` resolves a revision to a commit and keeps that commit for the work root, so a branch that
moves does not change a running conversion. It downloads only the files of a model, compares each
with the Hub's digest, and records their origin next to the folder. An interrupted download resumes
and keeps finished files. A model that is complete here needs no Hub.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.hf_api import ModelInfo, RepoFile
from huggingface_hub.utils.sha import git_hash
from huggingface_hub.utils.tqdm import tqdm

from exl2flow.core.errors import HubError, HubUnavailable, SourceModelError
from exl2flow.core.runtime.progress import Progress, Tick, current
from exl2flow.core.store.files import exclusive, make_folder, sync_files, write_json
from exl2flow.core.store.model_files import is_of_model
from exl2flow.core.store.source import (
    DIGESTS_FILE,
    HubModel,
    digests,
    hub_model,
    provenance,
    provenance_file,
)
from exl2flow.inference.report.record import read_object
from exl2flow.pipeline.hub.client import Hub

log = logging.getLogger(__name__)

MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
PINS_FILE = "sources/pins.json"  # in a work root: `org/name@revision` → commit
MEBIBYTE = 1 << 20
USING_HUB = "source  `{}` is not a folder here; using the Hub's model"
STEPS = 50  # ticks of a download


def local_or_fetched(
    source: Path,
    work_root: Path,
    fetching: Callable[[HubModel], Path],
    *,
    say: Callable[[str], None] = log.info,
) -> Path:
    """Return the folder of a source: itself if it exists, or fetched if it names a Hub model.

    Anything else is returned unchanged; pre-flight reports it.

    Args:
        source: a folder, or `org/name` or `org/name@revision`.
        work_root: where fetched models are stored.
        fetching: fetches a model.
        say: receives a line for the user if the choice may surprise.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the source is a mistyped path, or has no safetensors.
    """
    wanted = hub_model(source, work_root)
    if wanted is not None:
        say(USING_HUB.format(source))
        folder = fetching(wanted)
        say(f"source  `{source}` is commit {folder.parent.name}, in `{folder}`")
        return folder
    if (named := HubModel.of(source)) and named.is_begun(work_root):
        say(f"source  `{source}` is a folder here and is used instead of the Hub's model")
    return source


def fetch(wanted: HubModel, work_root: Path, hub: Hub, *, renew: bool = False) -> Path:
    """Download the files of a model and return their folder.

    The folder is `<work root>/sources/<commit>/<name>`, with a record of its origin next to it. A
    branch or tag stays at the commit this work root started with. If that commit is complete
    here, one request checks whether the branch has moved; it may fail.

    Args:
        renew: whether to use the newest commit of the revision instead.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: it has no safetensors.
    """
    is_fixed = _is_fixed(wanted)
    pinned = None if is_fixed or renew else pinned_commit(wanted, work_root)
    if pinned is not None:
        _say_if_moved(wanted, pinned, hub)
    revision = pinned or wanted.revision
    if (is_fixed or pinned) and is_here(folder := folder_of(wanted, work_root, revision), wanted):
        return folder
    info = hub.call(wanted.repo, lambda: hub.api.model_info(wanted.repo, revision=revision))
    commit = str(info.sha)
    folder = folder_of(wanted, work_root, commit)
    log.info("`%s` is commit %s on the Hub, fetched to `%s`", wanted.repo, commit, folder)
    if not is_fixed:
        pins = work_root / PINS_FILE
        with exclusive(pins):
            write_json(pins, {**read_object(pins), _pin(wanted): commit})
    if not is_here(folder, wanted):
        files = hub.call(wanted.repo, lambda: needed_files(hub, wanted.repo, commit))
        hub.call(wanted.repo, lambda: download(hub, wanted, commit, folder, files), transfers=True)
        write_json(provenance_file(folder), record_of(wanted.repo, wanted.revision, info))
    return folder


def fetched(wanted: HubModel, work_root: Path) -> Path | None:
    """Return the folder that `fetch` would return without downloading, None if there is none."""
    commit = wanted.revision if _is_fixed(wanted) else pinned_commit(wanted, work_root)
    folder = folder_of(wanted, work_root, commit)
    return folder if is_here(folder, wanted) else None


def _is_fixed(wanted: HubModel) -> bool:
    """Return whether the revision is a full commit sha."""
    return COMMIT.fullmatch(wanted.revision or "") is not None


def folder_of(wanted: HubModel, work_root: Path, commit: str | None) -> Path:
    """Return the folder of a commit below a work root."""
    return work_root / "sources" / (commit or "") / wanted.name


def is_here(folder: Path, wanted: HubModel) -> bool:
    """Return whether a model was fetched completely."""
    return (provenance(folder) or {}).get("repo") == wanted.repo


def _pin(wanted: HubModel) -> str:
    return f"{wanted.repo}@{wanted.revision or MAIN}"


def pinned_commit(wanted: HubModel, work_root: Path) -> str | None:
    """Return the commit that a work root started with; None if it has not started."""
    commit = read_object(work_root / PINS_FILE).get(_pin(wanted))
    if isinstance(commit, str):
        return commit
    # older versions stored no pins: use the model fetched last
    records = work_root.glob(f"sources/*/{wanted.name}.source.json")
    for path in sorted(records, key=lambda path: path.stat().st_mtime, reverse=True):
        record = read_object(path)
        if (record.get("repo"), record.get("revision")) == (wanted.repo, wanted.revision):
            return path.parent.name
    return None


def _say_if_moved(wanted: HubModel, commit: str, hub: Hub) -> None:
    """Warn if a revision has moved away from the commit in use; send one request."""
    repo, pinned = wanted.repo, f"{commit}, which this work root started with"
    branch = f"`{wanted.revision or MAIN}` of `{repo}`"
    ask = partial(hub.api.model_info, repo, revision=wanted.revision)
    try:
        now = replace(hub, waits=()).call(repo, ask).sha
    except HubError as error:
        log.warning(
            "cannot check whether %s has moved (%s); using commit %s", branch, error, pinned
        )
        return
    if now != commit:
        way_out = f"to get the new one use `--restart`, or name it: `{repo}@{now}`"
        log.warning("%s has moved to commit %s; using %s; %s", branch, now, pinned, way_out)


def needed_files(hub: Hub, repo: str, commit: str) -> list[RepoFile]:
    """List the files in a commit that a conversion needs.

    Raises:
        SourceModelError: none of them is a safetensors file.
    """
    tree = hub.api.list_repo_tree(repo, revision=commit, recursive=True)
    everything = [entry for entry in tree if isinstance(entry, RepoFile)]
    files = [file for file in everything if is_of_model(file.path)]
    if not any(file.path.endswith(".safetensors") for file in files):
        names = ", ".join(sorted(file.path for file in everything)) or "nothing"
        raise SourceModelError(
            f"`{repo}` has no *.safetensors at its top level, but {names}; choose a repository or "
            "revision with the weights in that format"
        )
    return files


def download(hub: Hub, wanted: HubModel, commit: str, folder: Path, files: list[RepoFile]) -> None:
    """Download files of a model into `folder_of` it, and compare them with the Hub's digests.

    Raises:
        HubUnavailable: some differ; they are deleted, and the next attempt fetches them again.
    """
    make_folder(folder)
    hub.api.snapshot_download(
        wanted.repo,
        revision=commit,
        local_dir=folder,
        allow_patterns=[file.path for file in files],
        tqdm_class=meter(current(), sum(file.size for file in files), wanted.repo),
    )
    sync_files(folder / file.path for file in files)  # before digests are remembered
    large = [folder / file.path for file in files if file.lfs is not None]
    sha256 = digests(sorted(large), folder.parents[2] / DIGESTS_FILE)
    check_arrived(wanted.repo, folder, files, sha256)


def check_arrived(
    repo: str, folder: Path, files: Iterable[RepoFile], sha256: Mapping[Path, str]
) -> None:
    """Compare downloaded files with the Hub's digests.

    Args:
        repo: their repository, for messages.
        folder: what their paths are relative to.
        files: as the Hub lists them.
        sha256: digests of the large ones, by path.

    Raises:
        HubUnavailable: some differ; they are deleted, and the next attempt fetches them again.
    """
    damaged = list[str]()
    for file in files:
        path = folder / file.path
        if file.lfs is not None:
            kind, actual, expected = "sha256", sha256[path], file.lfs.sha256
        else:
            kind, actual, expected = "git digest", git_hash(path.read_bytes()), file.blob_id
        if actual != expected:
            for part in (path.resolve(), path):  # in a cache, a link leads to the content
                part.unlink(missing_ok=True)
            damaged.append(
                f"`{file.path}` of `{repo}` arrived with {kind} {actual}, the Hub says {expected}"
            )
    if damaged:
        raise HubUnavailable(f"damaged on the Hub or in transit: {'; '.join(damaged)}")


def meter(progress: Progress, total: int, repo: str) -> type[tqdm]:
    """Return a progress bar class for the client that reports ticks and draws nothing.

    The client may count bytes on several bars, for network and disk; the one furthest ahead counts.
    """

    class Meter(tqdm):
        _shown = -1

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # tqdm
            self._received = 0

        def update(self, n: float | None = 1) -> None:
            """Count bytes and tick after each further step of the download."""
            if not self._counts_bytes:
                return
            self._received += int(n or 0)
            step = self._received * STEPS // max(total, 1)
            if step > Meter._shown:
                Meter._shown = step
                done, whole = (-(-n // MEBIBYTE) for n in (min(self._received, total), total))
                detail = f"MiB of {repo}"
                progress(Tick(stage="fetch", done=done, total=max(whole, 1), detail=detail))

    return Meter


def record_of(repo: str, revision: str | None, info: ModelInfo) -> dict[str, object]:
    """Return the record that `core.store.source.provenance` reads."""
    card: Any = info.card_data or {}
    return {
        "repo": repo,
        "revision": revision,
        "commit": info.sha,
        **{key: card.get(key) for key in ("license", "license_name", "license_link")},
        "gated": bool(info.gated),
    }
