"""Every CUDA source compiles for the supported devices, without any present."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from struct import unpack_from

import pytest
from caches import GPU_FORMATS
from cupy_backends.cuda.libs import nvrtc

from exl2flow.kernels.batched import ROWS as batched_rows
from exl2flow.kernels.cache_formats import CACHE_FORMATS, Element
from exl2flow.kernels.compiler import FOLDER, OPTIONS, source
from exl2flow.kernels.cuda_cache import (
    RESERVED,
    SET,
    STEP_TOKENS,
    TOGETHER_WIDTH,
    WIDTHS,
    _beside,
)
from exl2flow.kernels.product import ROWS as product_rows

DEVICES = [
    [90],
    pytest.param([80, 86, 89, 120], marks=pytest.mark.slow),
]
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
FORMATS = {(CACHE_FORMATS[name].keys.name, CACHE_FORMATS[name].values.name) for name in GPU_FORMATS}
SOME = [("HALF", "HALF"), ("ROTATED_8", "ROTATED_4")]  # between them all ways to read an element
CODES = [("ROTATED_4", "ROTATED_4"), ("ROTATED_8", "ROTATED_8")]
SHAPES = [(1, SET), (STEP_TOKENS, SET), (STEP_TOKENS, 2 * SET)]  # tokens and columns
GPTQ = ("false", "true")
INSTANCES = {
    "attention.cu": [
        f"attend<{width}, {keys}, {values}, {tokens}, {columns}, 1>"
        for width, (keys, values), (tokens, columns) in product(WIDTHS, sorted(FORMATS), SHAPES)
        if (columns == SET or width < WIDTHS[-1]) and (tokens == 1 or (keys, values) in SOME)
    ]
    + [
        f"attend<{width}, {keys}, {values}, 1, {columns}, {together}>"
        for width, (keys, values) in product(WIDTHS[:-1], CODES)
        for columns, together in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (8, 2))
        if width == TOGETHER_WIDTH or (together == 1 and keys == "ROTATED_4")
    ],
    "product.cu": [f"product<{rows}, {gptq}>" for rows in product_rows for gptq in GPTQ],
    "batched.cu": [f"batched<{rows}, {gptq}>" for rows in batched_rows for gptq in GPTQ],
}


def static_shared(cubin: bytes) -> dict[str, int]:
    """Return the bytes of static shared memory of each function of an ELF file that has any."""
    (table,), (size, count, names) = unpack_from("<Q", cubin, 40), unpack_from("<3H", cubin, 58)
    sections = [unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    begin, found = sections[names][4], {}
    for name, _, _, _, _, length in sections:
        text = cubin[begin + name : cubin.index(b"\0", begin + name)].decode()
        if text.startswith(".nv.shared."):
            found[text.removeprefix(".nv.shared.")] = length
    return found


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize("file", SOURCES)
def test_source_compiles_without_a_warning(file: str, devices: list[int]) -> None:
    def compiled(device: int) -> None:
        program = nvrtc.createProgram(source(file), file, (), ())
        instances = INSTANCES.get(file, [])
        for instance in instances:
            nvrtc.addNameExpression(program, instance)
        options = (*OPTIONS, f"-arch=sm_{device}")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            pytest.fail(f"sm_{device}: {nvrtc.getProgramLog(program)}")
        assert nvrtc.getProgramLog(program).strip("\0\n") == ""
        shared = static_shared(nvrtc.getCUBIN(program))
        names = [nvrtc.getLoweredName(program, instance) for instance in instances]
        assert all(names)
        if file == "attention.cu":
            for instance, name in zip(instances, names, strict=True):
                width, keys, values, *counts = instance[7:-1].split(", ")
                bits = Element[keys].bits + Element[values].bits
                most = _beside(bits, int(width), *map(int, counts))
                assert most - RESERVED <= shared[name] <= most, instance

    with ThreadPoolExecutor() as threads:
        list(threads.map(compiled, devices))


def test_no_source_is_left_out() -> None:
    assert SOURCES == [
        "attention.cu",
        "batched.cu",
        "cache.cu",
        "choose.cu",
        "decode.cu",
        "descend.cu",
        "elementwise.cu",
        "lay_out.cu",
        "logits.cu",
        "pack.cu",
        "product.cu",
        "refit.cu",
        "round.cu",
        "search.cu",
        "select.cu",
    ]


def test_a_source_holds_its_headers() -> None:
    text = source("round.cu")

    assert "#include" not in text
    assert "decoder_scale" in text
