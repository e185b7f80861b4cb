"""Options of a conversion: validated on construction, stored as JSON, shown as a form by Prefect.

Every default lives here and nowhere else.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonValue

from exl2flow.core.options.base import (
    MOST_STRETCH,
    CacheName,
    DeviceOption,
    Option,
    Size,
    SplitModels,
    TokenBlock,
    user_path,
)
from exl2flow.core.options.base import Options as Options
from exl2flow.core.options.given import EMPTY, Given, OptionalPath, PathField
from exl2flow.core.options.naming import model_name
from exl2flow.core.options.publication import MeasurementField, PublishOptions
from exl2flow.core.options.validation import ValidateOptions

ScaleSearch = Literal["grid", "column"]
Objective = Literal["log", "sum", "power"]
Preference = Literal["quality", "speed"]
Experts = Literal["each", "layer"]
Quality = Literal["fast", "standard", "best", "exllamav2"]
HEAD_BITS = (2, 3, 4, 5, 6, 8)
TARGETS = ("bpw", "bpw_total", "target_bytes", "fit")
DEFAULT_BPW, MOST_BPW = 4.0, 8.0
FORM_BEGINS_WITH = (
    *("model", "source", "out", "quality", *TARGETS, "head_bits"),
    *("max_memory", "work_root", "device"),
)
# Schema of a size for forms: pydantic's own nests choices, which forms show without names
SIZE_CHOICES: list[JsonValue] = [
    {"type": "string", "pattern": r"^\s*(\d*\.?\d+)\s*(\w+)?"},
    {"type": "integer", "minimum": 1},
]
DEFAULT_HEAD_BITS = 6
MemorySize = Given[Size, int | str]
LossySource = Annotated[
    bool,
    Option(panel="Source", rare=True),
    Field(
        description="accept a source in GPTQ form: its decoded values are rounded once more, "
        "errors add up"
    ),
]

# How presets differ from the defaults below, which are `standard`
PRESETS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "fast": {
        "sensitivity": {"rows": 8},
        "rounding": {"rounds": 1, "sweeps": 1, "correction": 0.0},
        "calibration": {"rows": 64, "measure_rows": 8},
    },
    "standard": {},
    "best": {
        "sensitivity": {"rows": 32, "block": 1024},
        "rounding": {"rounds": 4},
        "allocate": {"rounds": 1},
        "tune": {"steps": 400},
    },
    "exllamav2": {
        "sensitivity": {"kind": "error"},
        "rounding": {"scale_search": "grid", "damping": 0.12, "rounds": 0, "correction": 0.0},
    },
}


class CalibrationOptions(Options):
    """Which token rows are used for Hessians and errors."""

    BUILT_IN: ClassVar[tuple[str, ...]] = ("standard", "chat", "self")

    text: Annotated[str, Option("TEXT", "Calibration", flag="calibration", rare=False)] = Field(
        default="standard",
        min_length=1,
        description="standard: the built-in set; chat: a share of it as dialogues in the model's "
        "chat template; self: a share written by the model; else a Parquet file with text columns",
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
        return "(default)" if self.text == "standard" else f"({self.text})"

    def special_rows(self, rows: int) -> int:
        """Return how many of `rows` rows are made by `chat` or `self`; 0 for other texts."""
        if self.text not in ("chat", "self"):
            return 0
        return max(1, int(rows * self.share + 0.5))


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
    """How matrices are rounded once their quantization parameters are chosen."""

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
    fisher_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of the gradient-weighted Hessian in the Hessian used for rounding",
    )

    def fingerprinted(self) -> dict[str, object]:
        """Return the options that a stage's fingerprint knows; defaults of later ones are not."""
        exclude = set() if self.expert_tokens else {"expert_tokens"}
        return self.model_dump(exclude=exclude)


