"""Names of repositories are those that the Hub allows."""

import pytest
from huggingface_hub.utils import HFValidationError, validate_repo_id
from pydantic import ValidationError

from exl2flow.core.options.publication import PublishOptions

NAMES = (
    "org/name",
    "Org/Name-1.2_B",
    "o/n",
    f"org/{'n' * 96}",
    "org/a--b",
    "org/a..b",
    "org/name.git",
    "org/-name",
    "org/name-",
    "org/.name",
    "org/name.",
    "org-/name",
    f"org/{'n' * 97}",
    "org/näme",
    "org/na me",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_allowed_here_exactly_if_the_hub_allows_it(name: str) -> None:
    try:
        validate_repo_id(name)
        is_valid = True
    except HFValidationError:
        is_valid = False

    if is_valid:
        assert PublishOptions(repo=name).repo == name
    else:
        with pytest.raises(ValidationError, match="the Hub does not allow this name"):
            PublishOptions(repo=name)


@pytest.mark.parametrize("name", ["name", "a/b/c", "", "/name", "org/"])
def test_an_owner_and_a_name_are_needed(name: str) -> None:
    with pytest.raises(ValidationError, match="give it as `org/name`"):
        PublishOptions(repo=name)
