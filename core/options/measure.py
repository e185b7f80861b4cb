"""A measurement: size and error of every bit-width candidate, for any number of conversions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from exl2flow.core.options.base import Option, measurement_path
from exl2flow.core.options.config import MOST_BPW, ConversionConfig, LossySource, RunOptions
from exl2flow.core.options.given import PathField


class MeasureConfig(RunOptions):
    """One measurement: a Hugging Face folder in, `measurement.json` out."""

    out: Annotated[PathField, Option("FILE")] = Field(
        description="file for the measurement, or a folder, which receives `measurement.json`"
    )
    lossy_source: LossySource = False

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
