"""Embeddings in host memory, whose rows a GPU reads: texts are the same, and memory is less."""

import logging
from pathlib import Path

import pytest
import torch
from gpu_texts import run
from texts import ids_of
from tiny import make_tiny

from exl2flow.core.errors import BackendUnavailable
from exl2flow.core.requests.request import FIRST_EMBEDDING
from exl2flow.inference import NgramDraft, Request, SamplingSettings, load_model
from exl2flow.kernels import get_ops, read_in_place
from exl2flow.model.memory import host_embedding

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    return make_tiny("llama", where, head_dim=64, tie_word_embeddings=False)


@pytest.mark.parametrize("draft", [None, NgramDraft(tokens=3)], ids=str)
@pytest.mark.parametrize("launched", [False, True])
def test_texts_are_the_same(folder: Path, draft: NgramDraft | None, *, launched: bool) -> None:
    host, device = (load_model(folder, device="cuda", embedding=x) for x in ("cpu", "gpu"))
    rows = torch.randn(3, host.spec.hidden_size)
    requests = [
        Request([5, 6, 7, 5, 6], stops=(), max_new_tokens=40, settings=SamplingSettings.greedy()),
        Request([*range(3, 203)], stops=(), max_new_tokens=30, seed=3),
        Request(
            [4, *range(FIRST_EMBEDDING, FIRST_EMBEDDING + 3), 5],
            embeddings=(rows,),
            stops=(),
            max_new_tokens=20,
            seed=4,
        ),
    ]

    found, expected = (run(model, draft, requests, launched=launched) for model in (host, device))

    assert [*map(ids_of, found)] == [*map(ids_of, expected)]
    assert torch.equal(host.decoder.embedding.weight, device.decoder.embedding.weight)


def test_it_takes_no_memory_of_the_gpu_and_is_given_back() -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    host = torch.randn(4096, 512).half()

    rows = read_in_place(host, DEVICE)

    assert torch.cuda.memory_allocated(DEVICE) - before < host.nbytes
    assert rows.device == DEVICE
    assert rows.data_ptr() == host.data_ptr()
    ids = torch.randint(0, 4096, (2, 7), device=DEVICE)
    assert torch.equal(get_ops(DEVICE).embed(ids, rows).cpu(), host[ids.cpu()])
    torch.cuda.synchronize(DEVICE)
    del rows
    assert read_in_place(host, DEVICE).shape == host.shape  # it could be pinned again


def test_what_cannot_be_pinned_is_refused_or_takes_memory_of_the_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = torch.zeros(1024)
    rows = read_in_place(host, DEVICE)

    with pytest.raises(BackendUnavailable, match=r"4\.10 kB of host memory cannot be pinned"):
        read_in_place(host, DEVICE)
    assert int((rows + 1).sum()) == 1024  # CUDA goes on

    def refuse(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise BackendUnavailable("no memory to pin")

    monkeypatch.setattr("exl2flow.model.layers.decoder.read_in_place", refuse)
    monkeypatch.setattr(host_embedding, "HOST_FROM", 1)
    with caplog.at_level(logging.WARNING):
        assert load_model(folder, device="cuda").decoder.embedding.weight.is_cuda
    assert "the embedding takes memory of the GPU: no memory to pin" in caplog.text
    with pytest.raises(BackendUnavailable, match="no memory to pin"):
        load_model(folder, device="cuda", embedding="cpu")
