"""Names of all tensors in EXL2 files, from the lists of `exllamav2_names.toml`."""

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PACKED = "q_weight,q_scale,q_scale_max,q_groups,q_invperm"
_LISTS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)


def _patterns(names: list[str]) -> Iterator[str]:
    for name in names:
        prefix, is_list, shared = name.partition("@")
        inner = _patterns(_LISTS["shared"][shared]) if is_list else [""]
        yield from (prefix + pattern for pattern in inner)


NAMES = {checkpoint: tuple(_patterns(names)) for checkpoint, names in _LISTS["names"].items()}


def expanded(pattern: str, num_layers: int) -> Iterator[str]:
    """Yield the names that a pattern stands for."""
    parts = re.split(r"{([^}]*)}", re.sub(r"\.EXL2$", ".{EXL2}", pattern))
    choices = [
        part.replace("EXL2", PACKED).split(",") if i % 2 else [part] for i, part in enumerate(parts)
    ]
    layers = range(num_layers) if ".N." in pattern else range(1)
    for layer, words in itertools.product(layers, itertools.product(*choices)):
        yield "".join(words).replace(".N.", f".{layer}.")
