"""The format's parameters, groups, tensors and refusals."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from exl2flow.core.errors import ConfigError, MissingTensor, TensorShapeError
from exl2flow.kernels import CHUNK_ELEMENTS, Group
from exl2flow.kernels.reference.ops import TORCH_OPS
from exl2flow.model import QuantizedLinear, QuantizedMatrix, QuantParams
from exl2flow.model.files.exl2 import (
    column_parts,
    host_names,
    is_quantized,
    padded_columns,
    quantized_layout,
    tensor_names,
)
from exl2flow.model.files.group_table import BIT_WIDTHS, first_words

KEY = "model.layers.3.self_attn.q_proj"
THREE_WIDTHS = QuantParams(
    bit_widths=(6, 3, 2), proportions=(0.05, 0.2, 0.75), group_sizes=(32, 64, 64)
)
FOUR_BITS = QuantParams(bit_widths=(4,), proportions=(1.0,), group_sizes=(128,))


def random_matrix(
    params: QuantParams, k: int, n: int, *, bias: torch.Tensor | None = None
) -> QuantizedMatrix:
    groups = params.groups(k)
    highest = torch.cat([torch.full((group.rows, 1), 2**group.bits) for group in groups])
    return QuantizedMatrix.encode(
        codes=(torch.randint(0, 256, (k, n)) % highest).to(torch.uint8),
        groups=groups,
        scale_codes=torch.randint(0, 16, (len(groups), n)).to(torch.uint8),
        max_scales=torch.rand(len(groups)).half(),
        perm=torch.randperm(k),
        bias=bias,
    )


def decoded_by_group(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return fp16 (k, n) by the law, the packed rows of each group, put where they belong."""
    codes = TORCH_OPS.unpack(matrix.packed, matrix.groups)
    scale_codes = TORCH_OPS.unpack_scales(matrix.scale_codes)
    weight = torch.empty(matrix.shape, dtype=torch.float16)
    features = torch.argsort(matrix.inverse_perm)
    for index, group in enumerate(matrix.groups):
        unit = (matrix.max_scales[index].float() / 256).half()
        scale = ((scale_codes[index].float() + 1) ** 2 * unit.float()).half()
        rows = slice(group.start, group.start + group.rows)
        steps = codes[rows].float() - 2 ** (group.bits - 1)
        weight[features[rows]] = (steps * scale.float()).half()
    return weight


@pytest.mark.parametrize(("n", "padded"), [(1, 32), (32, 32), (33, 64), (32001, 32032)])
def test_columns_are_padded_to_a_multiple_of_32(n: int, padded: int) -> None:
    assert padded_columns(n) == padded


@pytest.mark.parametrize("k", [32, 4096, 65504])
@pytest.mark.parametrize("n", [32, 4096, 151936, 262144])
def test_wide_matrices_are_decoded_in_parts_of_bounded_size(k: int, n: int) -> None:
    parts = [*column_parts(k, n)]

    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == n
    widths = {part.stop - part.start for part in parts}
    assert all(width % 32 == 0 and width * k <= CHUNK_ELEMENTS for width in widths)
    width = parts[0].stop - parts[0].start
    assert width == n or (width + 32) * k > CHUNK_ELEMENTS  # no more parts than needed


def test_very_tall_matrices_are_decoded_by_the_narrowest_parts() -> None:
    assert [*column_parts(2 * CHUNK_ELEMENTS, 64)] == [slice(0, 32), slice(32, 64)]


@pytest.mark.parametrize(
    ("size", "is_refused"), [(2**31 - 32, False), (2**31, True), (0, True), (-32, True), (48, True)]
)
def test_groups_have_a_multiple_of_32_rows_that_a_file_can_state(
    size: int, is_refused: bool
) -> None:
    refused = pytest.raises(ConfigError, match="group sizes must be multiples of 32")
    with refused if is_refused else nullcontext():
        QuantParams.uniform(4, size)


def test_order_is_that_in_which_rows_were_packed() -> None:
    perm = torch.randperm(96)
    groups = FOUR_BITS.groups(96)
    matrix = QuantizedMatrix.encode(
        codes=torch.zeros(96, 32, dtype=torch.uint8),
        groups=groups,
        scale_codes=torch.zeros(1, 32, dtype=torch.uint8),
        max_scales=torch.ones(1).half(),
        perm=perm,
    )

    assert torch.equal(matrix.order, perm)


def test_group_table_and_permutation_stay_in_main_memory() -> None:
    matrix = random_matrix(FOUR_BITS, 64, 32)
    tensors = matrix.to_tensors(KEY)

    table, permutation = host_names(KEY)

    assert tensors[table] is matrix.group_table
    assert tensors[permutation] is matrix.inverse_perm
    assert {table, permutation} < {*tensor_names(KEY)}


