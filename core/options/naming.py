"""Names that people read: of models, bitrates and addresses."""

import re
from pathlib import Path

BITRATE = "bpw"  # ends the name of a bitrate
CREDENTIALS = re.compile(r"(?:^|(?<=://))(?!\w+://).*@", re.DOTALL)
COMMIT = re.compile(r"(?<=@[0-9a-f]{7})[0-9a-f]{33}$")


def model_name(source: Path) -> str:
    """Return a source's name; in `name@commit` the commit is shortened to seven digits."""
    return COMMIT.sub("", source.resolve().name)


def bitrate_name(bpw: float) -> str:
    """Return the name of a bitrate's folder and of its branch on the Hub, as `4.0bpw`.

    It has as many digits as the bitrate, so no two bitrates share a name.
    """
    return f"{float(bpw)}{BITRATE}"


def without_credentials(address: str) -> str:
    """Return a URL without user name and password."""
    return CREDENTIALS.sub("", address)
