"""Weights in fp8 read as the products of stored elements and scales, in every published naming."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from fp8_models import BLOCK, FORMS, FP8, expanded, make_fp8, set_config
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import MissingTensor, NonFiniteState, SourceModelError, TensorShapeError
from exl2flow.inference import load_model
from exl2flow.model import CanonicalTensors, TensorFiles, resolve
from exl2flow.model.files import fp8
from exl2flow.model.files.source_tensors import check_claimed, check_tensors

KEY = "model.layers.0.mlp.up_proj"
NAME = f"{KEY}.weight"


@pytest.mark.parametrize("form", FORMS)
def test_an_fp8_model_reads_as_its_decoded_weights(tmp_path: Path, form: str) -> None:
    files = TensorFiles(make_fp8(tmp_path, form))
    plain = TensorFiles(tmp_path / "plain")

    assert set(files.names) == set(plain.names)
    for name in plain.names:
        found, expected = files.read(name), plain.read(name)
        assert files.dtype(name) == found.dtype == torch.float16
        assert files.shape(name) == found.shape == expected.shape
        assert files.nbytes(name) == found.nbytes
        assert torch.equal(found, expected)
    assert files.undecodable() == []


@pytest.mark.parametrize("form", ["blocks, fp32", "channels (n, 1)"])
def test_an_fp8_model_runs_like_its_twin(tmp_path: Path, form: str) -> None:
    source = make_fp8(tmp_path, form)
    ids = torch.randint(0, 100, (1, 12))

    found = load_model(source, device="cpu").decoder.forward(ids)

    assert torch.equal(found, load_model(tmp_path / "plain", device="cpu").decoder.forward(ids))
    check_tensors(resolve(source))
    check_claimed(resolve(source))


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 7), (129, 40)])
@pytest.mark.parametrize("grid", [(128, 128), (1, 64), (200, 32), (3, 5)])
def test_blocks_need_not_divide_the_matrix(shape: tuple[int, int], grid: tuple[int, int]) -> None:
    (n, k), (rows, columns) = shape, grid
    codes, scales = torch.randn(n, k).to(FP8), torch.rand(-(-n // rows), -(-k // columns))
    found = torch.empty(shape, dtype=torch.float16)

    assert fp8.decode(codes, scales, grid, found)

    each = expanded(scales, codes.shape, rows, columns)
    assert torch.equal(found, (codes.float() * each).half())


@pytest.mark.parametrize("form", FORMS)
def test_some_rows_of_a_weight_have_its_scales(tmp_path: Path, form: str) -> None:
    files = TensorFiles(make_fp8(tmp_path, form))
    whole = files.read(NAME)

    files._entries["some"] = files._entries[NAME].rows(17, 60)
    files._entries["some.weight"] = files._entries["some"].rows(20, 30)

    assert files.shape("some.weight") == (30, 64)
    assert files.nbytes("some.weight") == 2 * 30 * 64
    assert files.dtype("some.weight") == torch.float16
    assert torch.equal(files.read("some.weight"), whole[37:67])
    assert files.undecodable() == []


@pytest.mark.parametrize("form", ["blocks, bf16", "channels (n, 1)", "tensor"])
@pytest.mark.parametrize("name", ["phi3", "mistral3"])
def test_fused_and_renamed_weights_have_their_scales(tmp_path: Path, name: str, form: str) -> None:
    source = make_fp8(tmp_path, form, name, make=make_checkpoint)
    tensors, plain = (CanonicalTensors(resolve(f)) for f in (source, tmp_path / "plain"))

    assert tensors.in_fp8
    assert set(tensors.names) == set(plain.names)
    for each in plain.names:
        assert torch.equal(tensors.read(each), plain.read(each))
    check_tensors(resolve(source))
    check_claimed(resolve(source))


@pytest.mark.parametrize(
    ("name", "key", "part"),
    [
        ("gpt2", "transformer.h.0.attn.c_proj", "self_attn.o_proj"),  # square: rows as columns
        ("internlm2", "model.layers.0.attention.wqkv", "self_attn.q_proj"),
    ],
)
def test_scales_of_rows_in_another_order_are_not_supported(
    tmp_path: Path, name: str, key: str, part: str
) -> None:
    source = make_checkpoint(name, tmp_path)
    tensors = load_file(source / "model.safetensors")
    weight = tensors[f"{key}.weight"]
    tensors |= {f"{key}.weight": weight.to(FP8), f"{key}.weight_scale": torch.ones(len(weight), 1)}
    save_file(tensors, source / "model.safetensors")
    files = CanonicalTensors(resolve(source))

    with pytest.raises(TensorShapeError, match=rf"stored transposed or interleaved.*{part}"):
        files.read(f"model.layers.0.{part}.weight")

    save_file(tensors | {f"{key}.weight_scale": torch.ones(1)}, source / "model.safetensors")
    assert CanonicalTensors(resolve(source)).undecodable() == []


@pytest.mark.parametrize("form", ["blocks, fp32", "blocks, e8m0", "tensor"])
def test_transformers_decodes_alike(tmp_path: Path, form: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    source = make_fp8(tmp_path, form)
    files, stored = TensorFiles(source), load_file(source / "model.safetensors")
    for name in (n for n in files.names if n.endswith("_proj.weight")):
        scales = stored[f"{name}_scale_inv"]
        expected = Fp8Dequantize(None)._dequantize_one(stored[name], scales, torch.float32)
        assert torch.equal(files.read(name), expected.half())


def test_every_element_and_every_exponent_of_a_scale_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(39, 1)
    exponents = torch.arange(107, 146, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    expected = torch.zeros(39, 256)
    for code in range(256):
        sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
        value = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
        value = float("nan") if code & 127 == 127 else value
        for row in range(39):
            expected[row, code] = (-1) ** sign * value * 2.0 ** (row + 107 - 127)
    found = torch.empty(39, 256, dtype=torch.float16)

    assert not fp8.decode(codes.view(FP8), exponents, (1, 256), found)
    assert torch.equal(found.nan_to_num(-1.0), expected.half().nan_to_num(-1.0))


def test_scales_of_activations_and_caches_are_not_listed(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "tensor")
    names = TensorFiles(source).names
    path = source / "model.safetensors"
    key = "model.layers.0.self_attn"
    more = {f"{key}.k_scale": torch.ones(1), f"{key}.v_proj.output_scale": torch.ones(1)}
    save_file(load_file(path) | more, path)

    assert TensorFiles(source).names == names


def changed(source: Path, **tensors: torch.Tensor | None) -> TensorFiles:
    """Replace tensors of `KEY`, or remove those that are None."""
    path = source / "model.safetensors"
    stored = load_file(path) | {f"{KEY}.{part}": t for part, t in tensors.items() if t is not None}
    gone = {f"{KEY}.{part}" for part, tensor in tensors.items() if tensor is None}
    save_file({name: t for name, t in stored.items() if name not in gone}, path)
    return TensorFiles(source)


def refused(files: TensorFiles, error: type[Exception], match: str) -> None:
    """Check that a weight is refused alike in advance, among all others, and when it is read."""
    [line] = files.undecodable()
    with pytest.raises(error, match=match) as raised:
        files.read(NAME)
    assert str(raised.value) == line


def test_missing_scales_are_named(tmp_path: Path) -> None:
    files = changed(make_fp8(tmp_path, "tensor"), weight_scale_inv=None)

    refused(files, MissingTensor, rf"`{KEY}\.weight_scale_inv` or `{KEY}\.weight_scale`, are in no")


@pytest.mark.parametrize("shape", [(2, 3), (3, 3), (95,), (3, 2, 1), (1, 96)])
def test_scales_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    files = changed(make_fp8(tmp_path, "blocks, fp32"), weight_scale_inv=torch.ones(shape))

    refused(files, TensorShapeError, rf"`{KEY}\.weight_scale_inv` has shape .*hence \(3, 2\)")


def test_a_block_size_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "blocks, fp32")
    set_config(source, quantization_config={"weight_block_size": [128, 128]})

    lines = TensorFiles(source).undecodable()

    assert len(lines) == 14
    assert "has blocks of (128, 128), hence (1, 1)" in lines[0]


def test_blocks_that_the_config_rules_out_are_refused(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "blocks, fp32")
    set_config(source, quantization_config={"weight_block_size": None})

    assert "`config.json` has no blocks" in TensorFiles(source).undecodable()[0]


@pytest.mark.parametrize(
    "block", [[128], [0, 128], [128, -1], "128", 128, [128.0, 128], [True, 8], [8, True]]
)
def test_a_block_size_that_is_no_pair_is_refused(tmp_path: Path, block: object) -> None:
    source = make_fp8(tmp_path, "blocks, fp32")
    set_config(source, quantization_config={"weight_block_size": block})

    with pytest.raises(
        SourceModelError, match=r"`quantization_config\.weight_block_size` in `.*js"
    ):
        TensorFiles(source)


GROUPS = {"config_groups": {"g": {"weights": {"block_structure": [2, 1]}}}}


@pytest.mark.parametrize(
    ("declared", "block"),
    [
        (None, (128, 128)),
        ({"quantization_config": {}}, (128, 128)),
        ({"quantization_config": {"weight_block_size": [64, 32]}}, (64, 32)),
        ({"quantization_config": {"weight_block_size": None}}, None),
        ({"text_config": {"quantization_config": {"weight_block_size": [8, 4]}}}, (8, 4)),
        ({"quantization_config": GROUPS}, (2, 1)),
    ],
)
def test_the_block_size_is_that_of_the_config(
    tmp_path: Path, declared: dict[str, object] | None, block: object
) -> None:
    (tmp_path / "config.json").write_text("{}")
    set_config(tmp_path, **(declared or {}))
    assert fp8.read_block(tmp_path) == block


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["blocks, fp32", "blocks, bf16", "channels (n, 1)"])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, form: str, value: float) -> None:
    source = make_fp8(tmp_path, form)
    stored = load_file(source / "model.safetensors")
    name = next(n for n in (f"{KEY}.weight_scale_inv", f"{KEY}.weight_scale") if n in stored)
    stored[name][1, 0] = value
    files = changed(source, **{name.rpartition(".")[2]: stored[name]})

    [line] = files.undecodable()

    assert f"`{name}`" in line
    assert "NaN or infinity in 1 of" in line
    with pytest.raises(NonFiniteState, match=f"`{NAME}`"):
        files.read(NAME)


def test_a_scale_of_e8m0_out_of_range_is_refused(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "blocks, e8m0")
    for code, message in ((255, "NaN or infinity in 6 of 6 scales"), (250, "does not fit fp16")):
        scales = torch.full((3, 2), code, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        [line] = changed(source, weight_scale_inv=scales).undecodable()
        assert message in line


def test_values_beyond_fp16_are_refused_by_name(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "tensor")

    refused(changed(source, weight_scale_inv=torch.tensor(200.0)), NonFiniteState, f"`{NAME}`")

    small = torch.zeros(96, 64).to(FP8)  # the scale is large, the values are not
    assert changed(source, weight=small).undecodable() == []


def test_scales_of_integers_are_refused(tmp_path: Path) -> None:
    files = changed(
        make_fp8(tmp_path, "tensor"), weight_scale_inv=torch.ones((), dtype=torch.int32)
    )

    refused(files, SourceModelError, r"weight_scale_inv` in .* has dtype I32; supported for scales")


def test_all_problems_are_listed_before_any_work(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "blocks, fp32")
    changed(source, weight_scale_inv=None)
    other = "model.layers.1.mlp.up_proj.weight_scale_inv"
    path = source / "model.safetensors"
    save_file(load_file(path) | {other: torch.ones(4, 4)}, path)

    with pytest.raises(TensorShapeError) as raised:
        check_tensors(resolve(source))

    first, second = str(raised.value).splitlines()
    assert f"`{NAME}`" in first
    assert f"`{other}`" in second


def test_a_block_of_one_row_is_no_channel() -> None:
    assert fp8.grid_of((4, BLOCK * 2), (4, 2), (1, BLOCK), names=("w", "s")) == (1, BLOCK)
