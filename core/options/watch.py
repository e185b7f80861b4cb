"""Options of `watch`: what to look at on the Hub."""

from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import Field, model_validator

from exl2flow.core.options.base import Options
from exl2flow.core.options.given import PathField

RepoId = Annotated[str, Field(pattern=r"^\w[\w.-]*/\w[\w.-]*$")]
Author = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class WatchConfig(Options):
    """Repositories and authors on the Hugging Face Hub to watch."""

    repositories: tuple[RepoId, ...] = Field(default=(), description="repositories, as org/name")
    authors: tuple[Author, ...] = Field(
        default=(), description="organizations or users; all of their models are watched"
    )
    include_existing: bool = Field(
        default=False,
        description="announce what exists at the first look at a repository or author; otherwise "
        "only remember it",
    )
    work_root: PathField = Field(
        default=cast(Any, Path("watch")), description="folder for the file of last seen revisions"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.repositories and not self.authors:
            raise ValueError("nothing to watch; name `repositories` or `authors`")
        return self

    @property
    def run_name(self) -> str:
        """Repositories and authors, for people."""
        return ", ".join([*self.repositories, *self.authors])