def test_example_of_three_widths_has_the_published_groups() -> None:
    groups = THREE_WIDTHS.groups(4096)

    counts = {bits: sum(g.bits == bits for g in groups) for bits in (6, 3, 2)}
    assert counts == {6: 7, 3: 13, 2: 48}
    assert [g.rows for g in groups] == [32] * 7 + [64] * 60 + [32]


def test_example_of_two_widths_has_the_published_bits() -> None:
    params = QuantParams(bit_widths=(3, 2), proportions=(0.05, 0.95), group_sizes=(64, 64))

    bits = params.total_bits(4096, 4096)

    assert len(params.groups(4096)) == 64
    assert bits == 34603008 + 1024 + 2048 + 1048576 + 131072 == 35785728
    assert f"{bits / 4096**2:.5f}" == "2.13300"


def test_short_matrix_gets_one_short_group() -> None:
    assert FOUR_BITS.groups(32) == (Group(bits=4, start=0, rows=32),)


def test_parameters_read_as_the_original_writes_them() -> None:
    assert str(THREE_WIDTHS) == "0.05:6b_32g/0.2:3b_64g/0.75:2b_64g s4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bit_widths": (2, 3, 6)}, "must fall"),
        ({"bit_widths": (6, 3, 3)}, "must fall"),
        ({"bit_widths": (7, 3, 2)}, "among"),
        ({"bit_widths": (6, 3)}, r"unequal lengths: \(\(6, 3\), "),
        ({"bit_widths": (), "proportions": (), "group_sizes": ()}, "unequal lengths"),
        ({"proportions": (0.05, 0.2, 0.74)}, "sum to exactly 1"),
        ({"proportions": (0.5, 0.75, -0.25)}, "sum to exactly 1"),
        ({"group_sizes": (32, 64, 48)}, "multiples of 32"),
        ({"group_sizes": (32, 64, 0)}, "multiples of 32"),
        ({"scale_bits": 8}, "scale bits must be 4, found 8"),
    ],
)
def test_impossible_parameters_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(THREE_WIDTHS, **change)


def test_a_width_may_have_no_rows() -> None:
    params = replace(THREE_WIDTHS, proportions=(0.0, 0.25, 0.75))

    assert [group.bits for group in params.groups(256)] == [3, 2, 2, 2]
    assert [band.bits for band in params.bands(256)] == [3, 2]


def test_a_matrix_may_have_all_widths() -> None:
    shares = (0.125, 0.125, 0.125, 0.125, 0.25, 0.25)
    params = QuantParams(bit_widths=BIT_WIDTHS, proportions=shares, group_sizes=(32,) * 6)

    assert [band.bits for band in params.bands(256)] == [*BIT_WIDTHS]


def test_parameters_survive_json_with_its_text_keys() -> None:
    value = THREE_WIDTHS.to_json()

    assert value == {
        "group_size": {"6": 32, "3": 64, "2": 64},
        "bits": [6, 3, 2],
        "bits_prop": [0.05, 0.2, 0.75],
        "scale_bits": 4,
    }
    assert QuantParams.from_json(value) == THREE_WIDTHS


@pytest.mark.parametrize(
    "change",
    [
        {"bits": None},
        {"bits": [6, 3]},
        {"bits": [6, 3, "x"]},
        {"group_size": {"6": 32, "3": 64}},
        {"group_size": [32, 64, 64]},
        {"bits_prop": [1.0]},
        {"scale_bits": None},
    ],
)
def test_damaged_json_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        QuantParams.from_json({**THREE_WIDTHS.to_json(), **change})


@pytest.mark.parametrize("field", ["bits", "bits_prop", "group_size"])
def test_missing_json_field_is_named(field: str) -> None:
    value = THREE_WIDTHS.to_json()
    del value[field]

    with pytest.raises(ConfigError, match=field):
        QuantParams.from_json(value)


def test_tensors_have_the_names_shapes_and_dtypes_of_the_format() -> None:
    matrix = random_matrix(THREE_WIDTHS, 480, 64, bias=torch.randn(64))
    groups = THREE_WIDTHS.groups(480)
    words = sum(g.rows * g.bits for g in groups) // 32

    found = {name: (t.dtype, tuple(t.shape)) for name, t in matrix.to_tensors(KEY).items()}

    assert found == {
        f"{KEY}.q_weight": (torch.int32, (words, 64)),
        f"{KEY}.q_scale": (torch.int32, (len(groups), 8)),
        f"{KEY}.q_scale_max": (torch.float16, (len(groups),)),
        f"{KEY}.q_groups": (torch.int16, (2 * len(groups),)),
        f"{KEY}.q_invperm": (torch.int32, (480,)),
        f"{KEY}.bias": (torch.float16, (64,)),
    }
    assert set(tensor_names(KEY)) == set(found) - {f"{KEY}.bias"}
    assert found == quantized_layout(KEY, THREE_WIDTHS, 480, 64, has_bias=True)


