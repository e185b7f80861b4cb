"""LoRA in all faces: on, off, stacked; equal to weights merged by hand."""

from pathlib import Path

import pytest
from adapters import make_adapter, merged

from exl2flow.compat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora
from exl2flow.compat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl2flow.core.errors import ConfigError

GREEDY = ExLlamaV2Sampler.Settings.greedy()
PROMPT = "The quick brown"


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("a") / "lora", folder)


@pytest.fixture(scope="module")
def expected(folder: Path, adapter: Path, tokenizer) -> str:
    model = ExLlamaV2(ExLlamaV2Config(str(merged(adapter.parent / "merged", folder, adapter))))
    model.load()
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    return generator.generate(PROMPT, 16, gen_settings=GREEDY)


def test_a_lora_is_switched_on_and_off(model, cache, tokenizer, adapter, expected) -> None:
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    lora = ExLlamaV2Lora.from_directory(model, str(adapter))
    plain = generator.generate(PROMPT, 16, gen_settings=GREEDY)

    generator.set_loras(lora)
    changed = generator.generate(PROMPT, 16, gen_settings=GREEDY)
    generator.set_loras([lora, ExLlamaV2Lora.from_directory(model, str(adapter), 0.5)])
    stacked = generator.generate(PROMPT, 16, gen_settings=GREEDY)
    generator.set_loras(None)

    assert changed == expected != plain
    assert stacked not in (changed, plain)
    assert generator.generate(PROMPT, 16, gen_settings=GREEDY) == plain


def test_older_faces_take_loras_per_call(model, tokenizer, adapter, expected) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    lora = ExLlamaV2Lora.from_directory(model, str(adapter))
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    streaming = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    streaming.set_stop_conditions([])

    text = base.generate_simple(PROMPT, GREEDY, 16, loras=lora, stop_token=None)
    streaming.begin_stream(tokenizer.encode(PROMPT), GREEDY, loras=[lora])
    chunks = "".join(streaming.stream()[0] for _ in range(12))

    assert text == expected
    assert chunks
    assert expected.startswith(PROMPT + chunks)


def test_what_cannot_work_is_refused(model, cache, tokenizer, adapter, tmp_path) -> None:
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    lora = ExLlamaV2Lora.from_directory(model, str(adapter))
    job = ExLlamaV2DynamicJob(tokenizer.encode(PROMPT), 4)
    generator.enqueue(job)
    with pytest.raises(ConfigError, match="1 jobs"):
        generator.set_loras(lora)
    generator.clear_queue()

    lora.unload()
    generator.set_loras(lora)
    with pytest.raises(ConfigError, match="takes adapters"):
        generator.generate(PROMPT, 4)
    with pytest.raises(ConfigError, match="one folder"):
        ExLlamaV2Lora(model, str(adapter / "adapter_config.json"), str(tmp_path / "a.safetensors"))
