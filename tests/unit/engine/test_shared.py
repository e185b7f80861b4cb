"""Models that two processes share: their logits and texts are those of one."""

from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import pytest
import shared_model
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint
from gptq_models import as_gptq
from packed_models import make_packed
from shared_model import results
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.loading.layer_split import Split
from exl2flow.inference import Adapter, load_model
from exl2flow.model import resolve
from exl2flow.model.tensor_parallel.ranks import Ranks
from exl2flow.model.tensor_parallel.shards import check_ranks, dealt, spans

NEAR = 1e-5  # sums in another order
MODELS = ("biases", "cohere", "exl2", "experts", "gptq", "one-head", "plain", "tied")
PATIENCE = 60


@dataclass(frozen=True, slots=True)
class Rank:
    """A process, and what it says."""

    process: BaseProcess
    log: Path


def begin(folder: Path, *, count: int = 2, more: tuple[str, ...] = ()) -> list[Rank]:
    ranks = [(rank, folder / f"{rank}.log") for rank in range(count)]
    return [
        Rank(forked.call(shared_model.main, rank, count, folder, "cpu", *more, log=log), log)
        for rank, log in ranks
    ]


def ended(ranks: list[Rank], seconds: float) -> list[tuple[int, str]]:
    """Return codes and outputs; end what has not ended in time."""
    try:
        for rank in ranks:
            rank.process.join(seconds)
            assert rank.process.exitcode is not None, rank.log.read_text()
    finally:
        for rank in ranks:
            rank.process.kill()
    return [(rank.process.exitcode, rank.log.read_text()) for rank in ranks]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results by model: of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("shared")
    torch.manual_seed(0)
    make_tiny("llama", folder / "plain")  # three groups of down for two ranks
    make_tiny("qwen2", folder / "biases", intermediate_size=160)
    make_tiny("llama", folder / "one-head", num_key_value_heads=1)
    make_tiny("llama", folder / "tied", tie_word_embeddings=True)
    make_checkpoint("cohere", folder / "cohere")
    make_packed("llama", folder / "exl2")
    make_tiny("qwen2-moe", folder / "experts")
    source = make_tiny("llama", folder / "apart" / "gptq")
    as_gptq(source).rename(folder.with_name("unused"))
    source.rename(folder / "gptq")
    (folder / "apart").rmdir()

    processes = begin(folder)
    alone = {name: results(load_model(folder / name, device="cpu")) for name in MODELS}
    for code, text in ended(processes, PATIENCE):
        assert code == 0, text

    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    return {name: [alone[name], *(found[name] for found in ranks)] for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_say_what_one_process_says(shared: dict[str, list[Any]], name: str) -> None:
    alone, first, second = shared[name]

    for part in ("prompt", "steps"):
        assert torch.equal(first[part], second[part])  # so both sample the same
        assert (first[part] - alone[part]).norm() <= NEAR * alone[part].norm()
    assert first["ids"] == second["ids"] == alone["ids"]


def test_ranks_share_the_seeds_of_requests_without_one(shared: dict[str, list[Any]]) -> None:
    _, first, second = shared["plain"]

    assert first["seedless"] == second["seedless"]
    assert first["seedless"][0] != first["seedless"][1]  # each has a new one


@pytest.mark.slow
@pytest.mark.parametrize("place", ["load", "prompt", "step"])
def test_a_rank_that_dies_ends_the_other_one_within_10_seconds(tmp_path: Path, place: str) -> None:
    make_tiny("llama", tmp_path / "plain")

    first, second = begin(tmp_path, more=(place,))
    assert [code for code, _ in ended([second], PATIENCE)] == [9]
    [(code, text)] = ended([first], 10)

    assert code == 3, text
    lost, never_met = "rank 0 lost another one of 2", "the ranks of a model did not meet"
    assert lost in text or (place == "load" and never_met in text)


def test_groups_are_dealt_out_for_equal_bytes() -> None:
    assert dealt([5, 3, 3, 2, 2, 1], 2) == [[0, 3, 5], [1, 2, 4]]
    assert dealt([1, 1, 1], 2) == [[0, 2], [1]]
    assert [*map(list, spans(5, 2))] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("family", "config", "count", "message"),
    [
        ("llama", {}, 3, "which has 4 heads and 2 key-value heads; give a number that divides"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
            2,
            "6 heads and 3 key",
        ),
        ("olmo2", {"architectures": ["Olmo2ForCausalLM"]}, 2, "has norms over several heads"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(
    tmp_path: Path, family: str, config: dict[str, Any], count: int, message: str
) -> None:
    parent = "llama" if config.get("architectures") else family
    spec = resolve(make_tiny(parent, tmp_path / "model", **config))

    with pytest.raises(ConfigError, match=message):
        check_ranks(spec, count)


def test_more_ranks_than_groups_of_down_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model", num_attention_heads=4, intermediate_size=64)

    with pytest.raises(ConfigError, match="has 2 groups for 4 ranks; give fewer"):
        load_model(folder, device="cpu", ranks=Ranks(0, 4))


def test_what_ranks_cannot_do_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    alone = Ranks(0, 1)

    with pytest.raises(ConfigError, match="neither split nor streamed"):
        load_model(folder, device="cpu", ranks=alone, placement=Split())
    with pytest.raises(ConfigError, match="neither split nor streamed"):
        load_model(folder, device="cpu", ranks=alone, streamed=True)
    model = load_model(folder, device="cpu", ranks=alone)
    with pytest.raises(ConfigError, match="needs a whole model, not one that ranks share"):
        Adapter.load(make_adapter(tmp_path / "lora", folder), model)