def test_bits_counted_are_bits_stored() -> None:
    bias = torch.zeros(32)

    for extra in (None, bias):
        matrix = random_matrix(THREE_WIDTHS, 480, 32, bias=extra)
        stored = sum(8 * tensor.nbytes for tensor in matrix.to_tensors(KEY).values())
        predicted = THREE_WIDTHS.total_bits(480, 32, has_bias=extra is not None)
        assert stored == matrix.total_bits == predicted


def test_groups_with_their_short_last_one_are_recovered_from_the_table() -> None:
    matrix = random_matrix(THREE_WIDTHS, 4096, 32)

    assert matrix.groups == THREE_WIDTHS.groups(4096)
    assert [g.rows for g in matrix.groups[-2:]] == [64, 32]


def test_decoded_matrix_follows_the_law() -> None:
    matrix = random_matrix(THREE_WIDTHS, 480, 32)

    weight = matrix.dequantize()

    assert torch.equal(weight, decoded_by_group(matrix))
    assert torch.equal(matrix.dequantize(torch.float32), weight.float())


def test_stored_permutation_is_ignored_whether_wrong_or_absent() -> None:
    matrix = random_matrix(FOUR_BITS, 256, 32)
    tensors = matrix.to_tensors(KEY)
    wrong = {**tensors, f"{KEY}.q_perm": torch.zeros(256, dtype=torch.int32)}

    assert f"{KEY}.q_perm" not in tensors
    for stored in (tensors, wrong):
        read = QuantizedMatrix.from_tensors(KEY, stored)
        assert torch.equal(read.dequantize(), matrix.dequantize())


def test_more_than_32767_rows_work() -> None:
    params = QuantParams(bit_widths=(8, 2), proportions=(0.75, 0.25), group_sizes=(128, 128))
    k = 65504  # the largest multiple of 32 whose indices fit 16 bits

    matrix = random_matrix(params, k, 8)

    narrowed = matrix.inverse_perm.to(torch.int16)  # as readers do, unsigned again when used
    assert torch.equal(narrowed.int() & 0xFFFF, matrix.inverse_perm)
    assert sorted(matrix.inverse_perm.tolist()) == list(range(k))
    assert matrix.groups == params.groups(k)
    assert torch.equal(matrix.dequantize(), decoded_by_group(matrix))


@pytest.mark.parametrize(("bits", "size"), [(8, 128), (8, 32), (2, 32)])
def test_groups_and_words_of_the_most_rows_are_counted_by_16_bits(bits: int, size: int) -> None:
    groups = QuantParams.uniform(bits, size).groups(65504)

    assert max(len(groups), *first_words(groups)) < 2**15


def test_more_rows_than_readers_can_index_are_refused() -> None:
    with pytest.raises(TensorShapeError, match="65536 rows cannot be stored: the format has 65535"):
        random_matrix(FOUR_BITS, 65536, 8)


