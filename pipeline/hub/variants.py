"""The models that a repository on the Hub offers, at which bitrates: from listings and configs.

EXL2 repositories hold one bitrate per branch or per folder and name them by habit: `4.0bpw`, `4_0`,
`6.5bpw-h8`. The method comes from `config.json`, because EXL3 repositories use the same names.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.hf_api import RepoFile

from exl2flow.core.reports import mapping, number
from exl2flow.core.store.model_files import CONFIG_FILE, is_of_model, is_shard
from exl2flow.inference.report.record import read_object
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.fetch import MAIN

READERS = 8  # requests at a time
NUMBER = r"(?P<bits>\d{1,2}(?:[._]\d{1,3})?)"
WITH_UNIT = re.compile(rf"(?<![\d.]){NUMBER}[-_ ]?bpw", re.I)  # 4.0bpw, 4_0bpw, 6.5bpw-h8
ALONE = re.compile(rf"{NUMBER}([-_]h\d)?", re.I)  # 4.0, 4_0, 4.0-h6
LEAST_BITS, MOST_BITS = 1.0, 16.0  # per weight; other numbers are versions
METHOD = "exl2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model of a repository: one branch or tag, or one folder of it.

    revision: branch, tag or commit that leads to it. commit: what that is now. folder: within the
    repository, empty for its top level. bits: per weight, None where neither a name nor the config
    tells. size: bytes of all its files. files: these, as the Hub lists them.
    """

    repo: str
    revision: str
    commit: str
    folder: str
    bits: float | None
    size: int
    is_exl2: bool
    files: tuple[RepoFile, ...] = field(default=(), repr=False)


def variants(hub: Hub, repo: str, revision: str | None = None) -> list[Variant]:
    """Return what a repository offers, EXL2 or not, by descending bits, then size.

    This reads listings and `config.json` files, never weights. A commit that several branches or
    tags name appears once. A repository without models gives an empty list.

    Args:
        hub: a client; `Hub.open()` makes one.
        repo: `org/name`.
        revision: looks only at this branch, tag or commit; None: at all branches and tags.

    Raises:
        HubError: no such repository or revision, or it cannot be read.
    """
    heads = _heads(hub, repo, revision)
    with ThreadPoolExecutor(READERS, thread_name_prefix="exl2flow-variants") as threads:
        trees = threads.map(partial(_files, hub, repo), heads)
        found = [
            (commit, name, folder, tuple(tree[path] for path in paths))
            for (commit, name), tree in zip(heads.items(), trees, strict=True)
            for folder, paths in models_in(tree).items()
        ]
        configs = threads.map(lambda one: _config(hub, repo, one[0], one[2]), found)
        offers = [_variant(repo, *one, config) for one, config in zip(found, configs, strict=True)]
    return sorted(offers, key=lambda one: (-(one.bits or MOST_BITS), -one.size, one.revision))


def bits_of(*names: str) -> float | None:
    """Return the bits per weight that the first of these names tells, if any does."""
    for name in names:
        match = WITH_UNIT.search(name) or ALONE.fullmatch(name)
        bits = float(match["bits"].replace("_", ".")) if match else 0.0
        if LEAST_BITS <= bits <= MOST_BITS:
            return bits
    return None


def quantized(
    config: Mapping[str, Any], folder: str, revision: str, repo: str
) -> tuple[bool, float | None]:
    """Return whether a model is EXL2, and its bits, from its config and the names it goes by.

    Old versions of exllamav2 wrote nothing into the config; names with `bpw` then decide.
    """
    block = mapping(config.get("quantization_config"))
    own, repo_name = folder.rpartition("/")[2], repo.rpartition("/")[2]
    bits = bits_of(own, revision) or number(block.get("bits")) or bits_of(repo_name)
    if block:
        return block.get("quant_method") == METHOD, bits
    is_named = any(WITH_UNIT.search(name) for name in (own, revision, repo_name))
    is_named |= METHOD in repo_name.lower() and bits is not None
    return is_named, bits if is_named else None


def models_in(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return folder → paths of the model in it; a model has a config and weights."""
    folders = dict[str, list[str]]()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if is_of_model(name):
            folders.setdefault(folder, []).append(path)
    return {folder: inside for folder, inside in folders.items() if _is_model(inside)}


def _is_model(paths: Iterable[str]) -> bool:
    names = [path.rpartition("/")[2] for path in paths]
    return CONFIG_FILE in names and any(map(is_shard, names))


def telling(named: Mapping[str, str]) -> dict[str, str]:
    """Return commit → the one of its names that tells the most: bits, else main, else the last."""
    names = sorted(named, key=lambda name: (bits_of(name) is not None, name == MAIN))
    return {named[name]: name for name in names}


def _heads(hub: Hub, repo: str, revision: str | None) -> dict[str, str]:
    """Return commit → the name that tells the most about it."""
    if revision is not None:
        info = hub.call(repo, lambda: hub.api.model_info(repo, revision=revision))
        return {str(info.sha): revision}
    refs = hub.call(repo, lambda: hub.api.list_repo_refs(repo))
    named = {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}
    return telling(named)


def _files(hub: Hub, repo: str, commit: str) -> dict[str, RepoFile]:
    """Return path → file of a commit."""

    def listed() -> dict[str, RepoFile]:
        tree = hub.api.list_repo_tree(repo, revision=commit, recursive=True)
        return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    return hub.call(repo, listed)


def _config(hub: Hub, repo: str, commit: str, folder: str) -> Mapping[str, Any]:
    """Return a model's config, empty if it is none."""
    name = f"{folder}/{CONFIG_FILE}".lstrip("/")
    path = hub.call(repo, lambda: hub.api.hf_hub_download(repo, name, revision=commit))
    return read_object(Path(path))


def _variant(
    repo: str,
    commit: str,
    revision: str,
    folder: str,
    files: tuple[RepoFile, ...],
    config: Mapping[str, Any],
) -> Variant:
    is_exl2, bits = quantized(config, folder, revision, repo)
    return Variant(
        repo=repo,
        revision=revision,
        commit=commit,
        folder=folder,
        bits=bits,
        size=sum(file.size for file in files),
        is_exl2=is_exl2,
        files=files,
    )
