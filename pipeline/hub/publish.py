"""Publish converted models on the Hub: private first, public once the upload has been verified.

One repository per model, one branch per bitrate, the card and the measurement on `main`. Every
step compares with the Hub and does what is missing, so a repeated run continues. Files that are on
the Hub are not sent again; each commit is downloaded and tried once.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub.utils.tqdm import disable_progress_bars

from exl2flow.core import words
from exl2flow.core.errors import NO_JSON, ConfigError, Exl2FlowError, PublicationDamaged
from exl2flow.core.options.base import MEASUREMENT_FILE
from exl2flow.core.options.config import default_work_root
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.runtime.progress import Progress, Tick, report
from exl2flow.core.store.damage import check_output
from exl2flow.core.store.files import digest, exclusive, write_json
from exl2flow.core.store.model_files import is_shard
from exl2flow.core.store.reading import reading
from exl2flow.core.store.source import DIGESTS_FILE
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.card import render_card
from exl2flow.inference.report.publication import (
    CARD_FILE,
    Bitrate,
    Origin,
    describe,
    doubts,
    is_branch,
    origin_problems,
    public_files,
    quality_problems,
    recorded_origins,
    without_paths,
)
from exl2flow.inference.report.record import read_object
from exl2flow.inference.scoring.sample import sample_text
from exl2flow.model.files.measured import ARRAYS, arrays_file, checked_arrays
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.fetch import MAIN
from exl2flow.pipeline.hub.origin import check_account, origin_of_models, refuse
from exl2flow.pipeline.hub.repository import KEPT, Contents, Repository

log = logging.getLogger(__name__)

PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The state on the Hub: branch → commit, files sent by this run, problems overridden."""

    url: str
    branches: Mapping[str, str]
    sent: tuple[str, ...]
    private: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A checked publication: branch → its files, and the problems overridden by `--force`."""

    config: PublishConfig
    repository: Repository
    branches: Mapping[str, Contents]
    notes: tuple[str, ...]


def publish(config: PublishConfig, hub: Hub, *, progress: Progress = report) -> Published:
    """Check, upload, download again, try, and release.

    Raises:
        WorkDirBusy: a conversion is writing one of the models.
        CorruptCheckpoint: a file of a model is not what was compiled.
        ConfigError: the folders cannot be published together.
        PublicationRefused: because of quality, licence or missing facts.
        HubError: the Hub refuses or cannot be reached.
        PublicationDamaged: the Hub's bytes differ from those sent; the repository stays private.
    """
    disable_progress_bars()
    with reading(config.models):  # until all that was sent has been compared with it
        publication = prepare(config, hub)
        sent = upload(publication, progress=progress)
        commits = prove(publication, progress=progress)
    publication.repository.set_private(config.private)
    return Published(
        url=f"{hub.api.endpoint}/{config.repo}",
        branches=commits,
        sent=tuple(sent),
        private=config.private,
        notes=publication.notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationDraft:
    """A publication as checked without the Hub, for `--dry-run`.

    branches: branch → names of its files; notes: problems overridden by `--force`; unchecked: what
    only the Hub can tell.
    """

    card: str
    branches: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]


def draft(config: PublishConfig) -> PublicationDraft:
    """Check all that needs no network, and return what would be published.

    Raises:
        CorruptCheckpoint, ConfigError, PublicationRefused: see `publish`.
    """
    bitrates = _described(config)
    origin = origin_of_models(bitrates, config, None)
    unchecked = [
        f"whether there is a token that may write to `{config.repo}`",
        "other bitrates in the repository, which the card lists and the gate checks, too",
        "whether the models run after they were downloaded again",
    ]
    problems = quality_problems(bitrates, config.max_kl)
    if config.base_model is not None and not recorded_origins(bitrates) and origin.license is None:
        unchecked.insert(0, f"licence and gate of `{origin.repo}`, which the card will name")
    else:
        problems += origin_problems(origin)
    refuse(problems, config)
    notes = tuple(_for_people(problem, bitrates) for problem in problems)
    branches, card = _contents(config, bitrates, bitrates, origin, notes)
    return PublicationDraft(
        card=card,
        branches={branch: tuple(sorted(files)) for branch, files in branches.items()},
        notes=notes,
        unchecked=tuple(unchecked),
    )


def prepare(config: PublishConfig, hub: Hub) -> Publication:
    """Check everything and return the publication; change nothing on the Hub.

    Raises:
        CorruptCheckpoint: a file of a model is not what was compiled.
        ConfigError, PublicationRefused: see `publish`.
    """
    bitrates = _described(config)
    origin = origin_of_models(bitrates, config, hub)
    refuse(quality_problems(bitrates, config.max_kl) + origin_problems(origin), config)
    check_account(config.repo, hub)
    repository = Repository(name=config.repo, hub=hub, memory=_root(config) / DIGESTS_FILE)
    with tempfile.TemporaryDirectory() as folder:
        ours = {bitrate.branch for bitrate in bitrates}
        listed = [*bitrates, *_published_already(repository, ours, Path(folder))]
        problems = quality_problems(listed, config.max_kl) + origin_problems(origin)
        refuse(problems, config)
        for problem in problems:
            log.warning("publishing in spite of: %s", problem)
        for doubt in doubts(listed):
            log.warning("%s", doubt)
        notes = tuple(_for_people(problem, bitrates) for problem in problems)
        branches, _ = _contents(config, bitrates, listed, origin, notes)
    return Publication(config=config, repository=repository, branches=branches, notes=notes)


def _root(config: PublishConfig) -> Path:
    return config.work_root or default_work_root(config.models[0])


def _described(config: PublishConfig) -> tuple[Bitrate, ...]:
    """Return the models as their files describe them; each has a branch of its own."""
    with reading(config.models):
        for model in config.models:
            check_output(model, _root(config))
        bitrates = tuple(describe(folder) for folder in config.models)
    branches = [bitrate.branch for bitrate in bitrates]
    twice = sorted({name for name in branches if branches.count(name) > 1})
    if twice:
        raise ConfigError(
            f"several folders belong to branch `{twice[0]}`; publish only one of them"
        )
    return bitrates


def _contents(
    config: PublishConfig,
    bitrates: Sequence[Bitrate],
    listed: Sequence[Bitrate],
    origin: Origin,
    notes: Sequence[str],
) -> tuple[dict[str, Contents], str]:
    """Return the files of every branch, and their card, which lists these bitrates."""
    measurement = _measurement(config)
    card = render_card(config.repo, listed, origin, notes=notes, has_measurement=bool(measurement))
    branches: dict[str, Contents] = {b.branch: public_files(b, card) for b in bitrates}
    return {**branches, MAIN: {CARD_FILE: card.encode(), **measurement}}, card


def _measurement(config: PublishConfig) -> Contents:
    """Return the measurement's files for `main`; the JSON is a copy without paths if it has any."""
    path = config.measurement
    if path is None:
        return {}
    try:
        content = json.loads(path.read_bytes())
    except NO_JSON as error:
        raise ConfigError(f"cannot read the measurement `{path}`: {words.cause(error)}") from error
    public = without_paths(content)
    files: dict[str, Path | bytes] = {
        MEASUREMENT_FILE: path if public == content else json.dumps(public).encode()
    }
    if isinstance(content, Mapping) and ARRAYS in content:
        files[arrays_file(Path(MEASUREMENT_FILE)).name] = checked_arrays(path, content[ARRAYS])
    return files


