"""The CUDA sources as text, and the structs that launches pass to them, declared only there."""

import re
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

Entry = TypeVar("Entry", np.void, np.ndarray)
FOLDER = Path(__file__).parents[1] / "csrc"
NUMBERS = {"int": np.int32, "unsigned": np.uint32, "float": np.float32, "integer": np.int64}


@cache
def source(file: str) -> str:
    """Return a source with its headers inlined: CuPy's cache keys on this text alone."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    return re.sub(r'#include "(.*)"\n', lambda match: source(match[1]), text)


def struct(file: str, name: str, **lengths: int) -> np.dtype[np.void]:
    """Return the dtype of a struct of a source, laid out as C does it; pointers are addresses.

    Args:
        file: the source.
        name: of the struct, whose fields come before its functions.
        lengths: the constants by which its arrays are declared.
    """
    text = re.sub("//.*", "", source(file)).replace("const ", "")
    body = text.split(f"struct {name} {{")[1].split("};")[0].split("__device__")[0]
    fields = []
    for declaration in body.split(";")[:-1]:
        kind, declarators = declaration.replace("*", " *").split(maxsplit=1)
        for declarator in declarators.split(","):
            field, *sizes = re.findall(r"\w+", declarator)
            number = np.uint64 if "*" in declarator else NUMBERS.get(kind)
            shape = tuple(lengths.get(size) or int(size) for size in sizes)
            fields.append((field, number or struct(file, kind, **lengths), shape))
    return np.dtype(fields, align=True)


def filled(entry: Entry, **values: torch.Tensor | float) -> Entry:
    """Set fields of a kernel's struct, or of several, to numbers, or to addresses of tensors."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous(), f"{name} is not contiguous"
            value = value.data_ptr()
        entry[name] = value
    return entry


def fill(entry: np.void, **values: torch.Tensor | float) -> list[torch.Tensor]:
    """Set fields like `filled`; return the tensors that the struct now points to."""
    filled(entry, **values)
    return [value for value in values.values() if isinstance(value, torch.Tensor)]
