"""A tiny model behind exllamav2's names, and what transformers generates with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import make_tiny
from transformers import AutoModelForCausalLM

from exl2flow.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)

Expected = Callable[[torch.Tensor, int], torch.Tensor]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("m") / "tiny", max_position_embeddings=1024)


@pytest.fixture(scope="session")
def config(folder: Path) -> ExLlamaV2Config:
    return ExLlamaV2Config(str(folder))


@pytest.fixture(scope="session")
def tokenizer(config: ExLlamaV2Config) -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(config)


@pytest.fixture(scope="session")
def model(config: ExLlamaV2Config) -> ExLlamaV2:
    model = ExLlamaV2(config)
    model.load_autosplit(ExLlamaV2Cache_Q4(model, lazy=True))
    return model


@pytest.fixture
def cache(model: ExLlamaV2) -> ExLlamaV2Cache:
    return ExLlamaV2Cache(model, max_seq_len=4096, lazy=True)


@pytest.fixture(scope="session")
def expected(folder: Path) -> Expected:
    """Return what transformers continues ids (1, n) with, greedily."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def continuation(ids: torch.Tensor, count: int) -> torch.Tensor:
        made = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=[299, 300],
        )
        return made[:, ids.shape[1] :]

    return continuation
