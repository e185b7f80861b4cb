"""Options of validation: the text, and when a result is refused."""

from typing import Annotated

from pydantic import Field

from exl2flow.core.options.base import Option, Options
from exl2flow.core.options.given import EMPTY, OptionalPath


class ValidateOptions(Options):
    """Which text the result is evaluated on, and when it is refused."""

    text: Annotated[OptionalPath, Option("FILE", "Validation", grouped="validate-text")] = Field(
        default=EMPTY, description="UTF-8 text file to evaluate on; empty: built-in held-out text"
    )
    rows: Annotated[int, Option("N", "Validation", grouped="validate-rows")] = Field(
        default=8, ge=1, description="maximum number of rows of that text"
    )
    row_tokens: Annotated[int, Option("N", "Validation", grouped="validate-row-tokens")] = Field(
        default=2048, ge=2, description="tokens per row; capped at the model's positions"
    )
    warn_perplexity_ratio: Annotated[float, Option("X", "Validation", flag="warn-ratio")] = Field(
        default=1.3, gt=0, description="warn if perplexity exceeds this multiple of the source's"
    )
    fail_perplexity_ratio: Annotated[float, Option("X", "Validation", flag="fail-ratio")] = Field(
        default=3.0, gt=0, description="fail if perplexity exceeds this multiple of the source's"
    )
    sample_prompt: Annotated[str, Option("TEXT", "Validation", only_grouped=True)] = Field(
        default="One morning", description="prompt for the sample text in the report"
    )
    sample_tokens: Annotated[int, Option("N", "Validation", only_grouped=True)] = Field(
        default=64, ge=0, description="length of the sample in tokens; 0: no sample"
    )
    sample_seed: Annotated[int, Option("N", "Validation", only_grouped=True)] = Field(
        default=0, ge=0, description="seed for the sample"
    )
