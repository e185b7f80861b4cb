"""The display name of a model, in names and tags of runs."""

import re
from pathlib import Path

COMMIT = re.compile(r"(?<=@[0-9a-f]{7})[0-9a-f]{33}$")


def model_name(source: Path) -> str:
    """Return a source's name; in `name@commit` the commit is shortened to seven digits."""
    return COMMIT.sub("", source.resolve().name)
