from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import near
from safetensors.torch import save_file

from exl2flow.core.errors import MissingTensor, TensorShapeError
from exl2flow.kernels import ACTIVATIONS, GATED_ACTIVATIONS, Group
from exl2flow.model import (
    DenseLinear,
    Linear,
    ProjectionSpec,
    QuantizedLinear,
    QuantizedMatrix,
    TensorFiles,
)
from exl2flow.model.layers.fuse import product_of
from exl2flow.model.layers.linear import PackedLinear, RowOrders, made_linear, read_part

K, N = 64, 40  # N is stored padded to 64 columns


def projection(*, n: int = N, has_bias: bool = True) -> ProjectionSpec:
    return ProjectionSpec(
        name="q_proj",
        key="q",
        role="q",
        in_features=K,
        out_features=n,
        has_bias=has_bias,
        capture="input",
    )


def quantized(*, padded: int = 64, bias: bool = True) -> QuantizedMatrix:
    groups = (Group(bits=4, start=0, rows=32), Group(bits=3, start=32, rows=32))
    codes = torch.cat((torch.randint(0, 16, (32, padded)), torch.randint(0, 8, (32, padded))))
    return QuantizedMatrix.encode(
        codes=codes.to(torch.uint8),
        groups=groups,
        scale_codes=torch.randint(0, 16, (2, padded), dtype=torch.uint8),
        max_scales=torch.tensor([0.02, 0.05]).half(),
        perm=torch.randperm(K),
        bias=torch.randn(padded).half() if bias else None,
    )


def load(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> Linear:
    save_file(tensors, folder / "x.safetensors")
    files = TensorFiles(folder)
    spec = options.pop("spec", projection())
    made = {name: options.pop(name) for name in ("packed", "orders") if name in options}
    part = read_part(files, spec, dtype=torch.float32, device="cpu", **options)
    return made_linear(part, dtype=torch.float32, device="cpu", **made)


def test_dense_linear_is_used_where_a_weight_is_stored(tmp_path: Path) -> None:
    weight, bias, x = torch.randn(N, K), torch.randn(N), torch.randn(2, 3, K)

    linear = load(tmp_path, {"q.weight": weight, "q.bias": bias})

    assert isinstance(linear, DenseLinear)
    torch.testing.assert_close(linear(x), x @ weight.T + bias)


def test_exl2_linear_is_used_where_packed_words_are_stored(tmp_path: Path) -> None:
    matrix, x = quantized(), torch.randn(2, 3, K)

    linear = load(tmp_path, matrix.to_tensors("q"))

    assert isinstance(linear, QuantizedLinear)
    assert matrix.bias is not None
    expected = x @ matrix.dequantize(torch.float32) + matrix.bias.float()
    torch.testing.assert_close(linear(x), expected[..., :N])


def test_exl2_weight_equals_the_decoded_matrix_without_padding(tmp_path: Path) -> None:
    matrix = quantized()

    linear = load(tmp_path, matrix.to_tensors("q"))

    expected = matrix.dequantize(torch.float32)[:, :N].T
    torch.testing.assert_close(linear.weight, expected, rtol=0, atol=0)


def test_a_packed_linear_is_the_same_map(tmp_path: Path) -> None:
    matrix, x = quantized(), torch.randn(2, 3, K)
    decoded = load(tmp_path, matrix.to_tensors("q"))

    linear = load(tmp_path, matrix.to_tensors("q"), packed=True)

    assert isinstance(linear, PackedLinear)
    assert torch.equal(linear.weight.float(), decoded.weight)
    expected = decoded(x)
    bound = near(expected, 1, dtype=torch.float16)  # what a packed matrix reads and returns
    torch.testing.assert_close(linear(x), expected, **bound)


def test_packed_linears_share_an_order_that_is_the_same(tmp_path: Path) -> None:
    (first, other), orders = (quantized(), quantized()), RowOrders()
    same = replace(other, inverse_perm=first.inverse_perm.clone())

    found = [PackedLinear(m, out_features=N, orders=orders) for m in (first, other, same)]

    assert found[2].matrix.order is found[0].matrix.order
    assert found[1].matrix.order is not found[0].matrix.order
    assert torch.equal(found[1].matrix.order[other.inverse_perm.long()], torch.arange(K))


def test_stored_bias_is_ignored_where_the_config_has_none(tmp_path: Path) -> None:
    spec = projection(has_bias=False)

    linear = load(tmp_path, {"q.weight": torch.randn(N, K), "q.bias": torch.ones(N)}, spec=spec)

    assert linear.bias is None


def test_any_rows_are_cut_to_the_out_features(tmp_path: Path) -> None:
    weight = torch.randn(N + 9, K)
    spec = projection(has_bias=False)

    linear = load(tmp_path, {"q.weight": weight}, spec=spec, any_rows=True)

    torch.testing.assert_close(linear.weight, weight[:N], rtol=0, atol=0)


def test_fewer_rows_than_out_features_are_all_used(tmp_path: Path) -> None:
    spec = projection(has_bias=False)

    linear = load(tmp_path, {"q.weight": torch.randn(N - 9, K)}, spec=spec, any_rows=True)

    assert linear(torch.randn(1, K)).shape == (1, N - 9)


@pytest.mark.parametrize("shape", [(N, K + 1), (N - 1, K), (K, N), (N,)])
def test_shape_that_contradicts_the_config_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(TensorShapeError, match="`q` has shape"):
        load(tmp_path, {"q.weight": torch.randn(shape)}, spec=projection(has_bias=False))


def test_quantized_shape_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorShapeError, match="`q` has shape"):
        load(tmp_path, quantized().to_tensors("q"), spec=projection(n=100))


def test_missing_bias_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match=r"`q\.bias`"):
        load(tmp_path, {"q.weight": torch.randn(N, K)})


def test_missing_weight_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match=r"`q\.weight`"):
        load(tmp_path, {"q.bias": torch.randn(N)})


def test_incomplete_quantized_linear_is_named(tmp_path: Path) -> None:
    tensors = quantized().to_tensors("q")
    del tensors["q.q_scale"]

    with pytest.raises(MissingTensor, match=r"`q\.q_scale`"):
        load(tmp_path, tensors)


def test_a_narrow_bias_goes_with_a_wide_weight() -> None:
    weight, bias, x = torch.randn(3, 4), torch.randn(3).half(), torch.randn(2, 4)

    y = DenseLinear(weight, bias)(x)

    assert torch.equal(y, torch.nn.functional.linear(x, weight, bias.float()))


def test_products_do_not_claim_an_activation_that_they_do_not_know() -> None:
    orders: RowOrders = {}
    matrix = quantized()
    gate, up = (PackedLinear(matrix, out_features=N, orders=orders) for _ in range(2))

    assert all(product_of([gate, up], activation=name) for name in ACTIVATIONS)
    assert not any(product_of([gate, up], activation=name) for name in GATED_ACTIVATIONS)
