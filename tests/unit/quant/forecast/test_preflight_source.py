"""What headers and names of the source's files tell is found before any work."""

from pathlib import Path

import pytest
import torch
from refusals import change_config, change_tensors, config_of, problems_of
from safetensors.torch import save_file

from exl2flow.core.errors import Exl2FlowError
from exl2flow.inference import load_model
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.preflight import preflight

UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def test_more_layers_than_the_files_hold_are_refused_at_once(source: Path) -> None:
    change_config(source, num_hidden_layers=2000)

    problems = problems_of(config_of(source))

    assert any("is 2000, the files hold 2 layers" in line for line in problems)


def test_integers_instead_of_weights_are_refused(source: Path) -> None:
    change_tensors(source, lambda t: t.update({UP_PROJ: t[UP_PROJ].to(torch.int32)}))

    problems = problems_of(config_of(source))

    assert any(f"are integers: `{UP_PROJ}` is torch.int32" in line for line in problems)


def test_eight_bit_integers_are_refused(source: Path) -> None:
    change_tensors(source, lambda t: t.update({UP_PROJ: t[UP_PROJ].to(torch.int8)}))

    assert any(f"`{UP_PROJ}`" in p and "dtype I8" in p for p in problems_of(config_of(source)))


def test_weights_of_double_precision_are_no_problem(source: Path) -> None:
    change_tensors(source, lambda t: t.update({name: x.double() for name, x in t.items()}))

    preflight(config_of(source), STAGES)


@pytest.mark.parametrize(
    "name", ["self_attn.sinks", "self_attn.q_norm.weight", "mlp.up_proj.bias", "mtp.weight"]
)
def test_tensors_that_nothing_reads_are_refused_by_name(name: str, source: Path) -> None:
    extra = f"model.layers.0.{name}"
    change_tensors(source, lambda t: t.update({extra: torch.ones(96)}))

    (problem,) = problems_of(config_of(source))

    assert f"`LlamaForCausalLM` does not have: `{extra}`;" in problem


def test_second_copy_of_the_weights_is_no_problem(source: Path) -> None:
    other = {"layers.0.attention.wq.weight": torch.ones(64, 64)}
    save_file(other, source / "consolidated.safetensors")

    preflight(config_of(source), STAGES)


def test_buffers_that_were_once_stored_are_no_problem(source: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_tensors(source, lambda t: t.update(extra))

    preflight(config_of(source), STAGES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v_head.summary.weight", torch.ones(1, 64)),
        ("v_head.summary.bias", torch.ones(1)),
        ("lm_head.weight._scale", torch.ones(1)),
        ("some_other_part.weight", torch.ones(3)),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", torch.ones(4, 8)),
        ("model.layers.0.mlp.up_proj.bias", torch.zeros(96)),
    ],
)
def test_tensors_that_the_model_does_not_need_are_listed_as_not_used(
    name: str, value: torch.Tensor, source: Path
) -> None:
    change_tensors(source, lambda t: t.update({name: value}))

    plan = preflight(config_of(source), STAGES)

    assert plan.unused == (name,)
    assert ("not used", name) in plan.rows()


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            torch.ones(200, 64),
            r"`lm_head.weight` has shape (200, 64), the config implies (301, 64)",
        ),
        (torch.ones(301, 64, dtype=torch.int32), "are integers: `lm_head.weight` is torch.int32"),
    ],
)
def test_a_left_over_head_beside_a_tied_embedding_is_checked(
    head: torch.Tensor, message: str, source: Path
) -> None:
    change_config(source, tie_word_embeddings=True)
    change_tensors(source, lambda t: t.update({"lm_head.weight": head}))

    assert any(message in line for line in problems_of(config_of(source)))
    with pytest.raises(Exl2FlowError, match=r"`lm_head\.weight`"):
        load_model(str(source), device="cpu")
