"""Options of a conversion: validated on construction, stored as JSON, shown as a form by Prefect.

Every default lives here and nowhere else.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic.config import JsonValue

from exl2flow.core.options.base import Device as Device
from exl2flow.core.options.base import Options as Options
from exl2flow.core.options.base import user_path
from exl2flow.core.options.naming import model_name
from exl2flow.core.options.publication import PublishOptions

ScaleSearch = Literal["grid", "column"]
Objective = Literal["log", "sum", "power"]
Preference = Literal["quality", "speed"]
Quality = Literal["fast", "standard", "best", "exllamav2"]
CacheName = Literal["fp16", "fp8", "q8", "q6", "q4"]
HEAD_BITS = (2, 3, 4, 5, 6, 8)
TARGETS = ("bpw", "bpw_total", "target_bytes", "fit")
DEFAULT_BPW, MOST_BPW = 4.0, 8.0
FORM_BEGINS_WITH = ("model", "source", "out", "quality", *TARGETS, "head_bits")
# Schema of a size for forms: pydantic's own nests choices, which forms show without names
SIZE_CHOICES: list[JsonValue] = [
    {"type": "string", "pattern": r"^\s*(\d*\.?\d+)\s*(\w+)?"},
    {"type": "integer", "minimum": 1},
]
DEFAULT_HEAD_BITS = 6
LOSSY_SOURCE = "accept a source in GPTQ form: its decoded values are rounded once more"

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

    text: str = Field(
        "standard",
        min_length=1,
        description="standard: the built-in set; chat: a share of it as dialogues in the model's "
        "chat template; self: a share written by the model; else a Parquet file with text columns",
    )
    share: float = Field(
        0.5, gt=0, le=1, description="share of `chat` or `self` rows; the others are standard"
    )
    rows: int = Field(115, ge=1, description="rows that quantization sees")
    row_tokens: int = Field(2048, ge=32, multiple_of=32, description="tokens per quantization row")
    measure_rows: int = Field(19, ge=1, description="rows that measurement sees")
    measure_row_tokens: int = Field(2048, ge=32, multiple_of=32, description="tokens per such row")
    seed: int = Field(0, ge=0, description="seed of shuffled, random-token and self-written rows")

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

    scale: float | None = Field(None, gt=0, description="divide positions by this")
    alpha: float | None = Field(None, gt=0, description="NTK factor on the rotary base")


class SensitivityOptions(Options):
    """How the cost of an error in a matrix is estimated."""

    kind: Literal["fisher", "error"] = Field(
        "fisher",
        description="fisher: nats of KL divergence, from one backward pass; error: relative error "
        "of each sublayer's output, without gradients",
    )
    rows: int = Field(16, ge=1, description="calibration rows of the backward pass")
    block: int = Field(
        512, ge=0, description="out-features per block of the output factors; 0: one block"
    )
    seed: int = Field(0, ge=0, description="seed of the sampled labels")


class RoundingOptions(Options):
    """How matrices are rounded once their quantization parameters are chosen."""

    scale_search: ScaleSearch = Field(
        "column",
        description="column: every column chooses its scale code; grid: one multiplier per group",
    )
    damping: float = Field(0.05, gt=0, description="added to a Hessian, in mean diagonals")
    rounds: int = Field(3, ge=0, description="rounds of scale refit and coordinate descent")
    sweeps: int = Field(2, ge=1, description="sweeps of coordinate descent in each round")
    output_damping: float = Field(
        0.3, gt=0, description="added to an output factor, in mean diagonals"
    )
    correction: float = Field(
        0.5,
        ge=0,
        le=1,
        description="how far matrices compensate for errors of earlier layers, where that helps",
    )
    fisher_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the gradient-weighted Hessian in the Hessian used for rounding",
    )


class TuneOptions(Options):
    """How continuous parameters are distilled from the source after quantizing.

    Learning rates are Adam's for an initial divergence of 0.25 nats; they scale with its root.
    """

    steps: int = Field(0, ge=0, description="steps of distillation; 0: none")
    tokens: int = Field(512, ge=32, description="tokens per step")
    norm_rate: float = Field(
        2e-3, ge=0, description="rate of norms and biases, in units of their root mean square"
    )
    scale_rate: float = Field(3e-3, ge=0, description="rate of the groups' scales, relative")
    embedding_rate: float = Field(
        2e-3, ge=0, description="rate of the embedding, in units of its root mean square"
    )
    code_rate: float = Field(0, ge=0, description="rate of the codes, in code units; 0: they stay")
    held_out_rows: int = Field(4, ge=1, description="rows of text that are only evaluated")
    interval: int = Field(50, ge=1, description="steps between evaluations")
    patience: int = Field(20, ge=1, description="evaluations without improvement before stopping")
    seed: int = Field(0, ge=0, description="seed of the crops used by steps")


class AllocateOptions(Options):
    """How bits are allocated."""

    prefer: Preference = Field(
        "quality", description="quality: groups of 32, 64 and 128 rows; speed: only groups of 128"
    )
    objective: Objective = Field(
        "power", description="log: sum of ln error; sum: of error; power: of error ** power"
    )
    power: float = Field(2.0, gt=0, le=8, description="exponent of the objective `power`")
    rounds: int = Field(
        0, ge=0, description="further rounds, which try whole allocations and correct them"
    )


class ValidateOptions(Options):
    """Which text the result is evaluated on, and when it is refused."""

    text: Path | None = Field(None, description="UTF-8 text file; empty: built-in held-out text")
    rows: int = Field(8, ge=1, description="rows at most")
    row_tokens: int = Field(2048, ge=2, description="tokens per row")
    warn_perplexity_ratio: float = Field(1.3, gt=0, description="warn above this x the source's")
    fail_perplexity_ratio: float = Field(3.0, gt=0, description="fail above this x the source's")
    sample_prompt: str = Field("One morning", description="prompt of the generated sample")
    sample_tokens: int = Field(64, ge=0, description="tokens of the generated sample")
    sample_seed: int = Field(0, ge=0, description="seed of the generated sample")


class FitOptions(Options):
    """The GPU memory that the result must fit, with the cache of a context."""

    memory: ByteSize = Field(
        gt=0,
        description="memory of the GPU that will run the model, as 24GB",
        json_schema_extra={"anyOf": SIZE_CHOICES},
    )
    context: int = Field(8192, ge=1, description="tokens whose cache must fit beside the weights")
    cache: CacheName = Field("fp16", description="format of that cache")


def _in_form_order(schema: dict[str, Any]) -> None:
    """Put the fields that a person decides first at the beginning of a form."""
    properties = schema["properties"]
    first = [name for name in FORM_BEGINS_WITH if name in properties]
    schema["properties"] = {name: properties[name] for name in [*first, *properties]}


class RunOptions(Options):
    """What every run over a source model has: the model, its calibration, where it runs."""

    model_config = ConfigDict(json_schema_extra=_in_form_order)

    source: Path = Field(
        description="folder with config.json, tokenizer and *.safetensors; or a model on the "
        "Hugging Face Hub, as org/name or org/name@revision"
    )
    out: Path = Field(description="what receives the result")
    quality: Quality = Field("standard", description="fast, standard, best or exllamav2")
    work_root: Path | None = Field(
        None, description="folder of checkpoints; empty: `.exl2flow` beside the output"
    )
    device: Device = Field("auto", description="auto, cpu or cuda")
    max_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="maximum GPU memory to use, as 24GB; empty: all of it",
        json_schema_extra={"anyOf": [*SIZE_CHOICES, {"type": "null"}]},
    )
    token_block: str | None = Field(
        None, description="Prefect Secret block with the Hub's token; empty: HF_TOKEN is used"
    )
    clean_after: bool = Field(
        False,
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
            # what is no group is refused with all other problems
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
    """What a conversion and a sweep of several have in common: all but the bits."""

    lossy_source: bool = Field(False, description=LOSSY_SOURCE)
    head_bits: int | None = Field(
        None,
        description="bits of the output head: 2, 3, 4, 5, 6 or 8; empty: 6, or as allocation "
        "chooses when the target is a total",
    )
    measurement: Path | None = Field(
        None, description="measurement.json to use instead of measuring"
    )
    publish: PublishOptions | None = Field(
        None, description="where the result goes on the Hugging Face Hub; empty: nowhere"
    )
    shard_size_mb: int = Field(8192, description="MiB per output file; 0 or less: one file")
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

    out: Path = Field(description="folder that receives the converted model")
    bpw: float | None = Field(
        None, ge=2, le=8, description="bits per weight of the decoder's matrices; empty: 4"
    )
    bpw_total: float | None = Field(
        None, ge=2, le=16, description="instead: bits per weight of the whole output"
    )
    target_bytes: int | None = Field(
        None, gt=0, description="instead: bytes of all output files of weights"
    )
    fit: FitOptions | None = Field(
        None, description="instead: the GPU memory that the result must fit; empty: any"
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


def cache_folder() -> Path | None:
    """Return the folder for what is quick to make again; None if the user has no home.

    `EXL2FLOW_CACHE` is its path; by default it is in the user's cache folder.
    """
    if given := os.environ.get("EXL2FLOW_CACHE"):
        return Path(os.path.expanduser(given))
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"))
    return folder / "exl2flow" if folder.is_absolute() else None


def tuning_file() -> Path | None:
    """Return the file that stores tuned kernel launches; None if tuning is off.

    `EXL2FLOW_TUNING` is its path or `off`; by default it is in the cache folder.
    """
    given = os.environ.get("EXL2FLOW_TUNING")
    if given:
        return None if given == "off" else Path(os.path.expanduser(given))
    folder = cache_folder()
    return folder / "tuning.json" if folder is not None else None
