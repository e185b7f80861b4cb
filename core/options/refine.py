"""A refinement: new codes and scales for an existing EXL2 model."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from exl2flow.core.options.base import Option
from exl2flow.core.options.config import ConversionConfig, TrainedOptions
from exl2flow.core.options.given import PathField
from exl2flow.core.options.naming import model_name
from exl2flow.core.options.validation import ValidateOptions


class RefinementConfig(TrainedOptions):
    """One refinement: an EXL2 folder in, the same with new codes and scales out.

    `source` is the reference.
    """

    kind: ClassVar[Literal["convert", "refine"]] = "refine"

    model: Annotated[PathField, Option("MODEL", is_argument=True)] = Field(
        description="folder of the EXL2 model, made by exl2flow or exllamav2"
    )
    source: Annotated[PathField, Option("SOURCE", flag="reference")] = Field(
        description="the unquantized model it was made from: a folder, or org/name on the Hub"
    )
    out: Annotated[PathField, Option("DIR")] = Field(
        description="folder for the refined model: new, empty, or left by an earlier run with the "
        "same reference"
    )
    held_out_rows: int = Field(
        default=4, ge=1, description="rows of text that only judge; at most half of all"
    )
    validate_options: ValidateOptions = ValidateOptions()

    @property
    def held_out(self) -> int:
        """See `RunOptions`."""
        return self.held_out_rows

    @property
    def rows_in_words(self) -> str:
        """See `RunOptions`."""
        judging = min(self.held_out_rows, self.calibration.rows // 2)
        return f"of which {judging} are set aside to judge"

    @property
    def validation(self) -> ValidateOptions | None:
        """See `RunOptions`."""
        return self.validate_options

    @property
    def run_name(self) -> str:
        """Reference and model, for display."""
        return f"{model_name(self.source)}@{self.target}"

    @property
    def target(self) -> str:
        """The model's name, without its folder."""
        return f"refined:{self.model.resolve().name}"


ModelOptions: TypeAlias = ConversionConfig | RefinementConfig  # of runs that write a model
