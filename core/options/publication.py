"""Options for publishing models, by itself or at the end of a conversion."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from exl2flow.core.options.base import Device, Options

# The Hub allows 96 characters, no `--` or `..`, no dot or dash at the end and no `.git`
NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
REPO = rf"^(?!.*(--|\.\.|\.git$)){NAME}/(?=.{{1,96}}$){NAME}$"


def _is_a_name(repo: str) -> str:
    if not re.fullmatch(REPO, repo):
        raise ValueError("the Hub does not allow this name; give it as `org/name`")
    return repo


# The pattern is for forms: as a constraint of the field it would be the error message
RepoName = Annotated[str, AfterValidator(_is_a_name), Field(json_schema_extra={"pattern": REPO})]


class PublishOptions(Options):
    """Where to publish finished models on the Hugging Face Hub, and under which conditions."""

    repo: RepoName = Field(
        description="repository on the Hub for a branch per bitrate, as org/name-exl2; created if "
        "missing",
    )
    private: bool = Field(False, description="leave the repository private after verification")
    force: bool = Field(
        False, description="publish despite quality, gating or licence; the card says so"
    )
    max_kl: float = Field(
        1.0, gt=0, description="refuse models whose KL divergence in nats is above this"
    )
    base_model: RepoName | None = Field(
        None,
        description="the source on the Hub, as org/name, if it was converted from a folder of your "
        "own; empty: as recorded",
    )
    license: str | None = Field(
        None, description="licence id of the source, if the Hub does not state it"
    )
    token_block: str | None = Field(
        None,
        description="Prefect Secret block with a token that may write; empty: the one for fetching "
        "the source, else HF_TOKEN",
    )
    sample_tokens: int = Field(
        8, ge=1, description="tokens that each downloaded model generates before it is released"
    )


class PublishConfig(PublishOptions):
    """Which models to publish on the Hugging Face Hub, where, and under which conditions."""

    models: tuple[Path, ...] = Field(
        min_length=1, description="folders of models converted from one source, one per bitrate"
    )
    measurement: Path | None = Field(
        None, description="measurement.json to publish on `main`; empty: none"
    )
    device: Device = Field("auto", description="where the downloaded models generate a few tokens")
    work_root: Path | None = Field(
        None,
        description="folder for digests and records of what was verified, with room for one "
        "model; empty: `.exl2flow` beside the first model",
    )
