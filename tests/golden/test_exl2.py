"""Golden vectors of the format: packing of every bit width, and a whole small matrix.

No sums are involved, so these bytes are the same on every processor and device.
"""

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from exl2flow.core.store.files import tensor_bytes
from exl2flow.kernels import Group
from exl2flow.kernels.reference.ops import TORCH_OPS
from exl2flow.model import QuantizedMatrix

HERE = Path(__file__).parent
VECTORS: dict[str, Any] = json.loads((HERE / "exl2.json").read_text())
TENSOR: dict[str, Any] = VECTORS["tensor"]
BITS = (2, 3, 4, 5, 6, 8)

# `docs/format.md` section 2: words of the codes (7 i + 3) mod 2^bits, i < 32
PUBLISHED_WORDS = {
    2: "1B1B1B1B 1B1B1B1B",
    3: "53977053 70539770 97705397",
    4: "4D6F81A3 C5E7092B 4D6F81A3 C5E7092B",
    5: "4DFC4543 78245BA3 0753617D 4B276CF4 E55C7066",
    6: "9F611283 90BBD2D9 B2579740 8F201EB3 9CAB91D5 71538703",
    8: "18110A03 342D261F 5049423B 6C655E57 88817A73 A49D968F C0B9B2AB DCD5CEC7",
}
# `docs/format.md` section 3
PUBLISHED_WEIGHT = "6b688fef2d8078f5ed227df6c9a4badadae9f250d5a3956f88b056b221241c57"
PUBLISHED_PACKED = "1431fef573373ba76711c2c1f144521ddbdf1da25526d13988c9f61acdac91ba"


def generator() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_exl2", HERE / "make_exl2.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def int32(words: str) -> torch.Tensor:
    """Return hexadecimal words as two's complement int32."""
    values = torch.tensor([int(word, 16) for word in words.split()])
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def hexadecimal(words: torch.Tensor, digits: int = 8) -> str:
    return " ".join(f"{word % 16**digits:0{digits}X}" for word in words.tolist())


def golden_matrix() -> QuantizedMatrix:
    return QuantizedMatrix(
        packed=torch.stack([int32(line) for line in TENSOR["packed"]]),
        scale_codes=torch.stack([int32(line) for line in TENSOR["scale_codes"]]),
        max_scales=torch.tensor(TENSOR["max_scales"], dtype=torch.int16).view(torch.float16),
        group_table=torch.tensor(TENSOR["group_table"], dtype=torch.int16),
        inverse_perm=torch.tensor(TENSOR["inverse_perm"], dtype=torch.int32),
    )


def golden_codes() -> torch.Tensor:
    rows, columns = torch.arange(96)[:, None], torch.arange(32)
    highest = torch.tensor([2**bits for bits, count in TENSOR["groups"] for _ in range(count)])
    return ((7 * rows + 3 * columns) % highest[:, None]).to(torch.uint8)


def test_committed_vectors_are_what_the_generator_makes() -> None:
    assert generator().vectors() == VECTORS


@pytest.mark.parametrize("bits", BITS)
def test_packing_table_is_reproduced(bits: int) -> None:
    codes = ((7 * torch.arange(32) + 3) % 2**bits).to(torch.uint8)[:, None]
    group = Group(bits=bits, start=0, rows=32)

    packed = TORCH_OPS.pack(codes, [group])

    assert VECTORS["packing"][str(bits)] == PUBLISHED_WORDS[bits]
    assert hexadecimal(packed[:, 0]) == PUBLISHED_WORDS[bits]
    assert torch.equal(TORCH_OPS.unpack(packed, [group]), codes)


@pytest.mark.parametrize("bits", BITS)
def test_units_follow_one_another(bits: int) -> None:
    i = torch.arange(128)
    codes = ((11 * i * i + i) % 2**bits).to(torch.uint8)[:, None]
    group = Group(bits=bits, start=0, rows=128)

    packed = TORCH_OPS.pack(codes, [group])

    assert hexadecimal(packed[:, 0]) == VECTORS["long_packing"][str(bits)]
    assert torch.equal(TORCH_OPS.unpack(packed, [group]), codes)


def test_golden_tensor_is_the_published_one() -> None:
    packed, scale_codes, weight = (
        [line.split() for line in TENSOR[name]] for name in ("packed", "scale_codes", "weight")
    )

    assert TENSOR["group_table"] == [4, 0, 3, 4, 2, 7]
    assert packed[0][:2] == ["1A3C5E70", "4D6F81A3"]
    assert (packed[4][0], packed[7][0]) == ("B829CBB8", "6C6C6C6C")
    assert scale_codes[0] == ["76543210", "FEDCBA98", "76543210", "FEDCBA98"]
    assert weight[0][:4] == ["851F", "111F", "1B34", "A11F"]
    assert (weight[1][0], weight[19][31], weight[95][7]) == ("091F", "2E67", "B35A")
    assert (TENSOR["weight_sha256"], TENSOR["packed_sha256"]) == (
        PUBLISHED_WEIGHT,
        PUBLISHED_PACKED,
    )


def test_golden_tensor_is_encoded_to_the_published_bytes() -> None:
    golden = golden_matrix()
    scale_codes = (3 * torch.arange(3)[:, None] + torch.arange(32)) % 16

    encoded = QuantizedMatrix.encode(
        codes=golden_codes(),
        groups=golden.groups,
        scale_codes=scale_codes.to(torch.uint8),
        max_scales=golden.max_scales,
        perm=torch.argsort(golden.inverse_perm),
    )

    for name, tensor in encoded.to_tensors("x").items():
        expected = golden.to_tensors("x")[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    assert hashlib.sha256(tensor_bytes(encoded.packed)).hexdigest() == PUBLISHED_PACKED


def test_golden_tensor_decodes_to_the_published_bits() -> None:
    weight = golden_matrix().dequantize()

    bits = [hexadecimal(line, 4) for line in weight.view(torch.int16)]
    assert bits == TENSOR["weight"]
    assert hashlib.sha256(tensor_bytes(weight)).hexdigest() == PUBLISHED_WEIGHT


def test_golden_groups_and_units_are_recovered() -> None:
    golden = golden_matrix()

    units = TORCH_OPS.decode_scales(torch.zeros(3, 1, dtype=torch.uint8), golden.max_scales)

    assert [[g.bits, g.rows] for g in golden.groups] == TENSOR["groups"]
    assert hexadecimal(units[:, 0].view(torch.int16), 4) == "051F 0A66 14CD"
    assert torch.equal(TORCH_OPS.unpack(golden.packed, golden.groups), golden_codes())
