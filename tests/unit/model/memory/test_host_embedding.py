"""Which embeddings stay in host memory."""

from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.model import CanonicalTensors, resolve
from exl2flow.model.memory import host_embedding
from exl2flow.model.memory.host_embedding import host_bytes

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def stays(folder: Path, wanted: str, device: torch.device = GPU) -> int:
    spec = resolve(folder)
    return host_bytes(spec, CanonicalTensors(spec).names, wanted=wanted, device=device)


def test_large_ones_stay_and_others_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path, tie_word_embeddings=False)
    spec = resolve(folder)
    nbytes = 2 * spec.vocab_size * spec.hidden_size

    assert [stays(folder, wanted) for wanted in ("auto", "cpu", "gpu")] == [0, nbytes, 0]
    monkeypatch.setattr(host_embedding, "HOST_FROM", nbytes - 1)
    assert [stays(folder, wanted) for wanted in ("auto", "cpu", "gpu")] == [nbytes, nbytes, 0]
    assert [stays(folder, wanted, CPU) for wanted in ("auto", "cpu")] == [0, 0]
    with pytest.raises(ConfigError, match="runs on a CPU; leave it out"):
        stays(folder, "gpu", CPU)


def test_one_that_is_the_head_is_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_embedding, "HOST_FROM", 1)
    tied = make_tiny("llama", tmp_path, tie_word_embeddings=True)

    assert stays(tied, "auto") == 0
    with pytest.raises(ConfigError, match="is its head, too, which the GPU reads for each token"):
        stays(tied, "cpu")
