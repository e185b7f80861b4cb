from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exl2flow.core.errors import TensorShapeError
from exl2flow.model import TensorFiles
from exl2flow.model.norms import RmsNorm, load_norm


def load(folder: Path, weight: torch.Tensor) -> RmsNorm:
    save_file({"n.weight": weight}, folder / "x.safetensors")
    files = TensorFiles(folder)
    return load_norm(files, "n", size=4, eps=1e-6, dtype=torch.float32, device="cpu")


def test_norm_divides_by_the_root_mean_square() -> None:
    norm = RmsNorm(weight=torch.tensor([1.0, 2.0]), eps=0.0)

    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])


def test_norm_of_large_halves_does_not_overflow() -> None:
    norm = RmsNorm(weight=torch.ones(4).half(), eps=1e-6)

    result = norm(torch.full((4,), 60_000.0).half())

    assert result.dtype == torch.float16
    assert result.tolist() == [1.0] * 4


def test_norm_of_zeros_is_zero() -> None:
    assert RmsNorm(weight=torch.ones(4), eps=1e-6)(torch.zeros(4)).tolist() == [0.0] * 4


def test_head_norm_expanded_over_heads_is_read_as_one_row(tmp_path: Path) -> None:
    weight = torch.randn(4)

    norm = load(tmp_path, weight.expand(3, 4).contiguous())

    torch.testing.assert_close(norm.weight, weight, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 4), ()])
def test_other_shapes_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(TensorShapeError, match=r"`n\.weight`"):
        load(tmp_path, torch.randn(shape))
