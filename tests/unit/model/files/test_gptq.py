"""GPTQ checkpoints run as they are: what their tensors stand for, by loops over single codes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import small_config
from gptq_models import as_gptq, packed
from tiny import make_tiny

from exl2flow.core.errors import MissingTensor, PreflightFailed, SourceModelError, TensorShapeError
from exl2flow.inference import load_model
from exl2flow.kernels import get_ops
from exl2flow.model import resolve
from exl2flow.model.config.gptq_label import GptqLabel, declared_quantization
from exl2flow.model.files.gptq import GptqMatrix, gptq_names, is_gptq, zero_offset
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.preflight import preflight

K, N = 96, 24
KEY = "q"


def stored(*parts: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return packed(*parts, key=KEY, **more)


def matrix_of(tensors: dict[str, torch.Tensor], *, zero_offset: int = 1) -> torch.Tensor:
    matrix = GptqMatrix.from_tensors(KEY, tensors, zero_offset=zero_offset)
    found = torch.empty(matrix.shape, dtype=torch.float16)
    for columns, part in matrix.parts():
        found[:, columns] = part
    return found


def drawn(groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, zeros = torch.randint(0, 16, (K, N)), torch.randint(0, 16, (groups, N))
    return codes, zeros, (torch.rand(groups, N) * 0.02).half()


@pytest.mark.parametrize("zero_offset", [1, 0])
@pytest.mark.parametrize(("groups", "size"), [(3, 32), (2, 64), (1, 128)])
def test_a_value_is_code_less_zero_times_scale(groups: int, size: int, zero_offset: int) -> None:
    codes, zeros, scales = drawn(groups)
    found = matrix_of(stored(codes, zeros, scales), zero_offset=zero_offset)

    for row in range(K):
        steps = codes[row] - (zeros[row // size] + zero_offset)
        assert torch.equal(found[row], steps.half() * scales[row // size])


def test_act_order_gives_every_in_feature_its_own_group() -> None:
    codes, zeros, scales = drawn(3)
    g_idx = (torch.arange(K) // 32)[torch.randperm(K)]
    found = matrix_of(stored(codes, zeros, scales, g_idx=g_idx))

    for row, group in enumerate(g_idx.tolist()):
        assert torch.equal(found[row], (codes[row] - zeros[group] - 1).half() * scales[group])


def test_rows_of_a_group_are_laid_out_together() -> None:
    codes, zeros, scales = drawn(3)
    g_idx = torch.randperm(K) % 3
    tensors = stored(codes, zeros, scales, g_idx=g_idx)

    matrix = GptqMatrix.from_tensors(KEY, tensors, zero_offset=1)
    packed = matrix.laid_out(matrix.order)

    assert g_idx[packed.order].tolist() == sorted(g_idx.tolist())
    assert torch.equal(get_ops("cpu").decode_packed(packed), matrix_of(tensors))


def test_an_index_of_zeros_is_none() -> None:
    codes, zeros, scales = drawn(3)
    plain = matrix_of(stored(codes, zeros, scales))
    assert torch.equal(matrix_of(stored(codes, zeros, scales, g_idx=torch.zeros(K))), plain)


def test_names_tell_the_form() -> None:
    names = set(stored(*drawn(3)))
    assert is_gptq(KEY, names)
    assert not is_gptq("k", names)
    assert set(gptq_names(KEY)) == names | {f"{KEY}.g_idx"}


@pytest.mark.parametrize("suffix", ["qzeros", "scales"])
def test_a_missing_tensor_is_named(suffix: str) -> None:
    tensors = stored(*drawn(3))
    del tensors[f"{KEY}.{suffix}"]
    with pytest.raises(MissingTensor, match=suffix):
        GptqMatrix.from_tensors(KEY, tensors, zero_offset=1)


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


Tensors = dict[str, torch.Tensor]  # by the part behind the key
SPOILERS: dict[str, Callable[[Tensors], Tensors]] = {
    "awq": lambda _: {"qweight": words(K, N // 8)},
    "eight bits": lambda _: {"qzeros": words(3, N // 4)},
    "floats": lambda of: {"qweight": of["qweight"].float()},
    "odd groups": lambda _: parts_of(stored(*drawn(5))),
    "outside": lambda _: {"g_idx": words(K) + 7},
    "unequal": lambda _: {"g_idx": torch.tensor([0] * 31 + [1] * 33 + [2] * 32).int()},
    "no groups": lambda of: {name: of[name][:0] for name in ("qzeros", "scales")},
    "no rows": lambda of: {"qweight": of["qweight"][:0]},
    "scalar": lambda _: {"qweight": words(1)[0]},
    "flat": lambda of: {"scales": of["scales"].flatten()},
    "whole scales": lambda of: {"scales": of["scales"].int()},
    "far": lambda _: {"g_idx": words(K) + (2**31 - 1)},
    "wrong bias": lambda _: {"bias": torch.tensor(1.0)},
    "part of a panel": lambda of: {"qweight": of["qweight"][:10]},  # 80 rows
}


def parts_of(tensors: dict[str, torch.Tensor]) -> Tensors:
    return {name.removeprefix(f"{KEY}."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("spoil", SPOILERS)
def test_error_for_a_matrix_that_cannot_run_names_it(spoil: str) -> None:
    tensors = stored(*drawn(3))
    spoiled = SPOILERS[spoil](parts_of(tensors))
    tensors |= {f"{KEY}.{part}": tensor for part, tensor in spoiled.items()}
    with pytest.raises(TensorShapeError, match=f"`{KEY}"):
        GptqMatrix.from_tensors(KEY, tensors, zero_offset=1)


@pytest.mark.parametrize("version", [None, "gptq_v2"])
def test_a_gptq_model_runs_like_its_decoded_weights(tmp_path: Path, version: str | None) -> None:
    source = make_tiny("llama", tmp_path / "gptq")
    plain = as_gptq(source, version=version, bias=0.0)
    ids = torch.randint(0, 100, (1, 12))

    found = load_model(source, device="cpu").decoder.forward(ids)

    assert torch.equal(found, load_model(plain, device="cpu").decoder.forward(ids))


def test_a_bias_that_the_config_does_not_know_is_refused(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "gptq")
    as_gptq(source, bias=0.5)
    with pytest.raises(TensorShapeError, match=r"q_proj\.bias"):
        load_model(source, device="cpu")


def test_a_gptq_model_is_not_converted(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "gptq")
    as_gptq(source)
    with pytest.raises(PreflightFailed, match="quantized already"):
        preflight(small_config(source, tmp_path / "out"), STAGES)


def of_zeros(stored_zero: int, **label: object) -> int:
    codes, zeros, scales = drawn(3)
    tensors = stored(codes, torch.full_like(zeros, stored_zero), scales)
    return zero_offset(KEY, tensors, GptqLabel.of(label))


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize(("stored_zero", "offset"), [(7, 1), (8, 0)])
@pytest.mark.parametrize("sym", [True, None])
def test_zeros_of_a_symmetric_matrix_show_how_they_are_stored(
    sym: bool | None, stored_zero: int, offset: int, stated: str | None
) -> None:
    assert of_zeros(stored_zero, sym=sym, checkpoint_format=stated) == offset


@pytest.mark.parametrize(("stated", "offset"), [("gptq", 1), ("gptq_v2", 0), (None, 1)])
@pytest.mark.parametrize(("stored_zero", "sym"), [(8, False), (6, False), (6, None)])
def test_other_zeros_are_stored_as_the_format_says(
    stored_zero: int, sym: bool | None, stated: str | None, offset: int
) -> None:
    assert of_zeros(stored_zero, sym=sym, checkpoint_format=stated) == offset


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"sym": True}, "`sym` is true in the config, but `q.qzeros` holds other zeros than 8"),
        ({"desc_act": True}, "`desc_act` is true in the config, but no `q.g_idx`"),
        ({"checkpoint_format": "marlin"}, "`checkpoint_format` of `q` is `marlin`"),
    ],
)
def test_labels_that_the_tensors_contradict_are_refused(
    label: dict[str, object], message: str
) -> None:
    with pytest.raises(SourceModelError, match=message):
        of_zeros(6, **label)


def test_the_label_is_found_wherever_it_stands(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model")
    (source / "quantize_config.json").write_text('{"bits": 4, "checkpoint_format": "gptq_v2"}')
    inner = {"quantization_config": {"sym": True}}

    assert resolve(source).gptq_label == GptqLabel(checkpoint_format="gptq_v2")
    assert declared_quantization(source, {}, inner) == {"sym": True}
