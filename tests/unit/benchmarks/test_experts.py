"""What the benchmark of experts changes in a model, and in what rounding sees of it."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from exl2flow.model.layers.experts import ExpertsSublayer
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.hessian import collect_hessians

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from experts import STANDARD, at_layer, configured, layer_hessians, parse, starve

LAYER = 1


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    folder = tmp_path_factory.mktemp("experts")
    source = make_checkpoint("qwen3-moe", folder / "model")
    [file] = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] += 2.0  # states have something in common, as trained ones
    save_file(tensors, file, metadata={"format": "pt"})
    words = ["--model", str(source), "--work", str(folder / "work"), "--layer", str(LAYER)]
    return parse([*words, "--rare-tokens", "12", "--set", "calibration.rows=3"])


@pytest.fixture(scope="module")
def ids(arguments: Namespace) -> torch.Tensor:
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    return torch.randint(0, vocabulary, (4, 96), generator=torch.Generator().manual_seed(0))


def experts_of(
    arguments: Namespace, ids: torch.Tensor, **values: object
) -> tuple[ExpertsSublayer, torch.Tensor]:
    config = configured(arguments, "a", 3.0, "base", STANDARD | values)
    with torch.no_grad():
        return at_layer(config, ids, LAYER)


def test_given_fields_reach_the_configuration(arguments: Namespace) -> None:
    config = configured(arguments, "a", 3.0, "base", STANDARD)

    assert (config.calibration.rows, config.bpw, config.device) == (3, 3.0, "cpu")


def test_a_starved_expert_keeps_fewer_tokens_than_asked_for(
    arguments: Namespace, ids: torch.Tensor, tmp_path: Path
) -> None:
    with torch.no_grad():
        expert, left = starve(arguments, ids, tmp_path / "copy")

    sublayer, states = experts_of(arguments, ids)
    before = int((sublayer.routes(states).ids == expert).sum())
    changed, states = experts_of(arguments, ids, source=tmp_path / "copy")
    routed = int((changed.routes(states).ids == expert).sum())
    assert abs(routed - left) <= 1  # sums of doubles there, of floats here
    assert 0 < left < arguments.rare_tokens < before
    differing = (changed.router.weight != sublayer.router.weight).any(dim=1)
    assert differing.nonzero().flatten().tolist() == [expert]


def test_what_cannot_be_starved_so_far_is_refused(
    arguments: Namespace, ids: torch.Tensor, tmp_path: Path
) -> None:
    few = Namespace(**vars(arguments) | {"rare_tokens": 1})

    with torch.no_grad(), pytest.raises(SystemExit, match=r"`--rare-tokens 1` leaves \d+; try"):
        starve(few, ids, tmp_path / "copy")


def test_hessians_of_a_layer_are_those_of_all_its_tokens(
    arguments: Namespace, ids: torch.Tensor
) -> None:
    sublayer, states = experts_of(arguments, ids)
    with torch.no_grad():
        coverage = Coverage.of(sublayer, states, 1)
        assert coverage is not None
        own, _ = collect_hessians(sublayer, states, coverage=coverage)
        with layer_hessians():
            layer, _ = collect_hessians(sublayer, states, coverage=coverage)
        x = sublayer.inputs(states)

    for expert in sublayer.group.experts:
        torch.testing.assert_close(layer[f"{expert}.input"], x.T @ x / len(x))
        assert torch.equal(own[f"{expert}.inner"], layer[f"{expert}.inner"])
    differing = [
        expert
        for expert in sublayer.group.experts
        if not torch.allclose(own[f"{expert}.input"], layer[f"{expert}.input"])
    ]
    assert differing == [e for e, count in coverage.counts.items() if 0 < count < len(x)]
