"""Typed access to a JSON object of a model folder; every refusal names key and file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exl2flow.core.errors import SourceModelError
from exl2flow.model.config.foreign import advice, is_lfs_pointer, pointer_advice

MOST = 1 << 31  # an integer that can be: counts of positions and token ids have 32 bits
LARGEST = 1e15  # a number that can be
WIDEST = 1 << 20  # hidden states or MLPs that can be


def quoted(names: Iterable[str]) -> str:
    """Return names in backticks, with commas between them."""
    return ", ".join(f"`{name}`" for name in names)


def json_object(data: bytes, *, errors: str = "strict") -> dict[str, object]:
    """Return the object that a JSON file holds.

    Args:
        data: the file.
        errors: what happens to text that is not Unicode (half of a surrogate pair), as of
            `str.encode`: it is refused, or "replace".

    Raises:
        ValueError: it is not JSON, not an object, nested too deeply, or holds such text.
    """
    try:
        values = json.loads(data)
        text = json.dumps(values, ensure_ascii=False).encode(errors=errors)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it holds no JSON object")
    return values if errors == "strict" else json.loads(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The object `prefix` inside the JSON file `path`; a null value counts as an absent one.

    names: how the file calls keys that have another name here.
    """

    path: Path
    values: Mapping[str, object]
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, *, wanted: str = "a model") -> "Fields":
        """Read a JSON file that holds one object.

        Args:
            path: the file.
            wanted: what its folder holds, for advice.

        Raises:
            SourceModelError: the file is missing, unreadable or not a JSON object.
        """
        data = b""
        try:
            data = path.read_bytes()
            values = json_object(data)
        except (FileNotFoundError, NotADirectoryError) as error:
            is_here = path.parent.is_dir()
            lacking = f"`{path}` does not exist" if is_here else f"`{path.parent}` is not a folder"
            raise SourceModelError(
                advice(path.parent) or f"{lacking}; give the folder of {wanted}"
            ) from error
        except OSError as error:
            raise SourceModelError(f"cannot read `{path}`: {error.strerror}") from error
        except ValueError as error:
            raise SourceModelError(
                pointer_advice(path)
                if is_lfs_pointer(data)
                else f"`{path}` cannot be used as JSON ({error}); fetch the file again"
            ) from error
        return cls(path=path, values=values)

    def has(self, key: str) -> bool:
        """Tell whether the key is present and not null."""
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST
    ) -> int:
        """Return an integer from `least` to `most`."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_bool = isinstance(value, bool)
        if is_bool or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """Return a number greater than `above`, up to `LARGEST`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, value, "a number")
        if not above < value <= LARGEST:  # nor NaN
            raise self.refusal(key, value, f"a number above {above:g}, at most {LARGEST:g}")
        return float(value)

    def optional(self, key: str | None) -> float | None:
        """Return a number that need not be there; None: there is none."""
        return self.number(key) if key is not None and self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, value, "a string")
        return value

    def texts(self, key: str, count: int) -> tuple[str, ...]:
        """Return `count` strings."""
        value = self._list(key, count)
        if not all(isinstance(item, str) for item in value):
            raise self.refusal(key, value, "a list of strings")
        return tuple(str(item) for item in value)

    def numbers(self, key: str, count: int, *, above: float = 0.0) -> tuple[float, ...]:
        """Return `count` numbers greater than `above`."""
        inner = self._items(key, count)
        return tuple(inner.number(name, above=above) for name in inner.values)

    def integers(self, key: str, count: int, *, least: int, most: int) -> tuple[int, ...]:
        """Return `count` integers from `least` to `most`."""
        inner = self._items(key, count)
        return tuple(inner.integer(name, least=least, most=most) for name in inner.values)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return token ids given as null, one integer or a list; negative ids mean none."""
        value = self.values.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(ids) != len(items) or any(item >= MOST for item in ids):
            raise self.refusal(key, value, "a token id or a list of token ids")
        return tuple(item for item in ids if item >= 0)

    def inner(self, key: str) -> "Fields":
        """Return the object under `key`; empty when absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object")
        return Fields(path=self.path, values=value, prefix=f"{self.prefix}{key}.")

    def named(self, key: str) -> str:
        """Return a key as the file calls it, in backticks."""
        return f"`{self.prefix}{self.names.get(key, key)}`"

    def _items(self, key: str, count: int) -> "Fields":
        """Return the items of a list as fields of their own."""
        items = {f"{key}[{index}]": item for index, item in enumerate(self._list(key, count))}
        return Fields(path=self.path, values=items, prefix=self.prefix)

    def _list(self, key: str, count: int) -> Sequence[object]:
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.refusal(key, value, f"a list of {count} items")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise SourceModelError(
                f"{self.named(key)} is missing in `{self.path}`; fetch the file again or add it"
            )
        return default

    def refusal(self, key: str, value: object, wanted: str) -> SourceModelError:
        """Return the error that says what the value of a key must be."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return SourceModelError(
            f"{self.named(key)} in `{self.path}` is {shown}; it must be {wanted}"
        )
