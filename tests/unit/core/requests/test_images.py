"""Images in messages and prompts are recognized, and refused by one sentence."""

from typing import Any

import pytest

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.images import placeholders, refuse_images
from exl2flow.core.requests.request import Request

URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TEXT = {"type": "text", "text": "an image"}


@pytest.mark.parametrize(
    "value",
    [
        {"image": "a.png"},
        {"images": ["a.png"]},
        {"type": "image"},
        {"role": "user", "content": [TEXT, URL]},
        [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}],
        ({"type": "video"},),
    ],
)
def test_images_are_refused_wherever_they_are(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^line 3 holds an image, but .* only the text model"):
        refuse_images(value, "line 3")


@pytest.mark.parametrize(
    "value", ["image", {"role": "user", "content": [TEXT]}, {"type": ["image"]}, [1, 2], None, 0.5]
)
def test_text_that_mentions_images_is_accepted(value: Any) -> None:
    refuse_images(value, "line 3")


def test_values_of_any_depth_are_searched() -> None:
    value: Any = {"type": "image"}
    for _ in range(100_000):
        value = [value]

    with pytest.raises(ConfigError, match="holds an image"):
        refuse_images(value, "line 3")


def test_a_request_with_messages_that_hold_an_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^`prompt` holds an image"):
        Request([{"role": "user", "content": [URL]}])  # type: ignore[list-item]


def test_placeholders_are_the_ids_that_a_config_names() -> None:
    config = {
        "image_token_id": 7,
        "video_token_id": 8,
        "image_token_index": None,
        "bos_token_id": 1,
    }

    assert placeholders(config) == {7, 8}
    assert placeholders({"image_token_index": 32000}) == {32000}
    assert placeholders({"image_token_id": True}) == frozenset()
