"""`bench` on a GPU tells what runs a layer's products: the plans of the steps that it timed."""

from typing import NoReturn

import pytest
import torch

from exl2flow.core.options.config import ConversionConfig
from exl2flow.inference import load_model
from exl2flow.inference.bench import bench
from exl2flow.inference.bench.decode_plan import decode_plans
from exl2flow.inference.bench.run import BenchSession
from exl2flow.kernels import CardFacts
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda.compiler import capability, limits

pytestmark = pytest.mark.gpu


def test_the_card_and_a_plan_for_each_number_of_rows_are_told(llama: ConversionConfig) -> None:
    index = torch.cuda.current_device()
    processors, shared = limits(index)

    found = bench(llama.out, device="cuda", context=40, rows=(1, 3, 64, 96))

    assert found.cards == (
        CardFacts(capability=capability(index), processors=processors, shared=shared),
    )
    assert [plan.rows for plan in found.plans] == [1, 3, 64, 96]
    *few, many = found.plans
    assert many.launches == 0
    for plan in few:
        assert plan.launches >= 1
        assert plan.slots is not None
        assert plan.slots >= 1
        assert plan.shared is not None
        assert plan.shared <= shared
        assert plan.fill is not None
        assert 0 < plan.fill <= 1


def test_plans_are_those_of_the_steps(
    llama: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(llama.out, device="cuda")
    session = BenchSession(model, cache="fp16", seconds=20.0, report=lambda text: None)
    session.run(40, (1, 3, 16))

    def planned_again(*given: object) -> NoReturn:
        pytest.fail("a plan is made that no step has used")

    monkeypatch.setattr(cuda_products, "plan_of", planned_again)
    monkeypatch.setattr(cuda_products.batched, "plan_of", planned_again)

    assert [plan.launches for plan in decode_plans(model.decoder, (1, 3, 16))] == [1, 1, 1]
