"""A measurement: what every candidate of bits costs, for any number of conversions."""

from pathlib import Path

from pydantic import Field

from exl2flow.core.config import MOST_BPW, ConversionConfig, RunOptions
from exl2flow.core.naming import model_name


class MeasureConfig(RunOptions):
    """One measurement: a Hugging Face folder in, `measurement.json` out."""

    out: Path = Field(description="file that receives the measurement")

    @property
    def run_name(self) -> str:
        """The model, for people."""
        return model_name(self.source)

    def conversion(self) -> ConversionConfig:
        """Return a conversion that begins with this measurement, which no target changes."""
        shared = {name: getattr(self, name) for name in RunOptions.model_fields}
        own = {"out": self.out.with_name(f".{self.out.stem}.unused"), "bpw": MOST_BPW}
        return ConversionConfig.model_validate({**shared, **own, "work_root": self.work_dir_root})
