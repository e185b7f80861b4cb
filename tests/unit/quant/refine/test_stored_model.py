"""A model beside its reference: what is mixed, and what is refused before any work."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_models import make_fp8
from refinements import refinement, rough_model
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from exl2flow.core.errors import ConfigError, MissingTensor, SourceModelError, TensorShapeError
from exl2flow.model import TensorFiles
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.quant.refine.stored_model import StoredModel, check_refinement
from exl2flow.quant.walk.source_model import SourceModel

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with a tied head and an EXL2 model of it; not to be changed."""
    root = tmp_path_factory.mktemp("pair")
    return rough_model(root, num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture
def copy(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """The EXL2 model, to be spoilt."""
    return Path(shutil.copytree(pair[1], tmp_path / "model"))


def change(model: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a model; None removes one. In names, `__` stands for a dot."""
    path = model / "model.safetensors"
    tensors = load_file(path) | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


def test_overlay_takes_away_and_puts_in_place(pair: tuple[Path, Path]) -> None:
    source, model = pair
    weights = TensorFiles(source)
    hidden = tensor_names(Q_PROJ)
    instead = {"x": (weights, f"{Q_PROJ}.weight")}

    overlay = TensorFiles(model).overlaid(instead, without=hidden)

    assert torch.equal(overlay.read("x"), weights.read(f"{Q_PROJ}.weight"))
    assert overlay.shape("x") == weights.shape(f"{Q_PROJ}.weight")
    assert not any(name in overlay for name in hidden)
    assert "model.norm.weight" in overlay
    with pytest.raises(MissingTensor):
        overlay.read(hidden[0])


def test_overlay_puts_fp8_weights_in_place_with_their_scales(tmp_path: Path) -> None:
    reference = TensorFiles(make_fp8(tmp_path, "blocks, fp32", num_hidden_layers=1))
    plain, name = tmp_path / "plain", f"{Q_PROJ}.weight"
    decoded = load_file(plain / "model.safetensors")

    overlay = TensorFiles(plain).overlaid({name: (reference, name)})

    assert torch.equal(overlay.read(name), decoded[name])
    assert overlay.in_fp8 == (name,)


def test_mixture_has_the_weights_of_the_reference_and_all_else_of_the_model(
    pair: tuple[Path, Path], copy: Path, tmp_path: Path
) -> None:
    norm, embedding = torch.rand(64).half() + 1, torch.randn(301, 64).half()
    change(
        copy,
        model__layers__0__input_layernorm__weight=norm,
        model__embed_tokens__weight=embedding,
        **{f"{Q_PROJ}.bias": torch.ones(64).half()},
    )
    config = refinement(pair[0], copy, tmp_path / "out")
    source, mixed = (
        SourceModel.open(config, "cpu"),
        StoredModel.open(config, "cpu").with_reference(),
    )
    spec = source.spec.sublayers[0]

    found, expected = mixed.sublayer(spec), source.sublayer(spec)

    for name, linear in found.linears.items():
        assert torch.equal(linear.weight, expected.linears[name].weight)
    assert torch.equal(found.linears["q_proj"].bias, torch.ones(64))
    assert torch.equal(mixed.tensors.read("model.layers.0.input_layernorm.weight"), norm)
    ids = torch.arange(8)[None]
    assert torch.equal(mixed.initial_states(ids)[0], embedding[:8].float())
    assert torch.equal(mixed.head().linear.weight, source.head().linear.weight)


def test_pair_that_belongs_together_is_accepted(pair: tuple[Path, Path], tmp_path: Path) -> None:
    check_refinement(refinement(*pair, tmp_path / "out"))


def test_output_that_is_the_model_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="`--out` is the model that is refined"):
        check_refinement(refinement(*pair, pair[1] / ".." / "rough"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quality": "exllamav2"}, "`--rounds` is 0"),
        ({"calibration": {"rows": 1}}, "`--rows` is 1, and one row must judge"),
    ],
)
def test_options_that_cannot_refine_are_refused(
    options: dict[str, Any], message: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_refinement(refinement(*pair, tmp_path / "out", **options))


def test_unquantized_model_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_tiny("qwen2", tmp_path / "plain", num_hidden_layers=1)

    with pytest.raises(SourceModelError, match="plain` holds no EXL2 matrices"):
        check_refinement(refinement(pair[0], other, tmp_path / "out"))


def test_other_vocabulary_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_tiny("qwen2", tmp_path / "other", num_hidden_layers=1, vocab_size=320)

    with pytest.raises(ConfigError, match=r"has 301 tokens, `.*other` 320; .*`--reference`"):
        check_refinement(refinement(other, pair[1], tmp_path / "out"))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"intermediate_size": 128}, "model.layers.0.mlp.gate_proj"),
        ({"num_hidden_layers": 2}, "model.layers.1.self_attn.q_proj"),
    ],
)
def test_other_shapes_are_refused(
    overrides: dict[str, object], key: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 1, **overrides}
    other = make_tiny("qwen2", tmp_path / "other", **sizes)

    with pytest.raises(TensorShapeError, match=f"`{key}`, .* differ in shape between"):
        check_refinement(refinement(other, pair[1], tmp_path / "out"))


def test_missing_matrix_is_named(pair: tuple[Path, Path], copy: Path, tmp_path: Path) -> None:
    change(copy, **dict.fromkeys(tensor_names(Q_PROJ)))

    with pytest.raises(SourceModelError, match=f"`{Q_PROJ}` of .* not stored in EXL2 form"):
        check_refinement(refinement(pair[0], copy, tmp_path / "out"))


def test_damaged_matrix_is_found_before_any_work(
    pair: tuple[Path, Path], copy: Path, tmp_path: Path
) -> None:
    packed = tensor_names(Q_PROJ)[0]
    change(copy, **{packed: load_file(copy / "model.safetensors")[packed][1:]})

    with pytest.raises(TensorShapeError, match=f"`{Q_PROJ}` contradict one another"):
        check_refinement(refinement(pair[0], copy, tmp_path / "out"))


def test_matrix_of_another_model_is_found_before_any_work(
    pair: tuple[Path, Path], copy: Path, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 128, "tie_word_embeddings": True}
    source = make_tiny("qwen2", tmp_path / "source", **sizes)
    shutil.copy(source / "config.json", copy)

    with pytest.raises(TensorShapeError, match="has 64 rows and 96 columns, its"):
        check_refinement(refinement(source, copy, tmp_path / "out"))


@pytest.mark.parametrize("value", [0, 64, -1])
def test_permutation_that_is_none_is_found_before_any_work(
    value: int, pair: tuple[Path, Path], copy: Path, tmp_path: Path
) -> None:
    name = tensor_names(Q_PROJ)[-1]
    perm = load_file(copy / "model.safetensors")[name]
    perm[perm == 5] = value
    change(copy, **{name: perm})

    with pytest.raises(TensorShapeError, match=f"`{Q_PROJ}.*does not name each"):
        check_refinement(refinement(pair[0], copy, tmp_path / "out"))
