"""Values of 4-bit floats: by their bits, and as transformers decodes them."""

import pytest
import torch

from exl2flow.core.errors import NonFiniteState, TensorShapeError
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