def _for_people(problem: str, bitrates: Sequence[Bitrate]) -> str:
    """Return a problem without paths of this machine."""
    for bitrate in bitrates:
        problem = problem.replace(str(bitrate.folder), bitrate.branch)
    return problem


def _published_already(repository: Repository, ours: set[str], folder: Path) -> list[Bitrate]:
    """Return the other bitrates in the repository, described by their small files."""
    others = []
    for branch, commit in (repository.branches() if repository.exists() else {}).items():
        if not is_branch(branch) or branch in ours:
            continue
        files = repository.files(commit)
        names = [name for name in ("config.json", RECORD_FILE, SCORE_FILE) if name in files]
        repository.download(commit, folder / branch, names)
        weights = sum(f.size for name, f in files.items() if is_shard(name))
        others.append(replace(describe(folder / branch, weight_bytes=weights), branch=branch))
    return others


def upload(publication: Publication, *, progress: Progress = report) -> list[str]:
    """Send the files the Hub lacks; return `branch/name` of each file sent.

    The repository is private before anything changes.
    """
    repository, branches = publication.repository, publication.branches
    repository.create()
    for branch in branches:
        repository.create_branch(branch)
    changes = [repository.changes(branch, contents) for branch, contents in branches.items()]
    if any(added or gone for added, gone in changes):
        repository.set_private(True)
    sent: list[str] = []
    total = max(sum(len(added) for added, _ in changes), 1)
    for branch, contents in branches.items():

        def tick(done: int, name: str, before: int = len(sent), branch: str = branch) -> None:
            detail = f"{branch} {name}"
            progress(Tick(stage="upload", done=before + done, total=total, detail=detail))

        sent += [f"{branch}/{name}" for name in repository.send(branch, contents, tick)]
    progress(Tick(stage="upload", done=total, total=total, detail=f"{len(sent)} files"))
    return sent


