"""The arrays of a measurement of very many slots, a safetensors file beside its JSON file.

The JSON file lists slots and options once, and the digest of the arrays. Both quantization and
reports read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from exl2flow.core import words
from exl2flow.core.errors import ConfigError, CorruptCheckpoint
from exl2flow.core.store.files import digest, read_tensors, unreadable, write_tensors
from exl2flow.model.files.exl2 import QuantParams

ARRAYS = "arrays"  # entry of a measurement's JSON file that describes the arrays
REMEDY = "copy both files of the measurement into one folder, or measure again"
Option = Mapping[str, QuantParams]  # projection name → parameters; "" for a slot's only projection


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionList:
    """The options of all slots of one shape, and the stored bits of each."""

    options: tuple[Option, ...]
    bits: tuple[int, ...]

    def to_json(self) -> list[dict[str, object]]:
        """Return an entry per option, as in `measurement.json`."""
        return [
            {"total_bits": bits, **_params_json(option)}
            for option, bits in zip(self.options, self.bits, strict=True)
        ]

    @classmethod
    def from_json(cls, entries: Sequence[Mapping[str, Any]]) -> Self:
        """Read the entries.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: they are none, or impossible.
        """
        return cls(
            options=tuple(map(_option, entries)),
            bits=tuple(int(entry["total_bits"]) for entry in entries),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredArrays:
    """slots: name → index of its list of options; rows of the arrays are in this order.

    accuracy, nats: fp32 (slots, options), zeros at the end of shorter lists; nats is None where
    costs are unknown.
    """

    slots: Mapping[str, int]
    lists: tuple[OptionList, ...]
    accuracy: torch.Tensor
    nats: torch.Tensor | None


def arrays_file(measurement: Path) -> Path:
    """Return the path of the arrays that belong to a measurement's JSON file."""
    return measurement.with_suffix(".safetensors")


def measurement_files(measurement: Path) -> tuple[Path, ...]:
    """Return the files that a measurement consists of: the JSON file, and the arrays if any."""
    arrays = arrays_file(measurement)
    return (measurement, arrays) if arrays.is_file() else (measurement,)


def write_arrays(path: Path, measured: MeasuredArrays) -> dict[str, object]:
    """Write the arrays; return the entry `arrays` of the JSON file, which names their sha256."""
    tensors = {"accuracy": measured.accuracy}
    tensors |= {} if measured.nats is None else {"nats": measured.nats}
    sha256 = write_tensors(path, tensors)
    return {
        "sha256": sha256,
        "options": [listed.to_json() for listed in measured.lists],
        "slots": dict(measured.slots),
    }


def _params_json(option: Option) -> dict[str, object]:
    if "" in option:
        return option[""].to_json()
    return {name: params.to_json() for name, params in option.items()}


def _option(entry: Mapping[str, Any]) -> Option:
    """Read an option.

    Raises:
        ValueError: it has impossible parameters.
    """
    try:
        if "bits" in entry:
            return {"": QuantParams.from_json(entry)}
        listed = {name: params for name, params in entry.items() if name != "total_bits"}
        return {name: QuantParams.from_json(params) for name, params in listed.items()}
    except ConfigError as error:
        raise ValueError(str(error)) from error


def read_arrays(path: Path, entry: Mapping[str, Any]) -> MeasuredArrays:
    """Read the arrays of a measurement.

    Args:
        path: the JSON file.
        entry: its entry `arrays`.

    Raises:
        ConfigError: the arrays are missing, damaged or those of another measurement.
        ReadFailed: they are there but cannot be read.
        KeyError, TypeError, ValueError, AttributeError: the entry is not one of a measurement.
    """
    lists = tuple(map(OptionList.from_json, entry["options"]))
    slots = {name: int(index) for name, index in entry["slots"].items()}
    if not slots or not {*slots.values()} <= {
        i for i, listed in enumerate(lists) if listed.options
    }:
        raise ValueError("a slot without options")
    lengths = [len(lists[index].options) for index in slots.values()]
    arrays = checked_arrays(path, entry)
    try:
        tensors = read_tensors(arrays)
    except CorruptCheckpoint as error:
        raise ConfigError(f"cannot read `{arrays}`: {words.cause(error)}; {REMEDY}") from error
    shape = (len(lengths), max(lengths))
    for name in ("accuracy", *({"nats"} & tensors.keys())):
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise ConfigError(
                f"`{arrays}`: `{name}` has shape {found}, `{path}` asks for {shape}; {REMEDY}"
            )
    _check_values(arrays, list(slots), tensors)
    return MeasuredArrays(
        slots=slots, lists=lists, accuracy=tensors["accuracy"], nats=tensors.get("nats")
    )


def checked_arrays(path: Path, entry: Mapping[str, Any]) -> Path:
    """Return the file of arrays if its digest is the one that the JSON file names.

    Args:
        path: the JSON file.
        entry: its entry `arrays`.

    Raises:
        ConfigError: it is missing, or another file.
        ReadFailed: it is there but cannot be read.
    """
    arrays = arrays_file(path)
    try:
        is_same = digest(arrays) == entry["sha256"]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f"`{arrays}`, which belongs to `{path}`, is missing; {REMEDY}") from error
    except OSError as error:
        raise unreadable(arrays, error) from error
    if not is_same:
        raise ConfigError(
            f"`{arrays}` is damaged or belongs to another measurement than `{path}`: its sha256 is "
            f"not the one named there; {REMEDY}"
        )
    return arrays


def _check_values(arrays: Path, slots: list[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Ask for costs from 0 on and accuracies from 0 to 1."""
    tops = {"accuracy": 1.0, "nats": torch.finfo(torch.float32).max}
    for name in tensors.keys() & tops.keys():
        values = tensors[name]
        is_good = (values >= 0) & (values <= tops[name])  # NaN is neither
        if not is_good.all():
            row, column = (~is_good).nonzero()[0].tolist()
            raise ConfigError(
                f"`{arrays}`: `{name}` of `{slots[row]}` is {float(values[row, column])} in option "
                f"{column}, which is not a finite number from 0{' to 1' * (name == 'accuracy')}; "
                "measure again"
            )
