"""Models loaded by several threads directly to the GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.inference import load_model
from exl2flow.kernels import get_ops
from exl2flow.model import QuantizedMatrix, TensorFiles
from exl2flow.model.files import weights
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.model.layers.linear import PackedLinear, moved

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
IDS = torch.arange(40)[None]


@pytest.fixture
def folder(qwen2: ConversionConfig) -> Path:
    return qwen2.out


@pytest.mark.parametrize("piece", [32, 1 << 20])
def test_a_tensor_is_read_to_the_device(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {
        "matrix": torch.randint(-(2**31), 2**31, (501, 7)).to(torch.int32),
        "halves": torch.randn(3, 5).half(),
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
    }
    save_file(stored, tmp_path / "a.safetensors")
    monkeypatch.setattr(weights, "PIECE_BYTES", piece)
    files = TensorFiles(tmp_path)

    for name, tensor in stored.items():
        found = files.read(name, DEVICE)
        assert found.is_cuda
        assert torch.equal(found.cpu(), tensor)


def test_a_tensor_that_was_fetched_is_sent(tmp_path: Path) -> None:
    stored = torch.randn(100, 30)
    save_file({"x": stored}, tmp_path / "a.safetensors")
    files = TensorFiles(tmp_path)
    files.fetch(["x"])

    assert torch.equal(files.read("x", DEVICE).cpu(), stored)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_a_large_tensor_of_main_memory_is_moved(dtype: torch.dtype) -> None:
    tensor = torch.randn(5000, 4099).to(dtype)

    found = moved(tensor, DEVICE, torch.float16)

    assert torch.equal(found.cpu(), tensor.half())


def test_matrices_lie_on_the_device_as_the_cpu_lays_them_out(folder: Path) -> None:
    model, files = load_model(folder, device=DEVICE), TensorFiles(folder)
    linears = {
        projection.key: sublayer.linears[projection.name]
        for sublayer in model.decoder.sublayers
        for projection in sublayer.spec.projections
    }

    for key, linear in {**linears, model.spec.head.key: model.decoder.head.linear}.items():
        stored = QuantizedMatrix.from_tensors(
            key, {name: files.read(name) for name in tensor_names(key)}
        )
        expected = stored.laid_out(stored.order)
        assert isinstance(linear, PackedLinear)
        assert torch.equal(linear.matrix.words.cpu(), expected.words)
        assert torch.equal(linear.matrix.order.cpu(), expected.order)
    for sublayer in model.decoder.sublayers:
        first, second, *_ = (linear.matrix.order for linear in sublayer.linears.values())
        assert first is second  # q and k, gate and up


def test_progress_is_told_in_order(folder: Path) -> None:
    told: list[tuple[int, int]] = []

    load_model(folder, device=DEVICE, progress=lambda done, total: told.append((done, total)))

    assert told == [(done, 6) for done in range(1, 7)]


def test_loading_does_not_wait_for_the_device(
    folder: Path, without_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    load_model(folder, device=DEVICE)  # tables are sent once

    with without_waiting():
        load_model(folder, device=DEVICE)


@torch.inference_mode()
def test_a_model_is_loaded_on_the_caller_s_stream(folder: Path) -> None:
    expected = load_model(folder, device=DEVICE).decoder.forward(IDS.to(DEVICE))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the loaded tensors are ready only afterwards
        found = load_model(folder, device=DEVICE).decoder.forward(IDS.to(DEVICE))

    stream.synchronize()
    assert torch.equal(found, expected)


def test_a_plain_model_is_loaded(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", dtype=torch.bfloat16)

    on_card, on_cpu = (load_model(source, device=device).decoder for device in (DEVICE, "cpu"))

    for there, here in zip(on_card.sublayers, on_cpu.sublayers, strict=True):
        for name, linear in there.linears.items():
            assert torch.equal(linear.weight.cpu(), here.linears[name].weight.half())
    assert torch.equal(on_card.embedding.weight.cpu(), on_cpu.embedding.weight.half())


def test_a_kernel_that_is_being_built_is_launched_once_it_is_there(folder: Path) -> None:
    get_ops(DEVICE).prepare()

    model = load_model(folder, device=DEVICE)

    with torch.inference_mode():
        assert model.decoder.forward(IDS[:, :1].to(DEVICE)).isfinite().all()
