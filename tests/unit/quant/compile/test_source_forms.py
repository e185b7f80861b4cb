"""A conversion of fp8 or GPTQ gives the bytes of a conversion of what it decodes to."""

from pathlib import Path

import tokenizers
import torch
from conversions import small_config
from fp8_models import make_fp8
from gptq_models import as_gptq
from safetensors.torch import load_file
from stage_runs import calibrated_on, run_until, text_parquet
from tekken_files import write
from tiny import TEXT, make_tiny

from exl2flow.core.store.files import digest, read_json
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.model import Tokenizer


def converted(source: Path, **values: object) -> Path:
    """Convert a source of which all else is in one folder; return the output."""
    calibration = calibrated_on(text_parquet(source.parent / "text.parquet"), (2, 64), (1, 64))
    out = source.parent / f"{source.name}-out"
    run_until(small_config(source, out, calibration=calibration, **values), "compile")
    return out


def form_of(out: Path) -> object:
    return read_json(out / RECORD_FILE)["source_form"]


def test_fp8_and_its_twin_convert_to_the_same_bytes(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "blocks, bf16", family="qwen2", num_hidden_layers=1)

    found, expected = converted(source), converted(tmp_path / "plain")

    assert digest(found / "model.safetensors") == digest(expected / "model.safetensors")
    assert digest(found / "config.json") == digest(expected / "config.json")
    assert (form_of(found), form_of(expected)) == ("fp8", "floats")


def test_gptq_and_its_twin_convert_and_tune_to_the_same_bytes(tmp_path: Path) -> None:
    tune = {"steps": 2, "tokens": 32}
    source = make_tiny("llama", tmp_path / "gptq", num_hidden_layers=1)
    as_gptq(source, bias=0.0)

    found = converted(source, lossy_source=True, tune=tune)
    expected = converted(tmp_path / "plain", tune=tune)

    tensors = load_file(found / "model.safetensors")
    for name, tensor in load_file(expected / "model.safetensors").items():
        assert torch.equal(tensors.pop(name), tensor), name
    assert not tensors
    assert form_of(found) == "gptq"


def test_tekken_alone_becomes_a_tokenizer_that_other_programs_read(tmp_path: Path) -> None:
    source = make_tiny("mistral", tmp_path / "model", vocab_size=400, num_hidden_layers=1)
    (source / "tokenizer.json").unlink()
    expected = Tokenizer.load(write(source)).encode(TEXT[2])

    out = converted(source)

    assert (out / "tekken.json").is_file()
    backend = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert backend.encode(TEXT[2], add_special_tokens=False).ids == expected
