"""Write `exl2.json`: vectors of the EXL2 format, made without any code of the project.

Packing is done on Python integers and decoding in numpy's fp16. Run: `python make_exl2.py`.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

VECTORS = Path(__file__).with_name("exl2.json")
WORD = 2**32
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = ((4, 32), (3, 32), (2, 32))  # (bits, rows) of the golden tensor
ROWS, COLUMNS = 96, 32
MAX_SCALES = (0x251F, 0x2A66, 0x34CD)  # fp16 bits of about 0.02, 0.05 and 0.3


def words_of(codes: list[int], bits: int) -> list[int]:
    """Split the integer `sum(code * 2 ** (bits * index))` into 32-bit words."""
    total = sum(code << (bits * index) for index, code in enumerate(codes))
    return [(total >> (32 * index)) % WORD for index in range(len(codes) * bits // 32)]


def hexadecimal(words: list[int], digits: int = 8) -> str:
    """Return words as hexadecimal text."""
    return " ".join(f"{word:0{digits}X}" for word in words)


def codes_of(bits: int, count: int) -> list[int]:
    """Return the codes of the worked example."""
    return [(7 * i + 3) % 2**bits for i in range(count)]


def golden_tensor() -> dict[str, object]:
    """Return all tensors of a small matrix with three bit widths, and what it decodes to."""
    packed, codes, row = [], np.zeros((ROWS, COLUMNS), dtype=int), 0
    table, scale_words = [], []
    matrix = np.zeros((ROWS, COLUMNS), dtype=np.float16)
    for index, (bits, rows) in enumerate(GROUPS):
        table += [bits, len(packed)]
        for r in range(row, row + rows):
            codes[r] = [(7 * r + 3 * n) % 2**bits for n in range(COLUMNS)]
        columns = [words_of(codes[row : row + rows, n].tolist(), bits) for n in range(COLUMNS)]
        packed += [list(words) for words in zip(*columns, strict=True)]
        scale_codes = [(3 * index + n) % 16 for n in range(COLUMNS)]
        scale_words.append([words_of(scale_codes[n : n + 8], 4)[0] for n in range(0, COLUMNS, 8)])
        stored = np.array([MAX_SCALES[index]], dtype=np.uint16).view(np.float16)
        unit = stored * np.float16(1 / 256)
        squares = np.array([(code + 1) ** 2 for code in scale_codes], dtype=np.float16)
        scales = squares * unit
        steps = (codes[row : row + rows] - 2 ** (bits - 1)).astype(np.float16)
        matrix[row : row + rows] = steps * scales
        row += rows
    inverse_perm = [(5 * k + 1) % ROWS for k in range(ROWS)]
    weight = matrix[inverse_perm]
    words = np.array(packed, dtype="<u4")
    return {
        "groups": [list(group) for group in GROUPS],
        "group_table": table,
        "packed": [hexadecimal(line) for line in packed],
        "scale_codes": [hexadecimal(line) for line in scale_words],
        "max_scales": list(MAX_SCALES),
        "inverse_perm": inverse_perm,
        "weight": [hexadecimal(line, 4) for line in weight.view(np.uint16).tolist()],
        "weight_sha256": hashlib.sha256(weight.astype("<f2").tobytes()).hexdigest(),
        "packed_sha256": hashlib.sha256(words.tobytes()).hexdigest(),
    }


def vectors() -> dict[str, object]:
    """Return everything that is committed."""
    return {
        "packing": {str(bits): hexadecimal(words_of(codes_of(bits, 32), bits)) for bits in BITS},
        "long_packing": {
            str(bits): hexadecimal(words_of([(11 * i * i + i) % 2**bits for i in range(128)], bits))
            for bits in BITS
        },
        "tensor": golden_tensor(),
    }


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(vectors(), indent=1) + "\n")
