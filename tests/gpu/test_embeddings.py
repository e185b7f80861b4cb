"""Embeddings in prompts that a GPU reads."""

import pytest
import torch
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import FIRST_EMBEDDING
from exl2flow.inference import Generator, LoadedModel, Request, SamplingSettings, load_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny("llama", tmp_path_factory.mktemp("model"), head_dim=64)
    return load_model(folder, device="cuda", max_tokens=1024)


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_the_models_own_rows_are_as_good_as_their_tokens(model: LoadedModel, where: str) -> None:
    ids = torch.randint(3, VOCAB_SIZE, (600,)).tolist()
    rows = model.decoder.embedding.weight[ids[:500]].to(where, torch.float32)
    options = {"settings": SamplingSettings.greedy(), "max_new_tokens": 20, "stops": ()}
    given = range(FIRST_EMBEDDING, FIRST_EMBEDDING + 500)

    def made(request: Request) -> list[int]:
        generator = Generator(model, tokens=1024, slots=1, chunk=256)
        return [i for event in generator.stream(request) for i in event.ids]

    expected = made(Request(ids, **options))
    assert made(Request([*given, *ids[500:]], embeddings=(rows,), **options)) == expected


def test_values_beyond_fp16_are_refused(model: LoadedModel) -> None:
    rows = torch.full((1, 64), 1e5)

    with pytest.raises(ConfigError, match=r"not finite in torch\.float16"):
        Generator(model, tokens=256, slots=1).submit(
            Request([FIRST_EMBEDDING, 5], embeddings=(rows,))
        )
