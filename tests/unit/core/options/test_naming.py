from pathlib import Path

import pytest

from exl2flow.core.options.naming import bitrate_name, model_name, without_credentials


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


def test_bitrates_are_named_with_a_decimal_and_all_their_digits() -> None:
    names = [bitrate_name(bpw) for bpw in (4, 2.5, 2.25, 3.125, 4.001)]

    assert names == ["4.0bpw", "2.5bpw", "2.25bpw", "3.125bpw", "4.001bpw"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("tcp://me:secret@host:8786", "tcp://host:8786"),
        ("tls://me:se/cr@et@host:8786/path", "tls://host:8786/path"),
        ("me:secret@host:8786", "host:8786"),
        ("ray://host:10001", "ray://host:10001"),
        ("auto", "auto"),
    ],
)
def test_addresses_are_shown_without_credentials(address: str, shown: str) -> None:
    assert without_credentials(address) == shown
