"""A sample of a model that is split among GPUs."""

from pathlib import Path

import pytest
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.loading.layer_split import Split
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.inference.scoring import sample
from exl2flow.inference.validate.stage import generate_sample


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("sample") / "tiny", num_hidden_layers=1)


def test_a_split_model_is_loaded_as_a_whole(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def load(folder: Path, *, placement: Split, streamed: bool, device: str) -> LoadedModel:
        given.append((placement, streamed))
        return load_model(folder, device=device)

    monkeypatch.setattr(sample, "load_model", load)
    config = small_config(source, source.parent / "out", reserve="5,6")

    split = generate_sample(source, config.validate_options, "cpu", config)
    whole = generate_sample(source, config.validate_options, "cpu")

    assert split == whole
    tokens = sample.PROMPT_TOKENS + config.validate_options.sample_tokens
    assert given == [(Split(reserve=(5, 6), tokens=tokens, slots=1), False), (None, False)]


def test_a_sample_is_not_split_on_a_cpu(source: Path) -> None:
    config = small_config(source, source.parent / "out", gpu_split="20,24")

    with pytest.raises(ConfigError, match="among GPUs, and the device is `cpu`; leave out"):
        generate_sample(source, config.validate_options, "cpu", config)
