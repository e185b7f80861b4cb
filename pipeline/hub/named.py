"""EXL2 models by name: choose one of those that a repository on the Hub offers, and fetch it.

A name leads to one commit, and everything is fetched by that commit, into the Hub's own cache.
Without the Hub, what the cache holds in full is offered.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants

from exl2flow.core import words
from exl2flow.core.errors import HubError, HubUnavailable, SourceModelError
from exl2flow.core.model_name import HubName
from exl2flow.core.runtime.progress import current
from exl2flow.core.store.files import digest
from exl2flow.pipeline.hub.cached import cache_of, cached, missing, remember
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.fetch import MAIN, check_arrived, meter
from exl2flow.pipeline.hub.variants import Variant, bits_of, variants

log = logging.getLogger(__name__)

ATTEMPTS = 1  # retries of a request, where the cache may serve instead
WORKERS = 2  # files at a time: an interruption loses those that are under way
TOLERANCE = 0.05  # bits per weight between a model and what is asked for
EXACT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """The models that a name may mean. where: whose they are, for messages."""

    name: HubName
    models: Sequence[Variant]
    where: str = "it has"

    def named(self, choice: str | None) -> list[Variant]:
        """Return the EXL2 models that a choice means: by the name of a branch or folder, or bits.

        Without a choice, a model at the top level of the revision itself comes first.
        """
        models = [one for one in self.models if one.is_exl2]
        if choice is None:
            own = (self.name.revision or MAIN, "")
            return [one for one in models if (one.revision, one.folder) == own] or models
        if by_name := [one for one in models if choice in _names(one)]:
            return by_name
        if (bits := bits_of(choice)) is None:
            return []
        known = [(abs(one.bits - bits), one) for one in models if one.bits is not None]
        exact = [one for distance, one in known if distance < EXACT]
        near = [one for distance, one in known if distance < TOLERANCE + EXACT]
        return exact if len(exact) == 1 else near

    def choose(self) -> Variant:
        """Return the one model that the name means.

        Raises:
            SourceModelError: none or several; the message says what to type.
        """
        found = self.named(self.name.choice)
        if len(found) == 1:
            return found[0]
        if found:
            raise SourceModelError(
                f"`{self.name}` may be one of {len(found)} EXL2 models; type one of "
                f"these names:\n{self.listed(found)}"
            )
        repo = self.name.repo
        if models := [one for one in self.models if one.is_exl2]:
            raise SourceModelError(
                f"`{repo}` has no EXL2 model `{self.name.choice}`; {self.where}:"
                f"\n{self.listed(models)}"
            )
        own, at = repo.rpartition("/")[2], HubName(repo=repo, revision=self.name.revision)
        raise SourceModelError(
            f"`{at}` has no EXL2 model, {self._others()}; name a repository that has, or convert "
            f"one yourself: `exl2flow convert {at} --out ./{own}-4.0bpw --bpw 4.0`, "
            f"then use `./{own}-4.0bpw`"
        )

    def _others(self) -> str:
        if not self.models:
            return "nor any other model (a `config.json` beside `*.safetensors`)"
        sizes = ", ".join(f"`{_place(one)}` ({words.size(one.size)})" for one in self.models)
        return f"but weights of another kind in {sizes}"

    def listed(self, models: Sequence[Variant]) -> str:
        """Return a line for each model: what to type for it, its bits, its size, its place."""
        rows = [
            (self.typed(one), f"{_bits(one)} bits per weight", words.size(one.size), _place(one))
            for one in models
        ]
        widths = [max(len(row[index]) for row in rows) for index in range(3)]
        return "\n".join(
            "  "
            + "  ".join([*(text.ljust(n) for text, n in zip(row, widths, strict=False)), place])
            for *row, place in rows
        )

    def typed(self, model: Variant) -> str:
        """Return the shortest name that means a model alone."""
        bits = [] if model.bits is None else [f"{model.bits:g}", f"{model.bits:.1f}"]
        bits = [text for text in bits[::-1] if float(text) == model.bits][:1]
        for choice in (*bits, *_names(model)):
            if self.named(choice) == [model]:
                return str(replace(self.name, choice=choice))
        name = HubName(repo=model.repo, revision=model.revision, choice=model.folder or None)
        return str(name)


def _names(model: Variant) -> tuple[str, ...]:
    """Return the names that a choice may give: those of the folder, else of the branch."""
    if not model.folder:
        return (model.revision,)
    return model.folder.rpartition("/")[2], model.folder


def _bits(model: Variant) -> str:
    return words.UNKNOWN if model.bits is None else f"{model.bits:.2f}"


def _place(model: Variant) -> str:
    return f"{model.revision}/{model.folder}".rstrip("/")


def folder_of(name: HubName, hub: Hub, *, say: Callable[[str], None] = log.info) -> Path:
    """Return the folder of a model in the Hub's cache; fetch what it lacks.

    Args:
        name: which model.
        hub: a client.
        say: receives lines for the user.

    Raises:
        HubError: the model cannot be fetched, or the disk has no room for it.
        SourceModelError: the name means none or several; the message says what to type.
    """
    model = offers_of(name, hub, say=say).choose()
    if model.files:
        download(name, model, hub, say=say)
    return cache_of(model.repo) / "snapshots" / model.commit / model.folder


def offers_of(name: HubName, hub: Hub, *, say: Callable[[str], None] = log.info) -> Offers:
    """Return what the Hub offers under a name, or else the cache.

    Raises:
        HubError: no such repository or revision, or neither the Hub nor the cache has it.
    """
    here = cached(hub, name.repo, name.revision)
    if constants.HF_HUB_OFFLINE:
        failure = HubError(
            f"`{name.repo}` is not in `{constants.HF_HUB_CACHE}`, and HF_HUB_OFFLINE is set; "
            "unset it and repeat the command"
        )
        why = "HF_HUB_OFFLINE is set"
    else:
        quick = replace(hub, waits=hub.waits[:ATTEMPTS]) if here else hub
        try:
            return Offers(name=name, models=variants(quick, name.repo, name.revision))
        except HubUnavailable as error:
            failure, why = error, str(error)
    if not here:
        raise failure
    say(f"{why}; using what `{constants.HF_HUB_CACHE}` has of `{name.repo}`")
    return Offers(name=name, models=here, where="without the Hub, the cache has")


def download(
    name: HubName, model: Variant, hub: Hub, *, say: Callable[[str], None] = log.info
) -> None:
    """Fetch the files of a model that the cache lacks, and compare them with the Hub's digests.

    Finished files stay if this is interrupted; a connection that is cut goes on within a file.

    Raises:
        HubError: the files cannot be fetched, or the disk has no room for them.
    """
    files, snapshot = model.files, cache_of(model.repo) / "snapshots" / model.commit
    if wanted := missing(model.repo, files):
        check_room(name, sum(file.size for file in wanted))
        place = f"`{_place(model)}` at commit {model.commit[:8]}, {words.size(model.size)}"
        say(f"fetching `{name}` ({place}) to `{constants.HF_HUB_CACHE}`")

    def fetch() -> None:
        wanted = missing(model.repo, files)
        hub.api.snapshot_download(
            model.repo,
            revision=model.commit,
            allow_patterns=[file.path for file in files],
            max_workers=WORKERS,
            tqdm_class=meter(current(), sum(file.size for file in wanted), model.repo),
        )
        large = (snapshot / file.path for file in wanted if file.lfs is not None)
        check_arrived(model.repo, snapshot, wanted, {path: digest(path) for path in large})

    hub.call(model.repo, fetch, transfers=True)
    remember(model)


def check_room(name: HubName, needed: int) -> None:
    """Raise `HubError` if the disk of the cache has no room for a download."""
    cache = Path(constants.HF_HUB_CACHE)
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise HubError(
            f"`{name}` takes {words.size(needed)} ({needed:,} bytes) in `{cache}`, whose disk has "
            f"{words.size(free)} ({free:,} bytes) free; free space, choose fewer bits, or set "
            "HF_HOME to a folder on a larger disk"
        )
