"""What runs a layer's products, summed up over layers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from packed_models import decoder_of, make_packed
from tiny import make_tiny

from exl2flow.inference import load_model
from exl2flow.inference.bench import DecodePlan, decode_plan
from exl2flow.inference.bench.decode_plan import decode_plans
from exl2flow.kernels import CardFacts, FusedLinear, Ops, PlanFacts, get_ops


def facts(*, slots: int = 4, ctas: int = 132, fill: float = 0.9, products: int = 4) -> PlanFacts:
    kernel, shared = "product<1, false>", slots << 10
    return PlanFacts(
        kernel=kernel, products=products, slots=slots, ctas=ctas, shared=shared, fill=fill
    )


class Launching(Ops):
    """An implementation that launches a chain whose products are few, or each product."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[tuple[int, int]] = []

    def launches(self, products: Sequence[FusedLinear], rows: int) -> list[PlanFacts]:
        self.asked.append((len(products), rows))
        if len(products) <= self.most:
            return [facts(products=len(products))]
        return [facts(products=1)] * len(products)


def test_the_worst_launch_of_all_layers_is_told() -> None:
    layers = [[facts(slots=4, ctas=120, fill=0.9)], [facts(slots=2), facts(slots=8, fill=0.7)]]

    assert DecodePlan.of(1, layers) == DecodePlan(
        rows=1,
        launches=2,
        kernels=("product<1, false>",),
        slots=2,
        ctas=120,
        shared=8 << 10,
        fill=0.7,
    )


def test_decoded_matrices_have_no_launches() -> None:
    assert DecodePlan.of(64, [[], []]) == DecodePlan(rows=64, launches=0, kernels=(), slots=None)


@pytest.mark.parametrize(
    ("family", "calls", "most", "launches"),
    [
        ("llama", [4], 4, 1),
        ("llama", [4], 3, 4),
        ("cohere", [3], 4, 1),  # o; the MLP, with q, k and v beside it
    ],
)
def test_a_layer_has_the_products_between_two_attentions(
    family: str,
    calls: list[int],
    most: int,
    launches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, ops = decoder_of(make_packed(family, tmp_path)), Launching(most)
    monkeypatch.setattr(decode_plan, "get_ops", lambda device: ops)

    plans = decode_plans(decoder, [1, 16, 1])

    assert ops.asked == [(call, rows) for rows in (1, 16) for call in calls]
    assert [(plan.rows, plan.launches) for plan in plans] == [(1, launches), (16, launches)]


def test_a_model_whose_linears_are_not_packed_has_no_plans(tmp_path: Path) -> None:
    model = load_model(make_tiny("llama", tmp_path / "model"), device="cpu")

    assert decode_plans(model.decoder, [1]) == ()


def test_torch_has_neither_launches_nor_a_card(tmp_path: Path) -> None:
    decoder = decoder_of(make_packed("llama", tmp_path))

    assert [plan.launches for plan in decode_plans(decoder, [1])] == [0]
    assert get_ops("cpu").card(decoder.placement.head) is None


@pytest.mark.parametrize(("capability", "copies"), [(86, "cp.async"), (90, "bulk copies")])
def test_kernels_of_newer_cards_fetch_by_bulk_copies(capability: int, copies: str) -> None:
    assert CardFacts(capability=capability, processors=1, shared=1).copies == copies
