"""Options of a conversion: validated on construction, stored as JSON, shown as a form by Prefect.

Every default lives here, in `groups` and nowhere else.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from exl2flow.core.options.base import OnGpus, Option, Size, SplitModels, TokenBlock
from exl2flow.core.options.base import Options as Options
from exl2flow.core.options.given import EMPTY, Given, OptionalPath, PathField
from exl2flow.core.options.groups import SIZE_CHOICES as SIZE_CHOICES
from exl2flow.core.options.groups import AllocateOptions as AllocateOptions
from exl2flow.core.options.groups import CalibrationOptions as CalibrationOptions
from exl2flow.core.options.groups import Experts as Experts
from exl2flow.core.options.groups import FitOptions as FitOptions
from exl2flow.core.options.groups import MtpOptions as MtpOptions
from exl2flow.core.options.groups import Objective as Objective
from exl2flow.core.options.groups import Preference as Preference
from exl2flow.core.options.groups import RopeOptions as RopeOptions
from exl2flow.core.options.groups import RoundingOptions as RoundingOptions
from exl2flow.core.options.groups import ScaleSearch as ScaleSearch
from exl2flow.core.options.groups import SensitivityOptions as SensitivityOptions
from exl2flow.core.options.groups import TuneOptions as TuneOptions
from exl2flow.core.options.naming import model_name
from exl2flow.core.options.publication import MeasurementField, PublishOptions
from exl2flow.core.options.validation import ValidateOptions

Quality = Literal["fast", "standard", "best", "exllamav2"]
HEAD_BITS = (2, 3, 4, 5, 6, 8)
TARGETS = ("bpw", "bpw_total", "target_bytes", "fit")
DEFAULT_BPW, MOST_BPW = 4.0, 8.0
FORM_BEGINS_WITH = (
    *("model", "source", "out", "quality", *TARGETS, "head_bits"),
    *("max_memory", "work_root", "device"),
)
DEFAULT_HEAD_BITS = 6
HELD_OUT_ROWS = 4  # rows of text that only judge, where options do not say how many
LossySource = Annotated[
    bool,
    Option(panel="Source", rare=True),
    Field(
        description="accept a source in GPTQ form: its decoded values are rounded once more, "
        "errors add up"
    ),
]

# How presets differ from the defaults of the groups, which are `standard`
PRESETS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "fast": {
        "sensitivity": {"rows": 8},
        "rounding": {"rounds": 1, "sweeps": 1, "correction": 0.0},
        "calibration": {"rows": 64, "measure_rows": 8},
    },
    "standard": {},
    "best": {
        "sensitivity": {"rows": 32, "block": 1024},
        "rounding": {"rounds": 4, "block_steps": 100},
        "allocate": {"rounds": 1},
        "tune": {"steps": 300},
    },
    "exllamav2": {
        "calibration": {"text": "standard"},
        "sensitivity": {"kind": "error"},
        "rounding": {"scale_search": "grid", "damping": 0.12, "rounds": 0, "correction": 0.0},
    },
}


def in_form_order(names: Iterable[str]) -> list[str]:
    """Return names of fields, those first that a person decides first."""
    known = [*names]
    return [*dict.fromkeys([name for name in FORM_BEGINS_WITH if name in known] + known)]


def _sort_form(schema: dict[str, Any]) -> None:
    schema["properties"] = {n: schema["properties"][n] for n in in_form_order(schema["properties"])}


class RunOptions(SplitModels, OnGpus):
    """Options of every run over a source model: the model, its calibration, where it runs."""

    model_config = ConfigDict(json_schema_extra=_sort_form)
    kind: ClassVar[Literal["convert", "refine"]] = "convert"  # of run that makes one such model

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

    # What any run can be asked; kinds of runs whose answer differs override these

    def models(self) -> "Mapping[str, RunOptions]":
        """Return name → options of each model that the run makes, in rising order of bits."""
        return {"model": self}

    @property
    def target(self) -> str:
        """The product, as text without blanks."""
        return ""

    @property
    def measurement_file(self) -> Path | None:
        """A finished measurement to use; None: the run measures, or needs none."""
        return None

    @property
    def accepts_lossy(self) -> bool:
        """Whether the source may have been rounded before."""
        return False

    @property
    def allocation(self) -> AllocateOptions:
        """The options of bit allocation."""
        return AllocateOptions()

    @property
    def block(self) -> MtpOptions | None:
        """The options of an MTP block; None: the run leaves it to others."""
        return None

    @property
    def fixed_head_bits(self) -> int | None:
        """The head's bits, None if the allocation chooses them."""
        return DEFAULT_HEAD_BITS

    @property
    def gpu_to_fit(self) -> FitOptions | None:
        """The GPU that the result must fit, if one is given."""
        return None

    @property
    def held_out(self) -> int:
        """Rows of text that only judge; at most half of all."""
        return HELD_OUT_ROWS

    @property
    def is_tuned(self) -> bool:
        """Whether the result is trained."""
        return False

    @property
    def training_rows(self) -> int:
        """Rows that the model writes to be trained on."""
        return 0

    @property
    def writes(self) -> bool:
        """Whether the model writes rows."""
        return self.calibration.text == "self" or self.training_rows > 0

    @property
    def judges(self) -> tuple[str, ...]:
        """Parts that judge by rows of text set aside, where one row would be too few."""
        return ("training",) if self.rounding.block_steps else ()

    @property
    def rows_in_words(self) -> str:
        """The other uses of the calibration rows."""
        rows = self.calibration
        return f"measured on {rows.measure_rows} x {rows.measure_row_tokens}"

    @property
    def validation(self) -> ValidateOptions | None:
        """The options of validation; None: the result is not validated."""
        return None

    @property
    def writes_sample(self) -> bool:
        """Whether the run ends with a sample of the result."""
        return self.validation is not None and self.validation.sample_tokens > 0

    @property
    def publication(self) -> PublishOptions | None:
        """Where to publish the result, with the token block to use; None: nowhere."""
        return None


