"""What a user can set when models are published: the form of the flow `publish`."""

from pathlib import Path

from pydantic import Field

from exl2flow.core.config import Device, Options

REPO = r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$"


class PublishConfig(Options):
    """Which models go where on the Hugging Face Hub, and under which conditions."""

    models: tuple[Path, ...] = Field(
        min_length=1, description="folders of converted models, one per bitrate, of one source"
    )
    repo: str = Field(
        pattern=REPO, description="repository on the Hub as org/name-exl2; a branch per bitrate"
    )
    private: bool = Field(False, description="leave the repository private when all is verified")
    force: bool = Field(
        False, description="publish in spite of quality or licence; the card says so"
    )
    max_kl: float = Field(
        1.0, gt=0, description="refuse models whose KL divergence in nats is above this"
    )
    base_model: str | None = Field(
        None, pattern=REPO, description="the source on the Hub, if it was converted from a folder"
    )
    license: str | None = Field(
        None, description="licence id of the source, if the Hub does not tell it"
    )
    measurement: Path | None = Field(
        None, description="measurement.json to publish on the main branch; empty: none"
    )
    device: Device = Field("auto", description="where the downloaded models generate a few tokens")
    sample_tokens: int = Field(8, ge=1, description="how many each of them generates")
    token_block: str | None = Field(
        None, description="Prefect Secret block with the Hub's token; empty: HF_TOKEN is used"
    )
