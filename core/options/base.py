"""The base of all option groups, as forms show them and JSON files hold them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from exl2flow.core.device_name import PATTERN, device_name, index_of

MOST_STRETCH = 1_000_000  # of positions or of the base of a rotation; the least is 1 / this
MEASUREMENT_FILE = "measurement.json"  # its name in a folder
Device = Annotated[
    str,
    AfterValidator(device_name),
    WithJsonSchema({"type": "string", "pattern": PATTERN}),
]
Duration = Annotated[float, AllowInfNan()]  # of infinity, too: for ever; bounds refuse NaN
LEAST_SIZE = 1_000_000  # bytes; what is below was meant to have a unit


def _with_unit(count: ByteSize) -> ByteSize:
    if 0 < count < LEAST_SIZE:
        raise ValueError(f"{int(count):,} bytes are too few; give the unit, as {int(count)}GB")
    return count


Size = Annotated[ByteSize, AfterValidator(_with_unit)]  # of memory or of a disk
CacheName = Literal["fp16", "fp8", "q8", "q8/q6", "q8/q4", "q6", "q6/q4", "q4"]
Panel = Literal[  # in the order in which help shows them
    "Files",
    "Conversation",
    "What is shown",
    "Sampling",
    "Prompt",
    "Stopping",
    "Constraints",
    "Model and cache",
    "Speculative decoding (same text)",
    "Result",
    "Source",
    "Quality",
    "Calibration",
    "Bit allocation",
    "Validation",
    "Publishing",
    "Running",
]


@dataclass(frozen=True, slots=True)
class Option:
    """Gives a field an option of the command line, whose help is the field's description.

    A description names other fields of its model in backticks, and ends with "; empty: …" if words
    are needed to say what the default is.

    metavar: the value's name in help.
    panel: the part of help that lists the option; None: the one without a name.
    flag: the option's name, if it is not the field's.
    grouped: its name where the field is in a group of a larger model.
    only_grouped: without that group the field has no option.
    rare: list the option in `--help-all` only; None: if the field is in a group.
    is_argument: the value is given by position.
    """

    metavar: str = ""
    panel: Panel | None = None
    flag: str | None = None
    grouped: str | None = None
    only_grouped: bool = False
    rare: bool | None = None
    is_argument: bool = False


class Options(BaseModel):
    """Base of all option groups: immutable; unknown fields, infinity and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _as_the_user_means_it(cls, value: Any) -> Any:
        """Expand `~` in paths: a form or a JSON file has no shell to do it."""
        if isinstance(value, Path):
            return user_path(value)
        if isinstance(value, tuple):
            return tuple(user_path(item) if isinstance(item, Path) else item for item in value)
        return value


def user_path(path: Path) -> Path:
    """Return a path with the user's folder for `~`.

    Raises:
        ValueError: it is not UTF-8, which all records need.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError("its name is not UTF-8; rename it or choose another one") from None
    return Path(os.path.expanduser(path))


DeviceOption = Annotated[
    Device,
    Option("auto|cpu|cuda", "Running"),
    Field(description="auto: a GPU if one is usable, else the CPU; cuda:1: the second GPU"),
]
GPUS = r"^(all|[1-9][0-9]{0,2}|(0|[1-9][0-9]{0,2})(,(0|[1-9][0-9]{0,2}))+)$"


def _gpus(text: str) -> str:
    if re.fullmatch(GPUS, text) is None:
        raise ValueError("give how many GPUs, `all`, or which, as 0,2")
    return text


Gpus = Annotated[
    Annotated[str, AfterValidator(_gpus), WithJsonSchema({"type": "string", "pattern": GPUS})]
    | None,
    Option("N|all|N,…", "Running"),
]


class OnGpus(Options):
    """Where work runs that processes of several GPUs can share."""

    device: DeviceOption = "auto"
    gpus: Gpus = Field(
        default=None,
        description="GPUs that share the work: how many, all, or which (0,2); empty: one",
    )

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.gpus is not None and index_of(self.device) is not None:
            raise ValueError(f"`device` is {self.device}, which is one GPU; name it in `gpus`")
        return self


GpuSplit = Annotated[
    str | None,
    Option("GB,…|auto", "Running", rare=True),
    Field(
        description="GB that the model and its cache may take on each GPU, 0 to skip one; auto: "
        "what is free; empty: one GPU"
    ),
]
Reserve = Annotated[
    str | None,
    Option("BYTES,…", "Running", rare=True),
    Field(
        description="bytes that an automatic split leaves free, one number or one for each GPU; "
        "empty: 256 MiB of each"
    ),
]
Devices = Annotated[
    str | None,
    Option("N,…", "Running", rare=True),
    Field(description="GPUs to split the model among, in the order of its layers; empty: all"),
]
TokenBlock = Annotated[
    str | None,
    Option("NAME", "Running", rare=True),
    Field(
        description="Prefect Secret block with the token for the Hugging Face Hub; empty: the "
        "token in HF_TOKEN or of `hf auth login`"
    ),
]


class SplitModels(Options):
    """How models that are held as a whole are split among GPUs.

    Stages that read a model layer after layer from disk need one GPU.
    """

    gpu_split: GpuSplit = Field(
        default=None,
        description="GB that a whole model and its cache may take on each GPU, where it writes "
        "rows of `self` or a sample, 0 to skip one; auto: what is free; empty: one GPU",
    )
    reserve: Reserve = None
    devices: Devices = None

    @property
    def is_split(self) -> bool:
        """Whether one of these options is given."""
        return (self.gpu_split, self.reserve, self.devices) != (None, None, None)


def measurement_path(path: Path) -> Path:
    """Return the file of a measurement, which may be given as its folder."""
    path = user_path(path)
    return path / MEASUREMENT_FILE if path.is_dir() else path
