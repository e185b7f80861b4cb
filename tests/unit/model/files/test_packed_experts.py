"""Projections of experts that are stored as one tensor, in each layout that a row can say."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import SourceModelError, TensorShapeError
from exl2flow.model import CanonicalTensors, ModelSpec, resolve
from exl2flow.model.config.family import Packing
from exl2flow.model.files import weights

LAYER, EXPERTS, WIDTH = "model.layers.1", 8, 96
GATE_UP = ("gate_proj", "up_proj")


def packed(matrices: list[torch.Tensor], packing: Packing) -> torch.Tensor:
    """Return (rows, columns) matrices of an expert as it is stored, without the experts' axis."""
    joined = torch.stack(matrices, dim=1) if packing.is_interleaved else torch.stack(matrices)
    joined = joined.flatten(0, 1)
    return joined.T if packing.is_transposed and joined.dim() > 1 else joined


def store(folder: Path, packings: list[Packing]) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Write Qwen3-MoE with packed experts; return its spec, and the tensors by expert."""
    spec = resolve(make_checkpoint("qwen3-moe-sparse-step", folder))
    assert spec.family.experts
    path = folder / "model.safetensors"
    tensors = load_file(path)
    whole = dict(tensors)
    for packing in packings:
        names = [
            [f"{LAYER}.mlp.experts.{e}.{name}.{packing.part}" for name in packing.projections]
            for e in range(EXPERTS)
        ]
        if packing.part == "bias":
            whole |= {name: torch.randn(WIDTH) for of_expert in names for name in of_expert}
        each = [packed([whole[name] for name in of_expert], packing) for of_expert in names]
        both = torch.cat(each) if packing.is_flat else torch.stack(each)
        tensors[f"{LAYER}.{packing.name}"] = both.contiguous()
        for of_expert in names:
            for name in of_expert:
                tensors.pop(name, None)
    save_file(tensors, path)
    row = replace(spec.family.experts, packings=tuple(packings))
    return replace(spec, family=replace(spec.family, experts=row)), whole


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("short", [0, 1 << 20])  # runs that are read each, or together
def test_each_projection_is_found_in_every_layout(
    *,
    short: int,
    is_transposed: bool,
    is_interleaved: bool,
    is_flat: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Packing(
        name="mlp.experts.both",
        projections=GATE_UP,
        is_transposed=is_transposed,
        is_interleaved=is_interleaved,
        is_flat=is_flat,
    )
    down = replace(both, name="mlp.experts.down", projections=("down_proj",))
    spec, expected = store(tmp_path, [both, down])
    monkeypatch.setattr(weights, "SHORT_RUN", short)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)  # stretches end within a matrix

    tensors = CanonicalTensors(spec)

    assert {*tensors.names} == {*expected}
    for name, tensor in expected.items():
        assert torch.equal(tensors.read(name), tensor), name
        assert tensors.nbytes(name) == tensor.nbytes


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_biases_are_packed_as_their_matrices(is_interleaved: bool, tmp_path: Path) -> None:
    weight = Packing(
        name="mlp.experts.both",
        projections=GATE_UP,
        is_transposed=True,
        is_interleaved=is_interleaved,
    )
    bias = replace(weight, name="mlp.experts.both_bias", part="bias")

    spec, expected = store(tmp_path, [weight, bias])

    tensors = CanonicalTensors(spec)
    assert sum(name.endswith(".bias") for name in expected) == 2 * EXPERTS
    assert {*tensors.names} == {*expected}
    assert all(torch.equal(tensors.read(name), tensor) for name, tensor in expected.items())


def test_only_the_bytes_of_an_expert_are_read(tmp_path: Path) -> None:
    packing = Packing(name="mlp.experts.both", projections=GATE_UP, is_transposed=True)
    spec, expected = store(tmp_path, [packing])
    path, key = tmp_path / "model.safetensors", f"{LAYER}.mlp.experts.both"
    whole = load_file(path)
    stored = whole.pop(key)
    save_file(whole, path)
    apart = tmp_path / "packed.safetensors"
    save_file({key: stored}, apart)
    tensors = CanonicalTensors(spec)

    os.truncate(apart, apart.stat().st_size - stored[0].nbytes)

    last, others = f"{LAYER}.mlp.experts.{EXPERTS - 1}.up_proj.weight", range(EXPERTS - 1)
    names = [f"{LAYER}.mlp.experts.{e}.{name}.weight" for e in others for name in GATE_UP]
    assert all(torch.equal(tensors.read(name), expected[name]) for name in names)
    with pytest.raises(SourceModelError, match=f"ends within `{last}`"):
        tensors.read(last)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_packed_experts_of_another_layout_are_refused(is_transposed: bool, tmp_path: Path) -> None:
    packing = Packing(name="mlp.experts.down", projections=("down_proj",))
    spec, _ = store(tmp_path, [packing])
    assert spec.family.experts
    other = replace(packing, is_transposed=is_transposed, is_flat=not is_transposed)
    row = replace(spec.family.experts, packings=(other,))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    key = f"{LAYER}.mlp.experts.down"
    tensors[key] = tensors[key][:, :, :16].contiguous()
    save_file(tensors, path)

    keys = "`num_local_experts`, `hidden_size` and `moe_intermediate_size`"
    words = rf"experts\.down`.* \(8, 64, 16\), {keys} in `config.json` imply"
    with pytest.raises(TensorShapeError, match=words):
        CanonicalTensors(replace(spec, family=replace(spec.family, experts=row)))


def test_experts_of_qwen3_vl_may_be_transposed_or_not_or_apart(tmp_path: Path) -> None:
    spec = resolve(make_checkpoint("qwen3-vl-moe", tmp_path))
    path, stored = tmp_path / "model.safetensors", CanonicalTensors(spec)
    apart = {name: stored.read(name) for name in stored.names}
    tensors = load_file(path)
    packed_names = [name for name in tensors if ".experts." in name]

    for name in packed_names:
        tensors[name] = tensors[name].mT.contiguous()
    for files in (tensors, apart):
        save_file(files, path)
        found = CanonicalTensors(spec)

        assert {*found.names} == {*apart}
        assert all(torch.equal(found.read(name), tensor) for name, tensor in apart.items())
    assert len(packed_names) == 2  # the first layer has an MLP
