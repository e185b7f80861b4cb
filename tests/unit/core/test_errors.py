"""The exception tree is the one drawn at the top of its module."""

import inspect
import json
import pickle
import re
from pathlib import Path

import pytest

from exl2flow.core import errors
from exl2flow.core.errors import Exl2FlowError, Interrupted

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception)
}


def drawn_tree() -> dict[str, str]:
    """Return class → parent as the module's docstring draws them."""
    parents = {}
    drawn = re.sub(r"·\n│ +", "· ", errors.__doc__ or "")
    root, *lines = (line for line in drawn.splitlines() if re.search("^Exl2|─", line))
    for line in lines:
        parent, *children = re.findall(r"[A-Z]\w+", line)
        parents[parent] = root
        parents |= dict.fromkeys(children, parent)
    return parents


def test_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    found = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items()}

    assert found.pop("Exl2FlowError") == "Exception"
    assert drawn_tree() == found


def test_every_error_says_what_it_means() -> None:
    assert [name for name, kind in CLASSES.items() if not kind.__doc__] == []


def test_reference_has_each_error_once() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "errors.md"

    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)

    assert len(listed) == len(set(listed))


def test_errors_are_not_retryable_unless_they_say_so() -> None:
    assert not Exl2FlowError.retryable
    assert not errors.WriteFailed("full").retryable


def test_interruption_knows_its_signal() -> None:
    error = Interrupted("stopped", signum=15)

    assert (str(error), error.signum) == ("stopped", 15)


def test_a_hub_that_is_away_says_when_to_come_back() -> None:
    error = errors.HubUnavailable("busy", wait=3.0)

    assert (str(error), error.wait, error.retryable) == ("busy", 3.0, True)
    assert errors.HubUnavailable("busy").wait is None
    assert Exl2FlowError.retryable is False


def test_an_interruption_goes_from_process_to_process() -> None:
    error = pickle.loads(pickle.dumps(Interrupted("stopped", signum=15)))

    assert (type(error), str(error), error.signum) == (Interrupted, "stopped", 15)


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000])
def test_what_holds_no_json_raises_one_of_these(data: bytes) -> None:
    with pytest.raises(errors.NO_JSON):
        json.loads(data)
