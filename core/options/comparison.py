"""Options of a comparison: the models to validate, and what they are compared with."""

from typing import Annotated

from pydantic import Field

from exl2flow.core.options.base import OnGpus, Option, SplitModels, TokenBlock
from exl2flow.core.options.given import EMPTY, OptionalPath, Paths
from exl2flow.core.options.validation import ValidateOptions


class ComparedModels(OnGpus):
    """Models to validate, and the reference to compare them with."""

    models: Annotated[Paths, Option("MODEL...", is_argument=True)] = Field(
        min_length=1, description="model folders, EXL2 or plain, or names of EXL2 models on the Hub"
    )
    reference: Annotated[OptionalPath, Option("SOURCE")] = Field(
        default=EMPTY,
        description="unquantized model to compare with: a folder, or org/name on the Hub; without "
        "it, only perplexity is computed; empty: none",
    )
    token_block: TokenBlock = None


class Comparison(SplitModels, ComparedModels):
    """Models to validate, the reference to compare them with, and the text.

    Only samples hold a model as a whole, which may be split; scores read layer after layer.
    """

    options: ValidateOptions = ValidateOptions()

    @property
    def run_name(self) -> str:
        """The models, for people."""
        return ", ".join(model.resolve().name for model in self.models)
