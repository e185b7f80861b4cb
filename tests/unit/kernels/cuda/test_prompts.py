"""Products with many rows: the launches that decode matrices are carried out on the CPU."""

import ctypes
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from product_walks import chain, matrix, product

from exl2flow.kernels import FEW_ROWS, FusedLinear, NormArgs, PackedMatrix, pack_blocks, pack_codes
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda import prompts as cuda_prompts
from exl2flow.kernels.interface.packed import decode_packed
from exl2flow.kernels.reference.ops import TORCH_OPS

ROWS = FEW_ROWS + 1


class Device:
    """What `decode.cu` does, for the matrices of some products; `found`: names and grids."""

    def __init__(self, products: Sequence[FusedLinear]) -> None:
        matrices = [matrix for p in products for matrix in p.matrices]
        self._of = {matrix.words.data_ptr(): matrix for matrix in matrices}
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def launch(
        self, file: str, name: str, grid: tuple[int, ...], work: np.void, **how: object
    ) -> None:
        assert file == "decode.cu"
        assert how["threads"] == 128
        self.found.append((name, grid))
        parts = work["of"][: work["count"]]
        for part, end in zip(parts, [*parts["first"][1:], grid[0]], strict=True):
            one = self._of[int(part["words"])]
            assert part["order"] == one.order.data_ptr()
            assert one.has_zeros is (name == "decode_gptq")
            assert part["tiles"] == len(one.words)
            assert part["tile_bytes"] == 4 * one.words.shape[1]
            assert end - part["first"] == -(-len(one.words) // 16)
            k, columns, step = len(one.order), 32 * len(one.words), int(work["step"])
            table = _at(int(part["table"]), torch.int64, 4 * k // 32)
            assert table.view(-1, 4).tolist() == _panels(one)
            at = int(work["y"]) + 2 * int(part["column"])
            room = _at(at, torch.float16, (k - 1) * step + columns)
            values = decode_packed(replace(one, columns=columns))
            room.as_strided((k, columns), (step, 1)).copy_(values)


def _at(where: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.frombuffer(
        (ctypes.c_byte * (count * dtype.itemsize)).from_address(where), dtype=dtype
    )


def _panels(one: PackedMatrix) -> list[list[int]]:
    size, panels = one.scale_words, one.panels()
    begins = accumulate((panel.bits for panel in panels), initial=0)
    return [
        [panel.bits, begin, 4 * panel.word, 4 * (panel.scales + size * panel.place)]
        for panel, begin in zip(panels, begins, strict=False)
    ]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the steps between products run on the CPU."""
    for name in ("norm", "gated", "activated"):
        monkeypatch.setattr(cuda_prompts, name, getattr(TORCH_OPS, name))

    def add_normed(
        x: torch.Tensor, by: NormArgs, hidden: torch.Tensor | None, multiplier: float = 1.0
    ) -> torch.Tensor:
        found = TORCH_OPS.norm(x, by).float() * multiplier
        return (found if hidden is None else found + hidden).half()

    monkeypatch.setattr(cuda_prompts, "add_normed", add_normed)


def begin(products: Sequence[FusedLinear], monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(products)
    monkeypatch.setattr(cuda_prompts, "launch", device.launch)
    return device


def random_like(products: Sequence[FusedLinear]) -> list[FusedLinear]:
    """Give the matrices of products codes and scales other than zero."""

    def drawn(one: PackedMatrix) -> PackedMatrix:
        tiles, k, count = len(one.words), len(one.order), len(one.groups)
        codes = torch.randint(0, 1 << 2, (k, 32 * tiles), dtype=torch.uint8)
        if one.has_zeros:
            scales = torch.rand(tiles, count, 8, 8).half().view(torch.int32)
        else:
            unit = int(torch.tensor(1e-4).half().view(torch.int16)) << 16
            scales = torch.randint(0, 1 << 16, (tiles, count, 8), dtype=torch.int32) | unit
        return replace(one, words=pack_blocks(pack_codes(codes, one.groups), scales, one.groups))

    return [replace(p, matrices=tuple(map(drawn, p.matrices))) for p in products]


def check(
    products: Sequence[FusedLinear], monkeypatch: pytest.MonkeyPatch, *, adds: bool
) -> Device:
    """Compare with the specification; what comes in must stay as it is."""
    products = random_like(products)
    device = begin(products, monkeypatch)
    x = torch.randn(ROWS, len(products[0].order)).half()
    hidden = torch.randn(ROWS, next(p.matrices[0].columns for p in products if p.adds)).half()
    before = hidden.clone()

    found, last = cuda_products.multiply(x, products, hidden if adds else None)

    expected, grown = TORCH_OPS.multiply(x, products, before if adds else None)
    assert torch.equal(hidden, before)
    for y, z in zip([*found, last], [*expected, grown], strict=True):
        torch.testing.assert_close(y, z, rtol=1e-2, atol=2e-3 * float(z.abs().max()))
    return device


RMS = NormArgs(weight=torch.rand(64).half() + 0.5, eps=1e-5)


@pytest.mark.parametrize("adds", [True, False])
def test_a_chain_of_many_rows_is_what_the_specification_says(
    steps: None, monkeypatch: pytest.MonkeyPatch, adds: bool
) -> None:
    out, gated, down, last = chain(64, 96, 32)

    device = check(
        [out, replace(gated, norm=RMS), down, replace(last, norm=RMS)], monkeypatch, adds=adds
    )

    assert {name for name, _ in device.found} == {"decode_exl2"}


def test_a_decoded_matrix_is_gone_before_the_next_one_is_made(
    steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, made = cuda_prompts._decoded, list[weakref.ref[torch.Tensor]]()

    def one_at_a_time(matrices: Sequence[PackedMatrix]) -> torch.Tensor:
        assert not [ref for ref in made if ref() is not None]
        room = decoded(matrices)
        made.append(weakref.ref(room))
        return room

    monkeypatch.setattr(cuda_prompts, "_decoded", one_at_a_time)
    monkeypatch.setattr(cuda_prompts, "MOST_BESIDE", 0)  # gate and up are decoded in turn

    check(chain(64, 96, 32), monkeypatch, adds=True)

    assert len(made) > 4


def test_many_rows_in_the_order_of_a_matrix_are_brought_to_that_of_in_features(
    steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, *others = chain(64, 96, 32)

    check([replace(out, is_ordered=True), *others], monkeypatch, adds=True)


def test_norms_and_biases_are_added_after_cublas(
    steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, gated, down, last = chain(64, 96, 32)
    [biased] = down.matrices
    biased = biased.cut(biased.columns, torch.randn(biased.columns).half())

    check([replace(out, after=RMS, multiplier=0.5), gated, down, last], monkeypatch, adds=True)
    check([replace(out, multiplier=0.22), gated, down, last], monkeypatch, adds=True)
    check([out, gated, replace(down, matrices=(biased,)), last], monkeypatch, adds=True)


@pytest.mark.parametrize("together", [True, False])
def test_matrices_of_several_forms_and_widths_are_multiplied_together(
    steps: None, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    if not together:
        monkeypatch.setattr(cuda_prompts, "MOST_BESIDE", 64 * 64 * 2)
    kinds = [(40, (4, 32), False), (64, (3, 64), False), (700, (4, 64), True)]
    matrices = [matrix(64, n, kind, zeros=zeros) for n, kind, zeros in kinds]
    [three] = random_like([product(*matrices)])
    device = begin([three], monkeypatch)
    x = torch.randn(ROWS, 64).half()

    found, _ = cuda_products.multiply(x, [three])

    for y, one in zip(found, three.matrices, strict=True):
        expected = x.float() @ decode_packed(one).float()
        assert y.shape == (ROWS, one.columns)
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    assert (found[0].stride(0) > 700) is together
    plain = [("decode_exl2", (2, 2))] if together else 2 * [("decode_exl2", (1, 2))]
    assert device.found == [*plain, ("decode_gptq", (2, 2))]


def test_exact_results_are_sums_in_fp32(steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = random_like([replace(product(matrix(64, 40, (4, 32))), exact=True)])
    begin([one], monkeypatch)
    wide = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, w, out_dtype: wide(x.to(out_dtype), w.to(out_dtype)))
    x = torch.randn(ROWS, 64).half()

    [y], _ = cuda_products.multiply(x, [one])

    torch.testing.assert_close(y, x.float() @ decode_packed(one.matrices[0]).float())


def test_a_decoded_matrix_has_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = random_like([product(matrix(96, 300, (4, 32)))])
    begin([one], monkeypatch)

    decoded = cuda_prompts.decode_packed(one.matrices[0])

    assert torch.equal(decoded, decode_packed(one.matrices[0]))


def test_arguments_of_decoding_are_made_once(steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    [two, other] = random_like([product(*(matrix(64, 64, (4, 32)) for _ in range(2)))] * 2)
    device = begin([two, other], monkeypatch)
    made, works = [], cuda_prompts._works
    monkeypatch.setattr(cuda_prompts, "_works", lambda given: made.append(given) or works(given))

    for p in (two, other, two):
        cuda_products.multiply(torch.zeros(ROWS, 64).half(), [p])

    assert made == [two.matrices, other.matrices]
    assert len(device.found) == 3
    held = len(cuda_prompts._WORKS)
    monkeypatch.undo()
    del two, p, device
    made.clear()
    gc.collect()
    assert len(cuda_prompts._WORKS) == held - 1
