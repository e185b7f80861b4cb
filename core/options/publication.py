"""Options for publishing models, by itself or at the end of a conversion."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from exl2flow.core.options.base import Device, Option, Options, measurement_path
from exl2flow.core.options.given import EMPTY, Given, OptionalPath, Paths

# The Hub allows 96 characters, no `--` or `..`, no dot or dash at the end and no `.git`
NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
REPO = rf"^(?!.*(--|\.\.|\.git$)){NAME}/(?=.{{1,96}}$){NAME}$"


def _is_a_name(repo: str) -> str:
    if not re.fullmatch(REPO, repo):
        raise ValueError("the Hub does not allow this name; give it as `org/name`")
    return repo


# The pattern is for forms: as a constraint of the field it would be the error message
RepoName = Annotated[str, AfterValidator(_is_a_name), Field(json_schema_extra={"pattern": REPO})]
MeasurementPath = Annotated[Path, AfterValidator(measurement_path)]
MeasurementField = Given[MeasurementPath | None, Path | str | None]


class PublishOptions(Options):
    """Where to publish finished models on the Hugging Face Hub, and under which conditions."""

    repo: Annotated[RepoName, Option("ORG/NAME", "Publishing", grouped="publish", rare=False)] = (
        Field(
            description="repository on the Hugging Face Hub, with a branch per bitrate; created if "
            "missing"
        )
    )
    private: Annotated[bool, Option(panel="Publishing")] = Field(
        default=False, description="keep the repository private after verification"
    )
    force: Annotated[bool, Option(panel="Publishing")] = Field(
        default=False, description="publish despite quality, gating or licence; the card says so"
    )
    max_kl: Annotated[float, Option("NATS", "Publishing")] = Field(
        default=1.0, gt=0, description="refuse models with a KL divergence above this, in nats"
    )
    base_model: Annotated[RepoName | None, Option("ORG/NAME", "Publishing")] = Field(
        default=None,
        description="the source on the Hub, if it was converted from a local folder; empty: as "
        "recorded",
    )
    license: Annotated[str | None, Option("ID", "Publishing")] = Field(
        default=None, description="the source's licence, as an id of the Hub; empty: as recorded"
    )
    token_block: str | None = Field(
        default=None,
        description="Prefect Secret block with a token that may write; empty: the one for fetching "
        "the source, else HF_TOKEN or the one of `hf auth login`",
    )
    sample_tokens: int = Field(
        default=8,
        ge=1,
        description="tokens that each downloaded model generates before it is released",
    )


class PublishConfig(PublishOptions):
    """Which models to publish on the Hugging Face Hub, where, and under which conditions."""

    models: Annotated[Paths, Option("FOLDER...", is_argument=True)] = Field(
        min_length=1,
        description="output folders of `exl2flow convert` for one source, one per bitrate",
    )
    measurement: Annotated[MeasurementField, Option("FILE", "Publishing")] = Field(
        default=EMPTY,
        description="measurement.json to publish on `main`, or its folder; empty: none",
    )
    device: Annotated[Device, Option("auto|cpu|cuda", "Publishing")] = Field(
        default="auto", description="where to try the downloaded models: auto, cpu, cuda or cuda:N"
    )
    token_block: Annotated[str | None, Option("NAME", "Publishing")] = Field(
        default=None,
        description="Prefect Secret block with a token that may write; empty: the token in "
        "HF_TOKEN or of `hf auth login`",
    )
    work_root: OptionalPath = Field(
        default=EMPTY,
        description="folder for digests and records of what was verified, with room for one "
        "model; empty: `.exl2flow` beside the first model",
    )
