"""The Hub's cache on this machine: which models it holds in full, and what a download adds.

Its layout is that of `huggingface_hub`, with which other programs share it: `blobs` hold contents
by digest, `snapshots` link to them by commit, `refs` name commits.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile

from exl2flow.core.store.files import write_text
from exl2flow.core.store.model_files import (
    CARRIED,
    CONFIG_FILE,
    MEASURED,
    SECOND_COPIES,
    WEIGHTS,
    is_shard,
)
from exl2flow.inference.report.record import read_object
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.variants import Variant, models_in, quantized, telling

NUMBERED = re.compile(r"(?P<stem>.*)-\d+-of-0*(?P<count>\d+)\.safetensors")


def cache_of(repo: str) -> Path:
    """Return the folder of a repository in the cache."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def missing(repo: str, files: Iterable[RepoFile]) -> list[RepoFile]:
    """Return the files whose contents are not in the cache, of whatever commit."""
    blobs = cache_of(repo) / "blobs"
    digests = ((file, file.lfs.sha256 if file.lfs else file.blob_id) for file in files)
    return [file for file, digest in digests if not (blobs / digest).exists()]


def remember(variant: Variant) -> None:
    """Let a branch or tag lead to its commit without the Hub."""
    if variant.revision != variant.commit:
        write_text(cache_of(variant.repo) / "refs" / variant.revision, variant.commit)


def cached(hub: Hub, repo: str, revision: str | None = None) -> list[Variant]:
    """Return the variants that the cache holds in full; no request is sent.

    Args:
        hub: a client.
        repo: `org/name`.
        revision: looks only at this branch, tag or commit.
    """
    snapshots, refs = cache_of(repo) / "snapshots", cache_of(repo) / "refs"
    heads = {path.name: path.name for path in snapshots.glob("*") if path.is_dir()}
    paths = (path for path in sorted(refs.rglob("*")) if path.is_file())
    named = {str(path.relative_to(refs)): path.read_text().strip() for path in paths}
    if revision is not None:
        heads = {commit: revision for commit in [named.get(revision, revision)] if commit in heads}
    elif named:
        heads = {commit: name for commit, name in telling(named).items() if commit in heads}
    found = [
        _variant(repo, commit, name, folder, snapshots / commit)
        for commit, name in heads.items()
        for folder, inside in models_in(_files(snapshots / commit)).items()
        if _is_complete(hub, repo, commit, folder, inside)
    ]
    return sorted(found, key=lambda one: -(one.bits or 0))


def _files(snapshot: Path) -> list[str]:
    """Return the paths of the files of a snapshot, without links that lead nowhere."""
    return [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]


def _is_complete(hub: Hub, repo: str, commit: str, folder: str, paths: Iterable[str]) -> bool:
    """Return whether a model is here as a whole: by the client's listing, and by names of shards.

    The client keeps listings of what it fetched with `snapshot_download` alone.
    """
    shards = defaultdict[tuple[str, int], set[str]](set)
    for path in paths:
        if is_shard(path.rpartition("/")[2]) and (match := NUMBERED.fullmatch(path)):
            shards[match["stem"], int(match["count"])].add(path)
    if any(len(names) < count for (_, count), names in shards.items()):
        return False
    inside = f"{folder}/".lstrip("/")
    try:
        hub.api.snapshot_download(
            repo,
            revision=commit,
            local_files_only=True,
            allow_patterns=[inside + name for name in (CONFIG_FILE, *WEIGHTS, *sorted(CARRIED))],
            ignore_patterns=[inside + name for name in ("*/*", SECOND_COPIES, MEASURED)],
        )
    except LocalEntryNotFoundError:
        return False
    return True


def _variant(repo: str, commit: str, revision: str, folder: str, snapshot: Path) -> Variant:
    place = snapshot / folder
    is_exl2, bits = quantized(read_object(place / CONFIG_FILE), folder, revision, repo)
    names = (name for name in _files(snapshot) if (snapshot / name).parent == place)
    return Variant(
        repo=repo,
        revision=revision,
        commit=commit,
        folder=folder,
        bits=bits,
        size=sum((snapshot / name).stat().st_size for name in names),
        is_exl2=is_exl2,
    )
