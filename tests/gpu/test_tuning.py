"""Launches divided as measured: once, kept in a file, with the same results."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_products import DEVICE, HIDDEN, TOLERANCE, chain, inputs

from exl2flow.kernels import FusedLinear, get_ops
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda.compiler import limits
from exl2flow.kernels.plans import tuning
from exl2flow.kernels.plans.product import LaunchPlan
from exl2flow.kernels.plans.tuning import APART, BATCHED, DECODED, HALVED, Choice
from exl2flow.kernels.reference.ops import TORCH_OPS

pytestmark = pytest.mark.gpu


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "tuning.json"
    monkeypatch.setenv("EXL2FLOW_TUNING", str(path))
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The result of each measurement of a chain."""
    found: list[Choice] = []

    def watched(options: Sequence[Choice], time: Callable[[Choice], float]) -> Choice:
        choice = tuning.fastest(options, time)
        if tuning.APART in options:
            found.append(choice)
        return choice

    monkeypatch.setattr(cuda_products, "fastest", watched)
    return found


def chain_choices(file: Path) -> dict[str, object]:
    """Return what the file has of chains, the first entry: its products, if measured, follow."""
    kept = json.loads(file.read_text())
    products = {
        cuda_products.key_of([one], rows, gpu=gpu(), kernel=kernel())
        for one in chain()
        for rows in (1, 4)
    }
    return {key: choice for key, choice in kept.items() if key not in products}


def gpu() -> str:
    return torch.cuda.get_device_name()


def kernel() -> list[object]:
    return [cuda_products._kernel(), limits(torch.cuda.current_device())]


def again(products: Sequence[FusedLinear]) -> list[FusedLinear]:
    """Return new objects with the same matrices, which have no plan yet."""
    return [replace(product) for product in products]


def test_a_shape_is_measured_once_and_kept(file: Path, measured: list[Choice]) -> None:
    first, other = chain(), chain()
    x, hidden = inputs(1)

    [y], after = get_ops(DEVICE).multiply(x, first, hidden)
    get_ops(DEVICE).multiply(x, other, hidden)
    [chosen] = measured
    assert len(chain_choices(file)) == 1
    assert [*chain_choices(file).values()] == [chosen if isinstance(chosen, str) else [*chosen]]

    cuda_products._tuning.cache_clear()  # as in the next process
    [same], same_after = get_ops(DEVICE).multiply(x, again(first), hidden)
    assert len(measured) == 1
    assert torch.equal(same, y)
    assert torch.equal(same_after, after)


def test_numbers_of_rows_share_what_is_measured_for_the_next_power_of_two(
    file: Path, measured: list[Choice]
) -> None:
    products = chain()

    for rows in (3, 4, 3):
        get_ops(DEVICE).multiply(inputs(rows)[0], products)

    assert len(measured) == 1
    [key] = chain_choices(file)
    assert key.startswith(f"{torch.cuda.get_device_name()}, 4 rows, ")


def test_a_choice_in_the_file_is_used(file: Path, measured: list[Choice]) -> None:
    products, (x, hidden) = chain(), inputs(1)
    plans = tuning.candidates(products, 1, limits(x.device.index))
    get_ops(DEVICE).multiply(x, products, hidden)
    [key] = chain_choices(file)

    for plan in plans:
        file.write_text(json.dumps({key: plan.parts}))
        cuda_products._tuning.cache_clear()
        used = cuda_products._plan(tuple(again(products)), 1)
        assert isinstance(used, LaunchPlan)
        assert used.parts == plan.parts
    assert len(measured) == 1


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("first", [0, 1, 2, 3, None])  # product alone, or the chain
def test_every_candidate_computes_the_same(rows: int, first: int | None) -> None:
    processors, most_shared = limits(torch.cuda.current_device())
    products = chain() if first is None else chain()[first : first + 1]
    x = torch.randn(rows, len(products[0].order), device=DEVICE).half() / 8
    hidden = torch.randn(rows, HIDDEN, device=DEVICE).half()
    expected, grown = TORCH_OPS.multiply(x, products, hidden)

    plans = tuning.candidates(products, rows, (processors, most_shared))

    assert len(plans) > 1 or first is None  # small devices have no room for a chain of many rows
    for plan in plans:
        found, after = cuda_products._launched(plan, x, products, hidden)
        for y, z in zip([*found, after], [*expected, grown], strict=True):
            assert (y.double() - z.double()).norm() <= TOLERANCE * z.double().norm(), plan.parts


def test_nothing_is_measured_while_a_stream_is_captured(file: Path, measured: list[Choice]) -> None:
    products, counter = chain(), torch.zeros(1, device=DEVICE)

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        counter.add_(1)
        parts = cuda_products._choice(products, 1)

    assert parts is None
    assert measured == []
    assert not file.exists()
    assert cuda_products._choice(again(products), 1) is None  # one choice in a process


def test_measuring_takes_none_of_the_draws_of_others(file: Path) -> None:
    products, (x, hidden) = chain(), inputs(1)

    before = torch.cuda.get_rng_state()
    get_ops(DEVICE).multiply(x, products, hidden)

    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert file.exists()


def test_nothing_is_measured_if_tuning_is_off(
    measured: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL2FLOW_TUNING", "off")
    products, (x, hidden) = chain(), inputs(1)

    get_ops(DEVICE).multiply(x, products, hidden)

    assert measured == []


@pytest.mark.parametrize(
    ("rows", "way"),
    [
        (1, APART),
        (3, APART),
        (4, BATCHED),
        (20, BATCHED),
        (20, DECODED),
        (50, BATCHED),
        (50, HALVED),
    ],
)
def test_every_way_computes_the_same(file: Path, rows: int, way: str) -> None:
    products, (x, hidden) = chain(), inputs(rows)
    expected, grown = TORCH_OPS.multiply(x, products, hidden)
    ways = cuda_products._ways(x, products, hidden)

    found, after = ways[way]()

    for y, z in zip([*found, after], [*expected, grown], strict=True):
        assert (y.double() - z.double()).norm() <= TOLERANCE * z.double().norm()


@pytest.mark.parametrize("way", [APART, BATCHED, DECODED])
def test_the_way_in_the_file_is_taken(file: Path, measured: list[Choice], way: str) -> None:
    products, rows = chain(), 20 if way == DECODED else 4
    key = cuda_products.key_of(products, 32 if rows == 20 else 4, gpu=gpu(), kernel=kernel())
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({key: way}))

    used = cuda_products._plan(tuple(products), rows)

    assert measured == []
    if way == BATCHED:
        assert isinstance(used, LaunchPlan)
        assert used.file == "batched.cu"
    else:
        assert used == (DECODED if way == DECODED else None)
