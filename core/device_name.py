"""Names of devices, as options and calls give them: `auto`, `cpu`, `cuda`, `cuda:1`."""

import re

PATTERN = r"^(auto|cpu|cuda|cuda:(0|[1-9][0-9]{0,3}))$"


def device_name(name: object) -> str:
    """Return the name of a device, which may be given as torch's object.

    Raises:
        ValueError: it is none.
    """
    if re.fullmatch(PATTERN, str(name)) is None:
        raise ValueError("it must be `auto`, `cpu`, `cuda`, or `cuda:1` (the second GPU)")
    return str(name)


def index_of(name: str) -> int | None:
    """Return the index in the name of a GPU, None if it names none."""
    index = name.partition(":")[2]
    return int(index) if index else None
