"""Fields that take more types than they are read as: a path may be given as text.

Validation has always converted them; here type checkers and editors learn of it, too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

Read = TypeVar("Read")
Taken = TypeVar("Taken")

if TYPE_CHECKING:

    class Given(Generic[Read, Taken]):
        """A field that is read as one type and constructed from another."""

        def __get__(self, options: object, kind: object = None) -> Read: ...
        def __set__(self, options: object, value: Taken) -> None: ...

else:

    class Given:
        """The type that a field is read as, which is all that pydantic needs."""

        def __class_getitem__(cls, types):
            """Return the first of two types."""
            return types[0]


EMPTY: Any = None  # default of such a field
PathField = Given[Path, Path | str]
OptionalPath = Given[Path | None, Path | str | None]
Paths = Given[tuple[Path, ...], Sequence[Path | str]]