class TuneOptions(Options):
    """How continuous parameters are distilled from the source after quantizing.

    Learning rates are Adam's for an initial divergence of 0.25 nats; they scale with its root.
    """

    steps: int = Field(default=0, ge=0, description="steps of distillation; 0: none")
    tokens: int = Field(default=512, ge=32, description="tokens per step")
    norm_rate: float = Field(
        default=2e-3,
        ge=0,
        description="rate of norms and biases, in units of their root mean square",
    )
    scale_rate: float = Field(
        default=3e-3, ge=0, description="rate of the groups' scales, relative"
    )
    embedding_rate: float = Field(
        default=2e-3, ge=0, description="rate of the embedding, in units of its root mean square"
    )
    code_rate: float = Field(
        default=0, ge=0, description="rate of the codes, in code units; 0: they stay"
    )
    held_out_rows: int = Field(default=4, ge=1, description="rows of text that are only evaluated")
    interval: int = Field(default=50, ge=1, description="steps between evaluations")
    patience: int = Field(
        default=20, ge=1, description="evaluations without improvement before stopping"
    )
    seed: int = Field(default=0, ge=0, description="seed of the crops used by steps")


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
        default="fp16", description="format of that cache: fp16, fp8, q8, q6 or q4"
    )


def in_form_order(names: Iterable[str]) -> list[str]:
    """Return names of fields, those first that a person decides first."""
    known = [*names]
    return [*dict.fromkeys([name for name in FORM_BEGINS_WITH if name in known] + known)]


def _sort_form(schema: dict[str, Any]) -> None:
    schema["properties"] = {n: schema["properties"][n] for n in in_form_order(schema["properties"])}


