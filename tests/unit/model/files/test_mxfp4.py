"""Values of 4-bit floats: by their bits, and as transformers decodes them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exl2flow.core.errors import MissingTensor, NonFiniteState, TensorShapeError
from exl2flow.model import TensorFiles
from exl2flow.model.files import mxfp4

NAMES = ("experts.gate_up_proj_blocks", "experts.gate_up_proj_scales")


def value(code: int, exponent: int) -> float:
    """Return the value of 4 bits: sign, two of exponent, one of fraction."""
    sign, power, fraction = code >> 3, code >> 1 & 3, code & 1
    magnitude = (1 + fraction / 2) * 2.0 ** (power - 1) if power else fraction / 2
    return (-1) ** sign * magnitude * 2.0 ** (exponent - 127)


def test_every_byte_and_many_exponents_have_their_values() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(32, 1, 1)
    scales = torch.arange(108, 140, dtype=torch.uint8)[:, None].repeat(1, 16)

    found = mxfp4.decode(blocks, scales, names=NAMES)

    assert found.dtype == torch.float16
    assert found.shape == (32, 512)
    for row in range(32):
        for byte in range(256):
            expected = [value(code, 108 + row) for code in (byte & 15, byte >> 4)]
            assert found[row, 2 * byte : 2 * byte + 2].tolist() == expected


@pytest.mark.parametrize("is_typed", [False, True])
def test_transformers_decodes_alike(is_typed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr(mxfp4, "STRIPE", 7)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 10, 4), dtype=torch.uint8)
    stored = scales.view(torch.float8_e8m0fnu) if is_typed else scales

    found = mxfp4.decode(blocks, stored, names=NAMES)

    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(found, expected.transpose(1, 2).half())


@pytest.mark.parametrize("exponent", [255, 150])
def test_nan_and_values_beyond_fp16_are_refused_by_name(exponent: int) -> None:
    scales = torch.full((2, 3), 127, dtype=torch.uint8)
    scales[1, 2] = exponent
    blocks = torch.full((2, 3, 16), 0x77, dtype=torch.uint8)

    with pytest.raises(NonFiniteState, match=r"gate_up_proj_blocks`.*gate_up_proj_scales"):
        mxfp4.decode(blocks, scales, names=NAMES)


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [((2, 3, 16), (2, 4)), ((2, 3, 8), (2, 3)), ((2, 16), (2, 1)), ((16,), ())],
)
def test_other_shapes_are_refused(blocks: tuple[int, ...], scales: tuple[int, ...]) -> None:
    tensors = (torch.zeros(shape, dtype=torch.uint8) for shape in (blocks, scales))
    with pytest.raises(TensorShapeError, match="are no blocks of 16 bytes and their scales"):
        mxfp4.decode(*tensors, names=NAMES)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TensorShapeError, match=r"is torch\.int8 of shape"):
        mxfp4.decode(
            torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8), names=NAMES
        )


def stored(folder: Path, **tensors: torch.Tensor) -> TensorFiles:
    save_file({f"x{end}": tensor for end, tensor in tensors.items()}, folder / "model.safetensors")
    return TensorFiles(folder)


def random_codes(*shape: int) -> dict[str, torch.Tensor]:
    return {
        "_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        "_scales": torch.randint(110, 135, shape, dtype=torch.uint8),
    }


@pytest.mark.parametrize("is_typed", [False, True])
def test_files_return_blocks_decoded(is_typed: bool, tmp_path: Path) -> None:
    codes = random_codes(3, 10, 4)
    scales = codes["_scales"].view(torch.float8_e8m0fnu) if is_typed else codes["_scales"]

    files = stored(tmp_path, _blocks=codes["_blocks"], _scales=scales, _bias=torch.ones(3, 10))

    assert files.names == ("x_bias", "x_blocks")
    found = files.read("x_blocks")
    assert torch.equal(found, mxfp4.decode(codes["_blocks"], scales, names=NAMES))
    assert files.shape("x_blocks") == found.shape == (3, 10, 128)
    assert files.dtype("x_blocks") == found.dtype == torch.float16
    assert files.nbytes("x_blocks") == found.nbytes


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match=r"`x_blocks` in .*, `x_scales`, are in no file; fetch"):
        stored(tmp_path, _blocks=random_codes(3, 10, 4)["_blocks"])


@pytest.mark.parametrize(
    ("scales", "found"),
    [
        (torch.ones(3, 10, 5, dtype=torch.uint8), r"U8 of shape \(3, 10, 5\)"),
        (torch.ones(3, 10, 4), r"F32 of shape \(3, 10, 4\)"),
    ],
)
def test_scales_that_do_not_fit_their_blocks_are_refused(
    scales: torch.Tensor, found: str, tmp_path: Path
) -> None:
    words = rf"`x_scales` in .* is {found}; `x_blocks` implies U8 of shape \(3, 10, 4\): check"
    with pytest.raises(TensorShapeError, match=words):
        stored(tmp_path, _blocks=random_codes(3, 10, 4)["_blocks"], _scales=scales)