def prove(publication: Publication, *, progress: Progress = report) -> dict[str, str]:
    """Download every branch again, compare all files, run the models; return branch → commit.

    Skip commits that an earlier run verified.

    Raises:
        PublicationDamaged: a file differs, or a model does not generate.
    """
    repository, branches = publication.repository, publication.branches
    folder = repository.memory.parent / "published"
    file = folder / f"{repository.name.replace('/', '--')}.json"
    newest = repository.branches()
    commits = {branch: newest[branch] for branch in branches}
    total, place = len(commits), file.with_suffix("")
    with exclusive(file):
        proved = read_object(file)
        for done, (branch, commit) in enumerate(commits.items()):
            progress(Tick(stage="verify", done=done, total=total, detail=branch))
            shutil.rmtree(place, ignore_errors=True)  # of a run that was killed or failed to
            if proved.get(branch) != commit:
                _prove_branch(publication, branch, commit, place)
                proved[branch] = commit
                write_json(file, proved)
    progress(Tick(stage="verify", done=total, total=total, detail="all branches"))
    return commits


def _prove_branch(publication: Publication, branch: str, commit: str, place: Path) -> None:
    """Download a branch to a place and compare it; a bitrate must also load and generate."""
    repository, contents = publication.repository, publication.branches[branch]
    place.mkdir(parents=True, exist_ok=True)
    try:
        repository.download(commit, place, list(contents) if branch == MAIN else None)
        damage = _differences(place, contents, repository)
        if not damage and branch != MAIN:
            damage = _trial(place, publication.config)
    finally:  # after a signal, threads may still write there
        shutil.rmtree(place, ignore_errors=True)
    if damage:
        repository.set_private(True)
        raise PublicationDamaged(
            f"`{repository.name}` branch {branch}: {'; '.join(damage)}. The repository stays "
            "private; delete it on the Hub and publish again"
        )


def _differences(place: Path, contents: Contents, repository: Repository) -> list[str]:
    """Describe how downloaded files differ from those sent."""
    files = {path.name: path for path in place.iterdir() if path.is_file()}
    damage = [f"`{name}` is missing" for name in contents if name not in files]
    damage += [f"`{n}` was never sent" for n in files if n not in contents and n not in KEPT]
    for name, content in contents.items():
        if name in files and (got := digest(files[name])) != (sent := repository.sha256(content)):
            damage.append(f"`{name}` has sha256 {got}, but {sent} was sent")
    return damage


def _trial(place: Path, config: PublishConfig) -> list[str]:
    """Generate with a downloaded model; describe the failure, if any."""
    try:
        sample_text(place, PROMPT, tokens=config.sample_tokens, seed=0, device=config.device)
    except Exl2FlowError as error:
        return [f"the downloaded model does not run: {error}"]
    return []
