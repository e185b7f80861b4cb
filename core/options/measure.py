"""A measurement: size and error of every bit-width candidate, for any number of conversions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from exl2flow.core.options.base import Option, measurement_path
from exl2flow.core.options.config import MOST_BPW, ConversionConfig, LossySource, RunOptions
from exl2flow.core.options.given import PathField

ClusterRunner = Literal["dask", "ray"]


class MeasureConfig(RunOptions):
    """One measurement: a Hugging Face folder in, `measurement.json` out."""

    out: Annotated[PathField, Option("FILE")] = Field(
        description="file for the measurement, or a folder, which receives `measurement.json`"
    )
    lossy_source: LossySource = False
    runner: Annotated[ClusterRunner | None, Option("NAME", "Running", rare=True)] = Field(
        default=None,
        description="whose workers share the work, dask or ray; they see the same work root and "
        "source; empty: none",
    )
    workers: Annotated[int | None, Option("N", "Running", rare=True)] = Field(
        default=None,
        ge=1,
        description="shares of that work, one for each worker; empty: one per GPU of this host",
    )
    cluster: Annotated[str | None, Option("ADDRESS", "Running", rare=True)] = Field(
        default=None,
        description="address of a running Dask or Ray cluster; empty: one for this run",
    )

    @model_validator(mode="after")
    def _cluster_is_used(self) -> Self:
        if self.runner is None and (self.cluster or self.workers):
            raise ValueError("a cluster and `workers` need the runner `dask` or `ray`")
        if self.cluster and not self.workers:
            raise ValueError("`workers` is empty; give how many of the cluster share the work")
        if self.runner is not None and self.gpus is not None:
            raise ValueError(f"`gpus` and the runner `{self.runner}` are two ways; give one")
        return self

    @property
    def file(self) -> Path:
        """The file that receives the measurement; in `out` if that is a folder."""
        return measurement_path(self.out)

    @property
    def accepts_lossy(self) -> bool:
        """See `RunOptions`."""
        return self.lossy_source

    def models(self) -> Mapping[str, ConversionConfig]:
        """See `RunOptions`."""
        return {"model": self.conversion()}

    def conversion(self) -> ConversionConfig:
        """Return a conversion whose first stages are this measurement; its target is arbitrary."""
        shared = {name: getattr(self, name) for name in RunOptions.model_fields}
        name = f".{self.file.stem}.unused"
        fixed = {"out": self.file.with_name(name), "bpw": MOST_BPW}
        fixed["lossy_source"] = self.lossy_source
        return ConversionConfig.model_validate({**shared, **fixed, "work_root": self.work_dir_root})
