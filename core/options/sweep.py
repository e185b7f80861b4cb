"""A sweep: conversions of one model that differ only in bits per weight."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from exl2flow.core.device_name import index_of
from exl2flow.core.options.base import Option
from exl2flow.core.options.config import ConversionConfig, SharedOptions
from exl2flow.core.options.given import Given, PathField
from exl2flow.core.options.naming import bitrate_name, model_name

SWEEP_FILE, REPORT_PAGE = "sweep.json", "report.html"  # in the sweep's folder

Runner = Literal["threads", "processes", "dask", "ray"]
Bits = Annotated[float, Field(ge=2, le=8)]


class SweepConfig(SharedOptions):
    """One sweep: a Hugging Face folder in, a folder per bitrate, a comparison and a report out."""

    out: Annotated[PathField, Option("DIR")] = Field(
        description="folder for the results: one folder per bitrate (`4.0bpw`), `sweep.json` and "
        "`report.html`"
    )
    bpw: Annotated[Given[tuple[Bits, ...], Sequence[float]], Option("BITS,…")] = Field(
        min_length=1, description="bitrates to make, in bits per weight, each from 2 to 8"
    )
    runner: Annotated[Runner, Option("NAME", "Running")] = Field(
        default="threads",
        description="what makes the bitrates: threads of one process, processes with one GPU each, "
        "or the workers of dask or ray",
    )
    workers: Annotated[int | None, Option("N", "Running")] = Field(
        default=None,
        ge=1,
        description="how many bitrates to make at the same time; empty: one per GPU; 1 with "
        "threads",
    )
    cluster: Annotated[str | None, Option("ADDRESS", "Running")] = Field(
        default=None,
        description="address of a running Dask or Ray cluster; empty: one for this sweep",
    )

    @field_validator("bpw", mode="before")
    @classmethod
    def _in_order(cls, value: Any) -> Any:
        """Sort bitrates and drop duplicates."""
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if is_list and all(isinstance(bits, int | float) for bits in value):
            return tuple(sorted({float(bits) for bits in value}))
        return value

    @model_validator(mode="after")
    def _cluster_has_a_runner(self) -> Self:
        if self.cluster and self.runner not in ("dask", "ray"):
            raise ValueError("a cluster needs the runner `dask` or `ray`")
        return self

    @model_validator(mode="after")
    def _split_needs_all_gpus(self) -> Self:
        if self.is_split and self.runner != "threads":
            raise ValueError(
                f"the runner `{self.runner}` gives each process one GPU, so no model can be split; "
                "choose `threads`, or leave out `gpu_split`, `reserve` and `devices`"
            )
        return self

    @model_validator(mode="after")
    def _device_is_of_this_host(self) -> Self:
        if index_of(self.device) is not None and (self.cluster or self.runner == "ray"):
            raise ValueError(
                f"`device` is {self.device}, and Ray and clusters choose GPUs themselves; give "
                "`cuda`, or another runner"
            )
        return self

    @property
    def run_name(self) -> str:
        """Model and bitrates, for people."""
        return f"{model_name(self.source)}@{','.join(f'{bpw:g}' for bpw in self.bpw)}bpw"

    def conversion(self, bpw: float) -> ConversionConfig:
        """Return the conversion of one bitrate; all of them share their work directory.

        It neither publishes nor cleans: the sweep does, when all bitrates are made.
        """
        shared = {name: getattr(self, name) for name in SharedOptions.model_fields}
        fixed = {
            "bpw": bpw,
            "out": self.out.resolve() / bitrate_name(bpw),
            "work_root": self.work_dir_root,
            "publish": None,
            "clean_after": False,
        }
        return ConversionConfig.model_validate({**shared, **fixed})

    def models(self) -> dict[str, ConversionConfig]:
        """See `RunOptions`."""
        return {bitrate_name(bpw): self.conversion(bpw) for bpw in self.bpw}
