"""What a user can set: validated on construction, stored as JSON, shown as a form by Prefect.

Every default lives here and nowhere else.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from exl2flow.core.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Objective = Literal["log", "sum", "power"]
HEAD_BITS = (2, 3, 4, 5, 6, 8)


class Options(BaseModel):
    """Base of all option groups: immutable, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CalibrationOptions(Options):
    """Which token rows Hessians and errors are taken from."""

    file: Path | None = Field(None, description="Parquet with text columns; empty: built-in set")
    rows: int = Field(115, ge=1, description="rows that quantization sees")
    row_tokens: int = Field(2048, ge=32, multiple_of=32, description="tokens per quantization row")
    measure_rows: int = Field(19, ge=1, description="rows that measurement sees")
    measure_row_tokens: int = Field(2048, ge=32, multiple_of=32, description="tokens per such row")
    seed: int = Field(0, ge=0, description="seed of shuffled and random-token rows")


class RopeOptions(Options):
    """Overrides of the rotary position embedding during conversion only."""

    scale: float | None = Field(None, gt=0, description="divide positions by this")
    alpha: float | None = Field(None, gt=0, description="NTK factor on the rotary base")


class AllocateOptions(Options):
    """How bits are allotted."""

    objective: Objective = Field(
        "power", description="log: sum of ln error; sum: of error; power: of error ** power"
    )
    power: float = Field(2.0, gt=0, le=8, description="exponent of the objective `power`")


class ValidateOptions(Options):
    """What the result is compared on, and when it is refused."""

    text: Path | None = Field(None, description="UTF-8 text file; empty: built-in held-out text")
    rows: int = Field(8, ge=1, description="rows at most")
    row_tokens: int = Field(2048, ge=2, description="tokens per row")
    warn_perplexity_ratio: float = Field(1.3, gt=0, description="warn above this x the source's")
    fail_perplexity_ratio: float = Field(3.0, gt=0, description="fail above this x the source's")
    sample_prompt: str = Field("One morning", description="prompt of the generated sample")
    sample_tokens: int = Field(64, ge=0, description="tokens of the generated sample")
    sample_seed: int = Field(0, ge=0, description="seed of the generated sample")


class ConversionConfig(Options):
    """One conversion: a Hugging Face folder in, an EXL2 folder and a report out."""

    source: Path = Field(description="folder with config.json, tokenizer and *.safetensors")
    out: Path = Field(description="folder that receives the converted model")
    bpw: float = Field(4.0, ge=2, le=8, description="bits per weight of the decoder's matrices")
    head_bits: int = Field(6, description="bits of the output head: 2, 3, 4, 5, 6 or 8")
    work_root: Path | None = Field(
        None, description="folder of checkpoints; empty: `.exl2flow` beside the output"
    )
    device: Device = Field("auto", description="auto, cpu or cuda")
    measurement: Path | None = Field(
        None, description="measurement.json to use instead of measuring"
    )
    shard_size_mb: int = Field(8192, description="MiB per output file; 0 or less: one file")
    calibration: CalibrationOptions = CalibrationOptions()
    rope: RopeOptions = RopeOptions()
    allocate: AllocateOptions = AllocateOptions()
    validate_options: ValidateOptions = ValidateOptions()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_bits not in HEAD_BITS:
            raise ValueError(f"`head_bits` is {self.head_bits}; choose one of {HEAD_BITS}")
        if self.out.expanduser().resolve() == self.source.expanduser().resolve():
            raise ValueError("`out` is the source folder; choose another one")
        return self

    @property
    def work_dir_root(self) -> Path:
        """Where the work directories of all models lie."""
        return (self.work_root or self.out.resolve().parent / ".exl2flow").resolve()

    @property
    def run_name(self) -> str:
        """Model and bits per weight, for people."""
        return f"{self.source.resolve().name}@{self.bpw:g}bpw"


def build_config(**values: object) -> ConversionConfig:
    """Build a `ConversionConfig`, turning validation errors into one `ConfigError`."""
    try:
        return ConversionConfig.model_validate(values)
    except ValidationError as error:
        problems = [
            ".".join(str(part) for part in item["loc"])
            + ": "
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError("; ".join(problems)) from error
