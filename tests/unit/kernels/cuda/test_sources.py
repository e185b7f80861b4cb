"""Every CUDA source compiles for the supported devices, without any present."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from cuda_instances import INSTANCES, SOURCES
from cupy_backends.cuda.libs import nvrtc
from kernel_resources import DEVICES, compiled, resources

from exl2flow.kernels.cuda import cache as cuda_cache
from exl2flow.kernels.cuda import exchange as cuda_exchange
from exl2flow.kernels.cuda import experts as cuda_experts
from exl2flow.kernels.cuda import prompts as cuda_prompts
from exl2flow.kernels.cuda import sampler as cuda_sampler
from exl2flow.kernels.cuda.cache import RESERVED, _beside
from exl2flow.kernels.cuda.compiler import options_of
from exl2flow.kernels.interface.cache_formats import Element
from exl2flow.kernels.plans import batched
from exl2flow.kernels.plans import experts as plans_of_experts
from exl2flow.kernels.plans import product as plans_of_product
from exl2flow.kernels.plans.product import FIXED_SHARED
from exl2flow.kernels.plans.sources import source

SLOW = pytest.mark.slow
MOST_STACK = 128  # bytes of a thread: what the compiler spills beyond 128 registers


def check(file: str, instances: Sequence[str], device: int) -> None:
    """Compile instances of a source, and check what they take."""
    code, names = compiled(file, instances, device)
    kernels = resources(code)
    assert set(names) <= set(kernels)
    for name, taken in kernels.items():
        assert 0 < taken.registers <= 255, name
        assert taken.stack <= MOST_STACK, name
        if file in ("product.cu", "batched.cu"):
            assert taken.shared <= FIXED_SHARED, name
        if file == "experts.cu":
            assert taken.shared <= plans_of_experts.RESERVED, name
    if file == "attention.cu":
        for instance, name in zip(instances, names, strict=True):
            width, keys, values, *counts = instance[7:-1].split(", ")
            bits = Element[keys].bits + Element[values].bits
            most = _beside(bits, int(width), *map(int, counts))
            assert most - RESERVED <= kernels[name].shared <= most, instance


def parsed(text: str, file: str, device: int, instances: Sequence[str]) -> None:
    """Have the compiler read a source and these instances, and make no code."""
    program = nvrtc.createProgram(text, file, (), ())
    for instance in instances:
        nvrtc.addNameExpression(program, instance)
    try:
        options = (*options_of(file), f"-arch=sm_{device}", "-fdevice-syntax-only")
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))


@pytest.mark.parametrize(
    "device", [device if device == 90 else pytest.param(device, marks=SLOW) for device in DEVICES]
)
@pytest.mark.parametrize("file", SOURCES)
def test_an_instance_of_each_source_compiles_for_every_device(file: str, device: int) -> None:
    check(file, INSTANCES.get(file, [])[:1], device)


@pytest.mark.slow
@pytest.mark.parametrize("file", INSTANCES)
def test_every_instance_compiles_for_every_device(file: str) -> None:
    with ThreadPoolExecutor() as threads:
        list(threads.map(partial(check, file, INSTANCES[file]), DEVICES))


STRUCTS = {
    "attention.cu": ("Call", cuda_cache.CALL),
    "batched.cu": ("Chain", batched.CHAIN),
    "choose.cu": ("Sampler", cuda_sampler.CALL),
    "decode.cu": ("Work", cuda_prompts.WORK),
    "exchange.cu": ("Peers", cuda_exchange.PEERS),
    "experts.cu": ("Experts", plans_of_experts.ARGUMENT),
    "experts_many.cu": ("Sorted", cuda_experts.SORTED),
    "product.cu": ("Chain", plans_of_product.CHAIN),
}


def offsets(dtype: np.dtype, before: str = "") -> Iterator[tuple[str, int]]:
    """Yield the fields of a struct, those of structs in it too, and where they lie in theirs."""
    assert dtype.fields is not None
    for name, (field, offset, *_) in dtype.fields.items():
        yield before + name, offset
        if field.base.fields is not None:
            inner = f"{before}{name}{'[0]' * field.ndim}."
            yield from ((path, offset + at) for path, at in offsets(field.base, inner))


@pytest.mark.parametrize("file", SOURCES)
def test_a_source_has_what_the_oldest_device_knows_and_structs_as_they_are_filled(
    file: str,
) -> None:
    text = source(file)
    if file in STRUCTS:
        name, dtype = STRUCTS[file]
        wanted = [f"__builtin_offsetof({name}, {path}) == {at}" for path, at in offsets(dtype)]
        wanted.append(f"sizeof({name}) == {dtype.itemsize}")
        text += "".join(f"static_assert({each});\n" for each in wanted)

    parsed(text, file, DEVICES[0], INSTANCES.get(file, [])[:1])


def test_no_source_is_left_out() -> None:
    names = (
        "attention batched cache choose decode delta delta_scan descend elementwise exchange "
        "experts experts_many lay_out logits pack product refit round search select"
    )
    assert [f"{name}.cu" for name in names.split()] == SOURCES


def test_a_source_holds_its_headers() -> None:
    text = source("round.cu")

    assert "#include" not in text
    assert "decoder_scale" in text


def test_kernels_that_may_start_early_wait_for_their_input() -> None:
    for file in SOURCES:
        text = source(file)
        if "void wait_for_input" in text:
            bodies = text.split("__global__")[1:]
            waits = (
                "wait_for_input()",
                "overlap_launches()",
                "<W",
                "decode<",
                "multiply_units<",
                "BODY(s)",
                "score(",
            )
            assert all(any(wait in body for wait in waits) for body in bodies), file