class RunOptions(SplitModels):
    """Options of every run over a source model: the model, its calibration, where it runs."""

    model_config = ConfigDict(json_schema_extra=_sort_form)

    source: Annotated[PathField, Option("SOURCE", is_argument=True)] = Field(
        description="folder of a Hugging Face model: config.json, tokenizer.json or "
        "tokenizer.model, *.safetensors in fp16, bf16, fp32 or fp8; or a model on the Hugging Face "
        "Hub, which is fetched, as org/name or org/name@revision"
    )
    out: PathField = Field(description="what receives the result")
    quality: Annotated[Quality, Option("PRESET", "Quality")] = Field(
        default="standard",
        description="how much work to spend on a small error: fast, standard or best; exllamav2: "
        "the original program's algorithm; options you give override the preset",
    )
    max_memory: Annotated[Given[Size | None, int | str | None], Option("SIZE", "Running")] = Field(
        default=EMPTY,
        gt=0,
        description="GPU memory to use at most, as 24GB; hidden states move to main memory if "
        "needed; empty: all there is",
        json_schema_extra={"anyOf": [*SIZE_CHOICES, {"type": "null"}]},
    )
    work_root: Annotated[OptionalPath, Option("DIR", "Running")] = Field(
        default=EMPTY,
        description="folder for checkpoints, in which runs over one model share tokens and "
        "measurement; empty: `.exl2flow` beside the output",
    )
    device: DeviceOption = "auto"
    token_block: TokenBlock = None
    clean_after: bool = Field(
        default=False,
        description="when all is finished, remove from the work root what no finished conversion "
        "needs: quantized tensors that are in the output, stages of replaced outputs",
    )
    calibration: CalibrationOptions = CalibrationOptions()
    rope: RopeOptions = RopeOptions()
    sensitivity: SensitivityOptions = SensitivityOptions()
    rounding: RoundingOptions = RoundingOptions()

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Fill missing values from the preset, for the groups that these options have."""
        if not isinstance(values, Mapping):
            return values
        merged = {key: value for key, value in values.items() if value is not None}
        for group, preset in PRESETS.get(str(merged.get("quality", "standard")), {}).items():
            given = merged.get(group, {})
            if isinstance(given, BaseModel):
                given = given.model_dump(exclude_unset=True)
            # what is not a group is refused with all other problems
            if group in cls.model_fields and isinstance(given, Mapping):
                merged[group] = {**preset, **{k: v for k, v in given.items() if v is not None}}
        return merged

    @model_validator(mode="after")
    def _check_out(self) -> Self:
        if self.out.resolve() == self.source.resolve():
            raise ValueError("`out` is the source folder; choose another one")
        return self

    @property
    def work_dir_root(self) -> Path:
        """The folder that holds the work directories of all models."""
        return (self.work_root or default_work_root(self.out)).resolve()


class SharedOptions(RunOptions):
    """Options that conversions and sweeps share: all but the bits."""

    lossy_source: LossySource = False
    head_bits: Annotated[int | None, Option("BITS", "Result", rare=True)] = Field(
        default=None,
        description="bits of the output head: 2, 3, 4, 5, 6 or 8; empty: 6 with `bpw`, else chosen",
    )
    measurement: Annotated[MeasurementField, Option("FILE", "Bit allocation")] = Field(
        default=EMPTY,
        description="use this measurement.json, or the one in this folder, written by "
        "`exl2flow measure` or exllamav2; empty: measure",
    )
    publish: PublishOptions | None = Field(
        default=None, description="where the result goes on the Hugging Face Hub; empty: nowhere"
    )
    shard_size_mb: Annotated[int, Option("MIB", "Result", rare=True)] = Field(
        default=8192, description="maximum size of an output file in MiB; 0 or less: a single file"
    )
    tune: TuneOptions = TuneOptions()
    allocate: AllocateOptions = AllocateOptions()
    validate_options: ValidateOptions = ValidateOptions()

    @model_validator(mode="after")
    def _check_head_bits(self) -> Self:
        if self.head_bits is not None and self.head_bits not in HEAD_BITS:
            raise ValueError(f"`head_bits` is {self.head_bits}; choose one of {HEAD_BITS}")
        return self


class ConversionConfig(SharedOptions):
    """One conversion: a Hugging Face folder in, an EXL2 folder and a report out."""

    out: Annotated[PathField, Option("DIR")] = Field(
        description="folder for the converted model: new, empty, or left by an earlier conversion "
        "of the same source"
    )
    bpw: Annotated[float | None, Option("BITS", "Result")] = Field(
        default=None,
        ge=2,
        le=8,
        description="average bits per weight of the decoder's matrices, from 2 to 8; embedding and "
        "head are not counted; empty: 4",
    )
    bpw_total: Annotated[float | None, Option("BITS", "Result", rare=True)] = Field(
        default=None,
        ge=2,
        le=16,
        description="instead of `bpw`: bits per weight of the whole output, embedding and head "
        "included; allocation then chooses the head's bits, too",
    )
    target_bytes: Annotated[int | None, Option("N", "Result", rare=True)] = Field(
        default=None,
        gt=0,
        description="instead of `bpw`: maximum size of all weight files together, in bytes",
    )
    fit: FitOptions | None = Field(
        default=None, description="instead of `bpw`: a GPU that the result must fit; empty: none"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_target(cls, values: Any) -> Any:
        """Fill in the default target if none is given."""
        if not isinstance(values, Mapping) or any(values.get(name) is not None for name in TARGETS):
            return values
        return {**values, "bpw": DEFAULT_BPW}

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        given = [f"`{name}`" for name in TARGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; choose one target")
        return self

    @property
    def run_name(self) -> str:
        """Model and bits per weight, for display."""
        return f"{model_name(self.source)}@{self.target}"

    @property
    def target(self) -> str:
        """The target as text without blanks."""
        if self.fit is not None:
            return f"fit-{self.fit.memory.human_readable(decimal=True)}"
        if self.target_bytes is not None:
            return f"{self.target_bytes}bytes"
        if self.bpw_total is not None:
            return f"{self.bpw_total:g}bpw-total"
        return f"{self.bpw:g}bpw"

    @property
    def fixed_head_bits(self) -> int | None:
        """The head's bits, None if the allocation chooses them."""
        free = self.head_bits is None and self.bpw is None
        return None if free else self.head_bits or DEFAULT_HEAD_BITS


def default_work_root(out: Path) -> Path:
    """Return the default folder for checkpoints: `.exl2flow` beside the converted model."""
    return out.resolve().parent / ".exl2flow"