def test_linear_map_is_the_decoded_matrix() -> None:
    matrix = random_matrix(THREE_WIDTHS, 480, 64, bias=torch.randn(64))
    linear = QuantizedLinear(matrix, out_features=50, dtype=torch.float32, device="cpu")
    assert matrix.bias is not None

    rows = linear(torch.eye(480)) - matrix.bias[:50].float()

    # one product per sum: only the bias, of size 1, is rounded away from
    torch.testing.assert_close(rows, matrix.dequantize(torch.float32)[:, :50], rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_biased", [True, False])
def test_a_matrix_goes_to_a_device_with_its_bias_and_without_its_table(is_biased: bool) -> None:
    bias = torch.randn(64) if is_biased else None
    matrix = random_matrix(THREE_WIDTHS, 480, 64, bias=bias)

    moved = matrix.to("meta")

    assert (moved.bias is not None) == is_biased
    there = {name for name, tensor in moved.to_tensors("").items() if tensor.is_meta}
    assert there == {*matrix.to_tensors("")} - {host_names("")[0]}
    assert moved.groups == matrix.groups


def test_laid_out_matrix_has_the_same_values() -> None:
    matrix = random_matrix(THREE_WIDTHS, 480, 64)

    packed = matrix.laid_out(matrix.order)

    assert (packed.groups, packed.shape) == (matrix.groups, (480, 64))
    assert torch.equal(TORCH_OPS.decode_packed(packed), matrix.dequantize())


def test_quantized_linears_are_known_by_their_names() -> None:
    names = set(tensor_names(KEY)) | {"lm_head.weight"}

    assert is_quantized(KEY, names)
    assert not is_quantized("lm_head", names)


@pytest.mark.parametrize("name", tensor_names(""))
def test_missing_tensor_is_named(name: str) -> None:
    tensors = random_matrix(FOUR_BITS, 256, 32).to_tensors(KEY)
    del tensors[KEY + name]

    with pytest.raises(MissingTensor, match=KEY + name):
        QuantizedMatrix.from_tensors(KEY, tensors)


@pytest.mark.parametrize("name", tensor_names(""))
def test_tensor_of_another_dtype_is_named(name: str) -> None:
    tensors = random_matrix(FOUR_BITS, 256, 32).to_tensors(KEY)
    tensors[KEY + name] = tensors[KEY + name].to(torch.float32)

    with pytest.raises(TensorShapeError, match=rf"{name}` is torch.float32, not"):
        QuantizedMatrix.from_tensors(KEY, tensors)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("packed", lambda t: t[:-1]),
        ("packed", lambda t: t[:, :24]),
        ("packed", lambda t: t[0]),
        ("packed", lambda t: torch.cat([t, t[:, :4]], 1)),
        ("scale_codes", lambda t: t[:1]),
        ("scale_codes", lambda t: t[:, :3]),
        ("max_scales", lambda t: t[:1]),
        ("group_table", lambda t: t[:3]),
        ("group_table", lambda t: t * torch.tensor([2, 1, 2, 1], dtype=torch.int16)),
        ("group_table", lambda t: t * torch.tensor([0, 1, 1, 1], dtype=torch.int16)),
        ("group_table", lambda t: t + torch.tensor([3, 0, 0, 0], dtype=torch.int16)),
        ("group_table", lambda t: t + torch.tensor([0, 8, 0, 8], dtype=torch.int16)),
        ("group_table", lambda t: t * torch.tensor([1, 1, 1, -1], dtype=torch.int16)),
        ("group_table", lambda t: t * torch.tensor([1, 1, 1, 3], dtype=torch.int16)),
        ("group_table", lambda t: t * torch.tensor([1, 1, 1, 0], dtype=torch.int16)),
        ("group_table", lambda t: t + torch.tensor([0, 0, 0, 2], dtype=torch.int16)),
        ("inverse_perm", lambda t: t[:-32]),
        ("inverse_perm", lambda t: t.view(2, -1)),
        ("inverse_perm", lambda t: t[0]),
        ("max_scales", lambda t: t.view(2, 1)),
        ("group_table", lambda t: t[0]),
        ("scale_codes", lambda t: t[0, 0]),
    ],
)
def test_tensors_that_contradict_one_another_are_refused(name: str, cut: object) -> None:
    matrix = random_matrix(FOUR_BITS, 256, 32)
    damaged = replace(matrix, **{name: cut(getattr(matrix, name))})  # type: ignore[operator]  # a row

    with pytest.raises(TensorShapeError, match=f"`{KEY}` contradict one another"):
        QuantizedMatrix.from_tensors(KEY, damaged.to_tensors(KEY))


@pytest.mark.parametrize("value", [0, 256, -1, -256, 2**31 - 1])
def test_a_permutation_that_repeats_or_leaves_the_rows_is_refused(value: int) -> None:
    matrix = random_matrix(FOUR_BITS, 256, 32)
    damaged = matrix.inverse_perm.clone()
    damaged[damaged == 7] = value

    tensors = replace(matrix, inverse_perm=damaged).to_tensors(KEY)
    with pytest.raises(TensorShapeError, match=f"`{KEY}.*does not name each of 256 rows once"):
        QuantizedMatrix.from_tensors(KEY, tensors)


@pytest.mark.parametrize("bias", [torch.tensor(1.0), torch.ones(31), torch.ones(32).int()])
def test_a_bias_of_another_shape_or_kind_is_refused(bias: torch.Tensor) -> None:
    tensors = random_matrix(FOUR_BITS, 256, 64).to_tensors(KEY) | {f"{KEY}.bias": bias}

    with pytest.raises(TensorShapeError, match=f"`{KEY}` contradict one another"):
        QuantizedMatrix.from_tensors(KEY, tensors)


def test_matrix_without_groups_is_refused() -> None:
    matrix = random_matrix(FOUR_BITS, 256, 32)
    empty = {
        name: getattr(matrix, name)[:0] for name in ("max_scales", "group_table", "scale_codes")
    }

    with pytest.raises(TensorShapeError, match="contradict one another"):
        QuantizedMatrix.from_tensors(KEY, replace(matrix, **empty).to_tensors(KEY))
