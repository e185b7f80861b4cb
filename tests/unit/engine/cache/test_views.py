"""Attention through the views of a paged cache."""

from pathlib import Path

import pytest
from caches import GPU_FORMATS, assert_near, ends_of_prompts


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_ends_of_prompts_are_read_as_in_whole_prompts(
    name: str, window: int | None, tmp_path: Path
) -> None:
    for found, expected in ends_of_prompts(name, window, tmp_path, device="cpu"):
        assert_near(found, expected)
