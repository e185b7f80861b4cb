from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import layer_norm

from exl2flow.core.errors import MissingTensor, TensorShapeError
from exl2flow.model import NormSpec, TensorFiles
from exl2flow.model.layers.norms import Norm, load_norm

SPEC = NormSpec(role="q", key="n", shape=(4,), eps=1e-6)


def load(
    folder: Path,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Norm:
    biases = {} if bias is None else {"n.bias": bias}
    save_file({"n.weight": weight, **biases}, folder / "x.safetensors")
    return load_norm(TensorFiles(folder), replace(SPEC, **options), dtype=dtype, device="cpu")


def test_norm_divides_by_the_root_mean_square() -> None:
    norm = Norm(weight=torch.tensor([1.0, 2.0]), eps=0.0)

    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])


def test_norm_of_large_halves_does_not_overflow() -> None:
    norm = Norm(weight=torch.ones(4).half(), eps=1e-6)

    result = norm(torch.full((4,), 60_000.0).half())

    assert result.dtype == torch.float16
    assert result.tolist() == [1.0] * 4


def test_norm_of_zeros_is_zero() -> None:
    assert Norm(weight=torch.ones(4), eps=1e-6)(torch.zeros(4)).tolist() == [0.0] * 4


def test_head_norm_expanded_over_heads_is_read_as_one_row(tmp_path: Path) -> None:
    weight = torch.randn(4)

    norm = load(tmp_path, weight.expand(3, 4).contiguous())

    torch.testing.assert_close(norm.weight, weight, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 4), ()])
def test_other_shapes_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(TensorShapeError, match=r"`n\.weight`"):
        load(tmp_path, torch.randn(shape))


def test_weights_of_each_head_are_kept(tmp_path: Path) -> None:
    weight, x = torch.randn(3, 4), torch.randn(2, 3, 5, 4)

    norm = load(tmp_path, weight, shape=(3, 4), centered=True)

    assert torch.equal(norm.weight, weight)
    for head in range(3):
        expected = layer_norm(x[:, head], (4,), weight[head], eps=1e-6)
        torch.testing.assert_close(norm(x)[:, head], expected)


def test_offset_and_multiplier_of_a_norm_are_applied_before_rounding(tmp_path: Path) -> None:
    weight, bias = torch.full((4,), 2.0**-12), torch.full((4,), 2.0**-20)

    norm = load(tmp_path, weight, bias, offset=1.0, multiplier=4096.0, has_bias=True)
    in_fp16 = load(tmp_path, weight, offset=1.0, multiplier=0.5, dtype=torch.float16)

    assert norm.weight.tolist() == [4097.0] * 4
    assert norm.bias is not None
    assert norm.bias.tolist() == [2.0**-8] * 4
    assert in_fp16.weight.tolist() == [0.5] * 4


def test_weights_without_offset_stay_as_they_are(tmp_path: Path) -> None:
    weight = torch.randn(4).bfloat16()

    assert torch.equal(load(tmp_path, weight, dtype=torch.float16).weight, weight.half())


def test_a_missing_or_misshapen_bias_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match=r"`n\.bias`"):
        load(tmp_path, torch.ones(4), has_bias=True)

    with pytest.raises(TensorShapeError, match=r"`n\.bias`"):
        load(tmp_path, torch.ones(4), torch.ones(5), has_bias=True)


@pytest.mark.parametrize("bias", [None, torch.randn(64)])
def test_a_centered_norm_is_a_layer_norm(bias: torch.Tensor | None) -> None:
    norm = Norm(weight=torch.randn(64), bias=bias, eps=1e-3, centered=True)
    x = torch.randn(3, 5, 64) + 2

    torch.testing.assert_close(norm(x), layer_norm(x, (64,), norm.weight, bias, eps=1e-3))


def test_halves_are_centered_in_fp32() -> None:
    norm = Norm(weight=torch.ones(2).half(), eps=1e-6, centered=True)

    assert norm(torch.tensor([60_000.0, 59_968.0]).half()).tolist() == [1.0, -1.0]