class TrainedOptions(RunOptions):
    """Options of runs whose result can be trained end to end."""

    tune: TuneOptions = TuneOptions()

    @property
    def held_out(self) -> int:
        """See `RunOptions`."""
        return self.tune.held_out_rows if self.is_tuned else HELD_OUT_ROWS

    @property
    def training_rows(self) -> int:
        """See `RunOptions`."""
        return (self.tune.rows or 0) if self.is_tuned else 0

    @property
    def is_tuned(self) -> bool:
        """See `RunOptions`."""
        return self.tune.steps > 0

    @property
    def judges(self) -> tuple[str, ...]:
        """See `RunOptions`."""
        return ("training",) if self.is_tuned else super().judges


class SharedOptions(TrainedOptions):
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
    allocate: AllocateOptions = AllocateOptions()
    mtp: MtpOptions = MtpOptions()
    validate_options: ValidateOptions = ValidateOptions()

    @model_validator(mode="after")
    def _check_head_bits(self) -> Self:
        if self.head_bits is not None and self.head_bits not in HEAD_BITS:
            raise ValueError(f"`head_bits` is {self.head_bits}; choose one of {HEAD_BITS}")
        return self

    @property
    def measurement_file(self) -> Path | None:
        """See `RunOptions`."""
        return self.measurement

    @property
    def accepts_lossy(self) -> bool:
        """See `RunOptions`."""
        return self.lossy_source

    @property
    def allocation(self) -> AllocateOptions:
        """See `RunOptions`."""
        return self.allocate

    @property
    def block(self) -> MtpOptions | None:
        """See `RunOptions`."""
        return self.mtp

    @property
    def judges(self) -> tuple[str, ...]:
        """See `RunOptions`."""
        return super().judges + (("allocation",) if self.allocate.rounds else ())

    @property
    def validation(self) -> ValidateOptions | None:
        """See `RunOptions`."""
        return self.validate_options

    @property
    def publication(self) -> PublishOptions | None:
        """See `RunOptions`."""
        if self.publish is None:
            return None
        block = self.publish.token_block or self.token_block
        return self.publish.model_copy(update={"token_block": block})


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
    def gpu_to_fit(self) -> FitOptions | None:
        """See `RunOptions`."""
        return self.fit

    @property
    def fixed_head_bits(self) -> int | None:
        """See `RunOptions`."""
        free = self.head_bits is None and self.bpw is None
        return None if free else self.head_bits or DEFAULT_HEAD_BITS


def default_work_root(out: Path) -> Path:
    """Return the default folder for checkpoints: `.exl2flow` beside the converted model."""
    return out.resolve().parent / ".exl2flow"
