"""Options for publishing models, on their own or at the end of a conversion."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from exl2flow.core.options import Device, Options

REPO = r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$"


def _is_a_name(repo: str) -> str:
    if not re.fullmatch(REPO, repo):
        raise ValueError("give it as `org/name`")
    return repo


# The pattern is for forms only: as a bound it would replace the error message above
RepoName = Annotated[str, AfterValidator(_is_a_name), Field(json_schema_extra={"pattern": REPO})]


class PublishOptions(Options):
    """Where to publish finished models on the Hugging Face Hub, and on which conditions."""

    repo: RepoName = Field(
        description="repository on the Hub that receives a branch per bitrate, as org/name-exl2; "
        "made when missing",
    )
    private: bool = Field(False, description="leave the repository private when all is verified")
    force: bool = Field(
        False, description="publish in spite of quality, gating or licence; the card says so"
    )
    max_kl: float = Field(
        1.0, gt=0, description="refuse models whose KL divergence in nats is above this"
    )
    base_model: RepoName | None = Field(
        None,
        description="the source on the Hub, as org/name, if it is a folder that was not fetched "
        "from there; empty: as recorded",
    )
    license: str | None = Field(
        None, description="licence id of the source, if the Hub does not tell it"
    )
    token_block: str | None = Field(
        None,
        description="Prefect Secret block with a token that may write; empty: the one that the "
        "source is fetched with, else HF_TOKEN",
    )
    sample_tokens: int = Field(
        8, ge=1, description="tokens that each downloaded model generates before it is released"
    )


class PublishConfig(PublishOptions):
    """Which models to publish where on the Hugging Face Hub, and on which conditions."""

    models: tuple[Path, ...] = Field(
        min_length=1, description="folders of converted models, one per bitrate, of one source"
    )
    measurement: Path | None = Field(
        None, description="measurement.json to publish on the main branch; empty: none"
    )
    device: Device = Field("auto", description="where the downloaded models generate a few tokens")
    work_root: Path | None = Field(
        None,
        description="folder that remembers digests and what was verified, with room for one "
        "model; empty: `.exl2flow` beside the first model",
    )
