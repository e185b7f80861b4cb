"""What configs say about experts: which layers have them, their routers, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from decoders import build_decoder
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import Exl2FlowError, SourceModelError, TensorShapeError
from exl2flow.kernels import RouterArgs, get_ops
from exl2flow.model import CanonicalTensors, ModelSpec, resolve
from exl2flow.model.files.headers import unclaimed
from exl2flow.model.files.source_tensors import check_tensors
from exl2flow.model.layers.experts import load_router

Made = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a checkpoint by name, which is made once."""
    made: dict[str, Path] = {}

    def source(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("source"))
        return made[name]

    return source


def changed(source: Path, folder: Path, **values: object) -> Path:
    """Return a copy of a checkpoint whose config has other values, in the text model's part."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(values)
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (
            "qwen3-moe",
            {"num_experts_per_tok": 9},
            "`num_experts_per_tok`.* is 9; it must be at most `num_local_experts`, 8",
        ),
        ("qwen3-moe", {"mlp_only_layers": [2]}, r"`mlp_only_layers\[0\]`.* from 0 to 1"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "`decoder_sparse_step`.* is 0"),
        ("qwen2-moe", {"moe_intermediate_size": None}, "`moe_intermediate_size` is missing"),
        ("glm4-moe", {"n_group": 3}, "`n_group`.* is 3; it must divide 8"),
        ("glm4-moe", {"n_group": 8}, "`n_group`.* is 8; it must divide .* groups of 2 or more"),
        ("glm4-moe", {"topk_group": 5}, "`topk_group`.* is 5; it must be at most 4"),
        ("glm4-moe", {"topk_group": 1}, "`topk_group`.* is 1; .* that many groups must hold 3"),
        ("glm4-moe", {"first_k_dense_replace": 3}, "`first_k_dense_replace`.* from 0 to 2"),
        ("glm4-moe", {"scoring_func": "softmax"}, "`scoring_func`.* is `softmax`.* `sigmoid`"),
        ("minimax-m2", {"scoring_func": "tanh"}, "`scoring_func`.* is `tanh`; supported"),
        (
            "minimax-m2",
            {"rotary_dim": 32, "rope_parameters": None},
            "asks to rotate 32 of 24 dimensions",
        ),
        ("ernie4.5-moe", {"moe_layer_end_index": 2}, "`moe_layer_end_index`.* from -1 to 1"),
        ("hunyuan-moe", {"moe_topk": [2]}, "`moe_topk`.* a list of 2 items"),
        ("hunyuan-moe", {"moe_topk": [2, 7]}, "`moe_topk`.* is 7; .* at most `num_experts`, 6"),
        (
            "qwen3-vl-moe",
            {"num_experts_per_tok": 9},
            r"`text_config\.num_experts_per_tok`.* is 9; .* `text_config\.num_local_experts`, 8",
        ),
    ],
)
def test_impossible_values_are_refused(
    name: str, values: dict[str, Any], words: str, sources: Made, tmp_path: Path
) -> None:
    folder = changed(sources(name), tmp_path, **values)

    with pytest.raises(Exl2FlowError, match=words) as caught:
        resolve(folder)

    assert "config.json" in str(caught.value)


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def narrower(tensors: Tensors, name: str) -> Tensors:
    return tensors | {name: tensors[name][:-32].contiguous()}


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
KEYS = "`num_local_experts`, `hidden_size` and `moe_intermediate_size` imply"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "qwen3-moe",
            lambda tensors: without(tensors, EXPERT),
            rf"`{EXPERT}` \(96, 64\) is missing in .*, although {KEYS} it",
        ),
        (
            "qwen3-moe",
            lambda tensors: narrower(tensors, EXPERT),
            rf"`{EXPERT}` has shape \(64, 64\), {KEYS} \(96, 64\)",
        ),
        (
            "qwen3-moe",
            lambda tensors: tensors | {"model.layers.0.mlp.gate.weight": torch.zeros(6, 64)},
            rf"`model.layers.0.mlp.gate.weight` has shape \(6, 64\), {KEYS} \(8, 64\)",
        ),
        (
            "glm4-moe",
            lambda tensors: without(tensors, "model.layers.1.mlp.gate.e_score_correction_bias"),
            r"correction_bias` \(8,\) is missing in .*, although `n_routed_experts`.* imply it",
        ),
        (
            "granite-moe",
            lambda tensors: (
                tensors
                | {"model.layers.1.block_sparse_moe.router.layer.weight": torch.zeros(5, 64)}
            ),
            r"router\.layer\.weight` has shape \(5, 64\), `num_local_experts`.* imply \(6, 64\)",
        ),
        (
            "granite-moe",
            lambda tensors: {
                n: t[:, :-32].contiguous() if "input_linear" in n else t for n, t in tensors.items()
            },
            r"input_linear\.weight` .* \(6, 160, 64\), `num_local.* imply \(6, 192, 64\)",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    name: str, change: Callable[[Tensors], Tensors], words: str, sources: Made, tmp_path: Path
) -> None:
    spec = resolve(changed(sources(name), tmp_path))
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path)

    with pytest.raises(TensorShapeError, match=words):
        check_tensors(spec)


@pytest.mark.parametrize(
    ("name", "values", "experts"),
    [
        ("mixtral", {}, [5, 5]),
        ("qwen3-moe-sparse-step", {}, [0, 8]),
        ("qwen2-moe", {"mlp_only_layers": [1]}, [8, 0]),
        ("glm4-moe", {}, [0, 8]),
        ("glm4-moe", {"first_k_dense_replace": 2}, [0, 0]),
        ("ernie4.5-moe", {"moe_layer_end_index": -1}, [0, 6]),
        ("ernie4.5-moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 0}, [6, 0]),
        ("ernie4.5-moe-interval", {}, [0, 6]),
    ],
)
def test_layers_with_experts(
    name: str, values: dict[str, Any], experts: list[int], sources: Made, tmp_path: Path
) -> None:
    spec = resolve(changed(sources(name), tmp_path, **values))

    assert [spec.experts_of(layer) for layer in range(spec.num_layers)] == experts


def test_layers_of_hunyuan_choose_as_many_experts_as_listed(sources: Made) -> None:
    spec = resolve(sources("hunyuan-moe"))

    assert [router_of(spec, layer).rule.top for layer in range(2)] == [2, 4]


def test_rotated_dimensions_of_minimax_may_be_given_as_a_count(
    sources: Made, tmp_path: Path
) -> None:
    written = resolve(sources("minimax-m2")).attentions

    published = {"rotary_dim": 12, "rope_parameters": None, "rope_theta": 5000.0}
    spec = resolve(changed(sources("minimax-m2"), tmp_path, **published))

    assert spec.attentions == written
    assert spec.attentions[0].rope.rotary_dim == 12


def router_of(spec: ModelSpec, layer: int) -> RouterArgs:
    group = next(s.group for s in spec.sublayers if s.group and s.layer_index == layer)
    return load_router(spec, group, CanonicalTensors(spec), device="cpu")[0]


@pytest.mark.parametrize(
    "name", ["glm4-moe", "glm4-moe-one-group", "dots1", "ernie4.5-moe", "ernie4.5-moe-interval"]
)
def test_checkpoints_have_corrections_and_groups_that_change_choices(
    name: str, sources: Made
) -> None:
    router = router_of(resolve(sources(name)), 1)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    route = get_ops("cpu").route
    chosen = route(x, router).ids.sort().values

    others = [replace(router, correction=None)]
    if router.rule.groups > 1:
        others.append(replace(router, rule=replace(router.rule, groups=1)))

    for other in others:
        differs = (route(x, other).ids.sort().values != chosen).any(dim=1)
        assert differs.float().mean() > 0.1


def test_least_sum_of_ernie_and_clip_of_olmoe_matter(sources: Made) -> None:
    router = router_of(resolve(sources("ernie4.5-moe")), 1)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    sums = get_ops("cpu").route(x, router).weights.sum(dim=1)
    assert 0.1 < (sums < 0.999).float().mean() < 0.9

    spec = resolve(sources("olmoe"))
    ids = torch.arange(20)[None]
    free = replace(spec, attentions=tuple(replace(layer, clip=None) for layer in spec.attentions))
    clipped, unclipped = (
        build_decoder(one, CanonicalTensors(one), dtype=torch.float32, device="cpu").forward(ids)
        for one in (spec, free)
    )
    assert (clipped - unclipped).norm() > 0.01 * clipped.norm()


@pytest.mark.parametrize(
    ("name", "left_out", "claimed"),
    [
        ("glm4-moe", "model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"),
        ("ernie4.5-moe", "model.mtp_block.0.mlp.up_proj.weight", "model.layers.2.up_proj.weight"),
        ("qwen3-moe", "model.rotary_emb.inv_freq", "model.layers.2.mlp.gate.weight"),
    ],
)
def test_layers_that_draft_are_left_out(
    name: str, left_out: str, claimed: str, sources: Made, tmp_path: Path
) -> None:
    spec = resolve(changed(sources(name), tmp_path))
    save_file({left_out: torch.ones(2), claimed: torch.ones(2)}, tmp_path / "more.safetensors")

    assert unclaimed(spec, CanonicalTensors(spec)) == (claimed,)


def test_count_of_experts_is_needed_only_where_layers_have_them(
    sources: Made, tmp_path: Path
) -> None:
    values = {"n_routed_experts": None, "num_local_experts": None}
    with pytest.raises(SourceModelError, match="`n_routed_experts` is missing"):
        resolve(changed(sources("dots1"), tmp_path, **values))

    spec = resolve(changed(sources("dots1"), tmp_path, **values, first_k_dense_replace=2))

    assert spec.experts_of(1) == 0
