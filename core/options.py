"""The base of all groups of options: what a form shows and a JSON file holds."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Device = Literal["auto", "cpu", "cuda"]


class Options(BaseModel):
    """Base of all option groups: immutable, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
