from pathlib import Path

import pytest

from exl2flow.core.naming import model_name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("models/Llama-7B", "Llama-7B"),
        ("org/tiny@main", "tiny@main"),
        ("org/tiny@0123456789abcdef0123456789abcdef01234567", "tiny@0123456"),
    ],
)
def test_names_are_short_enough_for_a_list_of_runs(source: str, name: str) -> None:
    assert model_name(Path(source)) == name
