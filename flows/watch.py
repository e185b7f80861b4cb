"""The flow `watch`: look for new revisions on the Hub, and emit an event for each."""

from pathlib import Path
from typing import Annotated, Self

from prefect import flow
from pydantic import Field, model_validator

from exl2flow.core.options.config import Options
from exl2flow.core.store.files import read_json, write_json
from exl2flow.tasks.logs import logged
from exl2flow.tasks.revisions import Revision, announce, newest_revisions

RepoId = Annotated[str, Field(pattern=r"^\w[\w.-]*/\w[\w.-]*$")]
Author = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
WATCHED = "watched"  # stored as the commit of an author


class WatchConfig(Options):
    """Repositories and authors on the Hugging Face Hub to watch."""

    repositories: tuple[RepoId, ...] = Field((), description="repositories, as org/name")
    authors: tuple[Author, ...] = Field(
        (), description="organizations or users; all of their models are watched"
    )
    include_existing: bool = Field(
        False,
        description="announce what exists at the first look at a repository or author; otherwise "
        "only remember it",
    )
    work_root: Path = Field(Path("watch"), description="folder for the file of last seen revisions")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.repositories and not self.authors:
            raise ValueError("nothing to watch; name `repositories` or `authors`")
        return self

    @property
    def run_name(self) -> str:
        """Repositories and authors, for people."""
        return ", ".join([*self.repositories, *self.authors])


@flow(flow_run_name="{config.run_name}", persist_result=False)
def watch(config: WatchConfig) -> list[Revision]:
    """Announce the revisions that are new since the last run by an event each, and return them.

    They are stored after the events: a run that is killed in between announces some twice, and
    misses none.

    Raises:
        HubError: a repository cannot be read.
        CorruptCheckpoint: the file of last seen revisions is damaged.
    """
    with logged():
        file = config.work_root / "revisions.json"
        seen: dict[str, str] = read_json(file) if file.exists() else {}
        revisions = newest_revisions(config.repositories, config.authors)
        new = [r for r in revisions if _is_new(r, seen, include_existing=config.include_existing)]
        if new:
            announce(new)
        file.parent.mkdir(parents=True, exist_ok=True)
        looked_at = {_all_of(author): WATCHED for author in config.authors}
        write_json(file, {**seen, **looked_at, **{r.repo_id: r.revision for r in revisions}})
        return new


def _all_of(author: str) -> str:
    """Return the key in the file that says that an author was looked at."""
    return f"{author.lower()}/*"  # the Hub ignores case in names of authors


def _is_new(revision: Revision, seen: dict[str, str], *, include_existing: bool) -> bool:
    """Return whether a commit is news; a repository's first one is if its author was known."""
    if revision.repo_id not in seen:
        return include_existing or _all_of(revision.repo_id.partition("/")[0]) in seen
    return seen[revision.repo_id] != revision.revision
