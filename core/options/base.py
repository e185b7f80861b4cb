"""The base of all option groups, as forms show them and JSON files hold them."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

Device = Literal["auto", "cpu", "cuda"]


class Options(BaseModel):
    """Base of all option groups: immutable, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
