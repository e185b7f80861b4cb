"""Groups of a conversion's options: calibration, sensitivity, rounding, tuning, allocation, fit."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic.config import JsonValue

from exl2flow.core.options.base import MOST_STRETCH, CacheName, Option, Options, Size, user_path
from exl2flow.core.options.given import Given

ScaleSearch = Literal["grid", "column"]
Objective = Literal["log", "sum", "power"]
Preference = Literal["quality", "speed"]
Experts = Literal["each", "layer"]
BlockForm = Literal["quantize", "keep", "drop"]
# Schema of a size for forms: pydantic's own nests choices, which forms show without names
SIZE_CHOICES: list[JsonValue] = [
    {"type": "string", "pattern": r"^\s*(\d*\.?\d+)\s*(\w+)?"},
    {"type": "integer", "minimum": 1},
]
MemorySize = Given[Size, int | str]


class CalibrationOptions(Options):
    """Which token rows are used for Hessians and errors."""

    BUILT_IN: ClassVar[tuple[str, ...]] = ("auto", "standard", "chat", "self")

    text: Annotated[str, Option("TEXT", "Calibration", flag="calibration", rare=False)] = Field(
        default="auto",
        min_length=1,
        description="auto: self on a GPU that holds the whole model, else standard; self: the "
        "model writes a share of the rows; standard: the built-in set; chat: a share of it as "
        "dialogues in the model's chat template; else a Parquet file with text columns, best of "
        "the kind that the model will be used for",
    )
    share: Annotated[float, Option("X", "Calibration", flag="calibration-share")] = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share of `chat` or `self` rows, above 0 and at most 1; the rest is the "
        "standard set",
    )
    rows: Annotated[int, Option("N", "Calibration", rare=False)] = Field(
        default=115, ge=1, description="calibration rows for quantization"
    )
    row_tokens: Annotated[int, Option("N", "Calibration")] = Field(
        default=2048, ge=32, multiple_of=32, description="tokens per row; a multiple of 32"
    )
    measure_rows: Annotated[int, Option("N", "Calibration")] = Field(
        default=19, ge=1, description="calibration rows for measurement"
    )
    measure_row_tokens: Annotated[int, Option("N", "Calibration")] = Field(
        default=2048,
        ge=32,
        multiple_of=32,
        description="tokens per measurement row; a multiple of 32",
    )
    seed: Annotated[int, Option("N", "Calibration")] = Field(
        default=0, ge=0, description="seed for shuffled, random-token and self-written rows"
    )

    @field_validator("text", mode="before")
    @classmethod
    def _path_as_text(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith("~"):
            value = Path(value)
        return str(user_path(value)) if isinstance(value, Path) else value

    @property
    def file(self) -> Path | None:
        """The user's Parquet file, if there is one."""
        return None if self.text in self.BUILT_IN else Path(self.text)

    @property
    def dataset(self) -> str:
        """The text's name for records: a file name without its folder, others in brackets."""
        if self.file is not None:
            return self.file.name
        return "(default)" if self.text in ("auto", "standard") else f"({self.text})"

    def special_rows(self, rows: int) -> int:
        """Return how many of `rows` rows are made by `chat` or `self`; 0 for other texts."""
        if self.text not in ("chat", "self"):
            return 0
        return max(1, int(rows * self.share + 0.5))

    @property
    def written_rows(self) -> int:
        """The rows that the model writes, which both mixes share."""
        if self.text != "self":
            return 0
        return max(map(self.special_rows, (self.rows, self.measure_rows)))


class RopeOptions(Options):
    """Overrides for the rotary position embedding, during conversion only."""

    scale: Annotated[float | None, Option("FACTOR", "Calibration", flag="rope-scale")] = Field(
        default=None,
        ge=1 / MOST_STRETCH,
        le=MOST_STRETCH,
        description="divide positions by this during conversion (linear context extension); "
        "empty: as config.json says",
    )
    alpha: Annotated[float | None, Option("FACTOR", "Calibration", flag="rope-alpha")] = Field(
        default=None,
        ge=1 / MOST_STRETCH,
        le=MOST_STRETCH,
        description="NTK factor on the rotary base during conversion; empty: as config.json says",
    )


class SensitivityOptions(Options):
    """How the cost of an error in a matrix is estimated."""

    kind: Annotated[
        Literal["fisher", "error"], Option("fisher|error", "Quality", flag="sensitivity")
    ] = Field(
        default="fisher",
        description="cost by which bits are allocated; fisher: expected KL divergence of each "
        "matrix, from one backward pass; error: relative error of each sublayer, without gradients",
    )
    rows: Annotated[int, Option("N", "Quality", flag="sensitivity-rows")] = Field(
        default=16, ge=1, description="calibration rows for the backward pass"
    )
    block: int = Field(
        default=512, ge=0, description="out-features per block of the output factors; 0: one block"
    )
    seed: int = Field(default=0, ge=0, description="seed of the sampled labels")


