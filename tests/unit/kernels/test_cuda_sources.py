"""Every CUDA source compiles for the supported devices, without any present."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from caches import GPU_FORMATS
from cupy_backends.cuda.libs import nvrtc

from exl2flow.kernels.cache_formats import CACHE_FORMATS
from exl2flow.kernels.compiler import FOLDER, OPTIONS, source
from exl2flow.kernels.cuda_cache import WIDTHS

DEVICES = [
    [90],
    pytest.param([80, 86, 89, 120], marks=pytest.mark.slow),
]
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
FORMATS = {(CACHE_FORMATS[name].keys.name, CACHE_FORMATS[name].values.name) for name in GPU_FORMATS}
INSTANCES = {
    "attention.cu": [f"attend<{w}, {k}, {v}>" for w in WIDTHS for k, v in sorted(FORMATS)],
    "product.cu": [f"product<{n}, {gptq}>" for n in (1, 2) for gptq in ("false", "true")],
}


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
        assert nvrtc.getCUBIN(program)
        assert all(nvrtc.getLoweredName(program, instance) for instance in instances)

    with ThreadPoolExecutor() as threads:
        list(threads.map(compiled, devices))


def test_no_source_is_left_out() -> None:
    assert SOURCES == [
        "attention.cu",
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
