"""Names of EXL2 models on the Hub, as commands take them in place of a folder."""

import re
from dataclasses import dataclass
from pathlib import Path

PATTERN = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>[\w./-]+))?(:(?P<choice>[\w./-]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """`org/name`, `org/name@revision`, `org/name:4.0`, or all of it.

    choice: bits per weight, or the name of a branch or folder.
    """

    repo: str
    revision: str | None = None
    choice: str | None = None

    @classmethod
    def of(cls, text: Path | str) -> "HubName | None":
        """Parse a name; None for anything else, such as most paths."""
        match = PATTERN.fullmatch(str(text))
        return match and cls(**match.groupdict())

    def __str__(self) -> str:
        """Return the name as it is typed."""
        revision = "" if self.revision is None else f"@{self.revision}"
        return self.repo + revision + ("" if self.choice is None else f":{self.choice}")

    @property
    def is_plain(self) -> bool:
        """Whether it may also be a path: it has neither a revision nor a choice."""
        return self.revision is None and self.choice is None


def on_hub(model: Path) -> HubName | None:
    """Return the name by which the Hub has a model; None for a folder, which goes first."""
    return None if model.exists() else HubName.of(model)


def name_of(model: Path) -> str:
    """Return the name of a model for clients and records: that on the Hub, or of its folder."""
    return str(on_hub(model) or model.resolve().name)