class RoundingOptions(Options):
    """Options of rounding, once quantization parameters are chosen."""

    scale_search: ScaleSearch = Field(
        default="column",
        description="column: every column chooses its scale code; grid: one multiplier per group",
    )
    damping: float = Field(default=0.05, gt=0, description="added to a Hessian, in mean diagonals")
    rounds: Annotated[int, Option("N", "Quality")] = Field(
        default=3,
        ge=0,
        description="rounds of scale refitting and coordinate descent after rounding; 0: none",
    )
    sweeps: int = Field(default=2, ge=1, description="sweeps of coordinate descent in each round")
    output_damping: float = Field(
        default=0.3, gt=0, description="added to an output factor, in mean diagonals"
    )
    correction: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="how far matrices compensate for errors of earlier layers, where that helps",
    )
    expert_tokens: Annotated[int, Option("N", "Quality")] = Field(
        default=0,
        ge=0,
        description="tokens below which an expert also learns from tokens that nearly chose it; 0: "
        "as many as it has in-features",
    )
    block_steps: int = Field(
        default=0,
        ge=0,
        description="steps of training a sublayer's codes and scales to return what the source's "
        "returns, after rounding; 0: none",
    )
    block_rate: float = Field(
        default=0.1,
        gt=0,
        description="rate of those codes times the root of `block_steps`, in code units",
    )
    fisher_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of the gradient-weighted Hessian in the Hessian used for rounding",
    )

    def fingerprinted(self) -> dict[str, object]:
        """Return the options that a stage's fingerprint knows; defaults of later ones are not."""
        exclude = set() if self.expert_tokens else {"expert_tokens"}
        if not self.block_steps:
            exclude |= {"block_steps", "block_rate"}
        return self.model_dump(exclude=exclude)


class TuneOptions(Options):
    """How codes and continuous parameters are trained to say what the source says.

    Rates are Adam's. Those of continuous parameters are for an initial divergence of 0.25 nats, and
    scale with its root.
    """

    steps: int = Field(default=0, ge=0, description="steps of training; 0: none")
    layers: int | None = Field(
        default=None,
        ge=0,
        description="layers that are trained together, to return what the source's return; 0: the "
        "whole model, to say what the source says; empty: 0 where memory suffices, else as many as "
        "fit",
    )
    tokens: int | None = Field(
        default=None,
        ge=32,
        description="tokens per step; empty: 2048 on a CPU, 16384 on a GPU, 8192 there if a few "
        "layers are trained together",
    )
    rows: int | None = Field(
        default=None,
        ge=0,
        description="rows to train on that the model writes besides, whatever the calibration "
        "text; empty: 988 on a GPU that holds the whole model, else 0",
    )
    norm_rate: float = Field(
        default=5e-4,
        ge=0,
        description="rate of norms and biases, in units of their root mean square",
    )
    scale_rate: float = Field(
        default=1e-3, ge=0, description="rate of the groups' scales, relative"
    )
    embedding_rate: float = Field(
        default=0, ge=0, description="rate of the embedding, in units of its root mean square"
    )
    code_rate: float = Field(
        default=0.15,
        ge=0,
        description="rate of the codes times the root of `steps`, in code units; 0: they stay, as "
        "they do where memory does not suffice",
    )
    held_out_rows: int = Field(default=4, ge=1, description="rows of text that are only evaluated")
    interval: int = Field(default=50, ge=1, description="steps between evaluations")
    patience: int = Field(
        default=20, ge=1, description="evaluations without improvement before stopping"
    )
    seed: int = Field(default=0, ge=0, description="seed of the order of rows")

    def fingerprinted(self) -> dict[str, object]:
        """Return the options that the stage's fingerprint knows."""
        return self.model_dump(exclude=None if self.layers else {"layers"})


class AllocateOptions(Options):
    """How bits are allocated."""

    prefer: Annotated[Preference, Option("quality|speed", "Bit allocation")] = Field(
        default="quality",
        description="quality: groups of 32, 64 and 128 rows; speed: the layers' matrices only get "
        "groups of 128, which decode a little faster on a GPU; the error grows",
    )
    experts: Annotated[Experts, Option("each|layer", "Bit allocation")] = Field(
        default="each",
        description="each: every expert gets bits of its own; layer: matrices of one role get the "
        "same bits in all experts of a layer; models without experts are allocated alike",
    )
    objective: Annotated[Objective, Option("log|sum|power", "Bit allocation")] = Field(
        default="power",
        description="quantity to minimize over all sublayers: the sum of ln(error), of error, or "
        "of error to a power",
    )
    power: Annotated[float, Option("P", "Bit allocation", flag="objective-power")] = Field(
        default=2.0, gt=0, le=8, description="exponent of the objective `power`; above 0, at most 8"
    )
    rounds: int = Field(
        default=0, ge=0, description="further rounds, which try whole allocations and correct them"
    )


class MtpOptions(Options):
    """What becomes of a model's own block that drafts tokens (MTP); others are not affected."""

    block: Annotated[BlockForm, Option("quantize|keep|drop", "Result", flag="mtp")] = Field(
        default="quantize",
        description="the model's own block that drafts tokens (MTP), where it has one; quantize: "
        "with `mtp-bpw`; keep: as it is stored; drop: left out",
    )
    bpw: Annotated[float, Option("BITS", "Result", flag="mtp-bpw")] = Field(
        default=4.0,
        ge=2,
        le=8,
        description="average bits per weight of that block's matrices, which `bpw` does not count",
    )


class FitOptions(Options):
    """The GPU memory that the result must fit, with the cache of a context."""

    memory: Annotated[MemorySize, Option("SIZE", "Result", flag="fit", rare=False)] = Field(
        gt=0,
        description="instead of `bpw`: memory of the GPU that will run the model, as 24GB; makes "
        "the largest model that fits beside its cache and working memory",
        json_schema_extra={"anyOf": SIZE_CHOICES},
    )
    context: Annotated[int | None, Option("N", "Result")] = Field(
        default=None,
        ge=1,
        description="tokens whose cache must fit; empty: 8192, or the model's if it has fewer",
    )
    cache: Annotated[CacheName, Option("FORMAT", "Result")] = Field(
        default="q8",
        description="format of that cache: fp16, fp8, q8, q8/q6, q6, q6/q4, q4",
    )
