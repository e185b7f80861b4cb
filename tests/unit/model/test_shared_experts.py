"""Experts that two ranks share: each holds its own, and both have the states of one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from gptq_models import as_gptq
from packed_models import make_packed
from rank_decoders import packed
from thread_ranks import on_both
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.inference import load_model
from exl2flow.model import TensorFiles, resolve
from exl2flow.model.layers.experts import ExpertsSublayer
from exl2flow.model.tensor_parallel.ranks import Ranks
from exl2flow.model.tensor_parallel.shards import check_ranks

NEAR, NEAR_HALF = 1e-5, 3e-3  # sums in another order; of fp16
FAMILIES = (
    "mixtral",  # five experts
    "qwen2-moe",  # a shared expert with a gate, too narrow for two
    "qwen3-moe",
    "granite-moe-shared",  # the highest logits become weights; a multiplier
    "glm4-moe-one-group",  # corrections, a shared expert that is cut
    "dots1",  # groups, behind a dense layer
    "ernie4.5-moe",
    "hunyuan-moe",
    "gpt-oss",  # biases, clamped swiglu, sinks
    "dbrx",  # weights divided by another norm
    "llama4",  # the input is weighed
)


def ids() -> torch.Tensor:
    return torch.randint(5, 290, (2, 11), generator=torch.Generator().manual_seed(0))


def logits(folder: Path, ranks: Ranks | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, device="cpu", ranks=ranks).decoder.forward(ids())


def make_gptq(folder: Path) -> Path:
    source = make_tiny("qwen2-moe", folder)
    as_gptq(source)
    return source


def assert_shared(folder: Path) -> None:
    expected = logits(folder)

    first, second = on_both(lambda ranks: logits(folder, ranks))

    assert torch.equal(first, second)
    assert (first - expected).norm() <= NEAR * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_experts(family: str, tmp_path: Path) -> None:
    assert_shared(make_checkpoint(family, tmp_path / "model"))


@pytest.mark.parametrize("family", ["mixtral", "glm4-moe-one-group"])
def test_quantized_experts(family: str, tmp_path: Path) -> None:
    assert_shared(make_packed(family, tmp_path / "model").source_dir)


def test_gptq_experts(tmp_path: Path) -> None:
    assert_shared(make_gptq(tmp_path / "model"))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["glm4-moe-one-group", "gpt-oss", "llama4"])
def test_packed_experts_are_one_bank_of_each_rank(family: str, tmp_path: Path) -> None:
    spec = make_packed(family, tmp_path / "model")
    expected = packed(spec, None).forward(ids())

    def of_rank(ranks: Ranks) -> tuple[torch.Tensor, bool]:
        decoder = packed(spec, ranks)
        experts = [s for s in decoder.sublayers if isinstance(s, ExpertsSublayer)]
        banks = [s.bank for s in experts if s.bank is not None and s.bank.is_known]
        return decoder.forward(ids()), len(banks) == len(experts) > 0

    (first, is_first), (second, is_second) = on_both(of_rank)

    assert is_first
    assert is_second
    assert torch.equal(first, second)
    assert (first - expected).norm() <= NEAR_HALF * expected.norm()


@torch.inference_mode()
def test_a_layer_in_several_sublayers(tmp_path: Path) -> None:
    spec = make_packed("qwen2-moe", tmp_path / "model")
    divided = replace(spec, group_weights=3 * 3 * 64 * 32)  # 3, 3, 2 and the shared one
    assert len(divided.sublayers) == len(spec.sublayers) + 6
    expected = packed(divided, None).forward(ids())

    first, second = on_both(lambda ranks: packed(divided, ranks).forward(ids()))

    assert torch.equal(first, second)
    assert (first - expected).norm() <= NEAR_HALF * expected.norm()


def test_each_rank_reads_and_holds_its_experts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("mixtral", tmp_path / "model")
    names, read = list[str](), TensorFiles._read

    def seen(files: TensorFiles, name: str, *args: object, **options: object) -> torch.Tensor:
        names.append(name)
        return read(files, name, *args, **options)

    monkeypatch.setattr(TensorFiles, "_read", seen)
    held = list[list[list[int]]]()
    for rank in range(2):
        names.clear()
        model = load_model(folder, device="cpu", ranks=Ranks(rank, 2))
        layers = [s for s in model.decoder.sublayers if isinstance(s, ExpertsSublayer)]
        held.append([[*layer.group.experts] for layer in layers])

        keys = {name.removesuffix(".weight") for name in names if ".experts." in name}
        assert keys == {p.key for layer in layers for p in layer.spec.projections}
        for layer in layers:
            sizes = [linear.weight.nbytes for linear in layer.linears.values()]
            assert sum(sizes) == len(layer.group.experts) * 3 * 64 * 96 * 4

    assert held == [[[0, 2, 4], [1, 3]], [[1, 3], [0, 2, 4]]]  # the odd one by turns


def test_a_shared_expert_is_cut(tmp_path: Path) -> None:
    folder = make_tiny("qwen2-moe", tmp_path / "model")  # whose shared one is 64 wide

    models = [load_model(folder, device="cpu", ranks=Ranks(rank, 2)) for rank in range(2)]

    for model in models:
        [*layers] = [s for s in model.decoder.sublayers if isinstance(s, ExpertsSublayer)]
        assert [s.linears["shared.down_proj"].weight.shape for s in layers] == [(64, 32)] * 2


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    spec = resolve(make_tiny("mixtral", tmp_path / "model"))

    with pytest.raises(ConfigError, match="8 ranks are more than the 5 experts of a layer of"):
        check_ranks(spec, 8)
