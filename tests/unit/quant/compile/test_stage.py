"""The output folder: every byte predicted, carried or compared."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from measurements import written_in_nats
from resumed import before
from safetensors.torch import load_file, save_file
from stage_runs import prepared, run_until
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import NonFiniteState, ReconstructionMismatch, StoreError
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import digest, read_json
from exl2flow.core.store.model_files import carried_files
from exl2flow.core.store.stage import Pipeline
from exl2flow.inference.scoring.evaluate import evaluate
from exl2flow.model import QuantizedMatrix, resolve
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.allocate.layout import output_layout, plain_tensors, plan_shards
from exl2flow.quant.compile import stage as compile_module
from exl2flow.quant.compile.stage import RECORD_FILE
from exl2flow.quant.quantize.matrix_work import read_report, result_files
from exl2flow.quant.quantize.stored_form import reconstruction_digest

Q_PROJ = "model.layers.0.self_attn.q_proj"
LARGE_VOCABULARY = 9000  # an embedding of 1.1 MiB, so that shards of 1 MiB are several


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("qwen2", tmp_path / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A conversion up to what `compile` reads."""
    source = tmp_path_factory.mktemp("quantized") / "model"
    return run_until(prepared(make_tiny("qwen2", source, num_hidden_layers=1)), "quantize")


def written_tensors(out: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def test_shards_are_predicted_and_indexed_and_replaced(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model", vocab_size=LARGE_VOCABULARY, shards=3)
    config = prepared(source, shard_size_mb=1)
    choice = read_choice(run_until(config, "compile").path("allocate"))

    planned = plan_shards(output_layout(resolve(source), choice), 1)

    files = list(config.out.glob("*.safetensors"))
    assert len(files) > 1
    assert {s.name: s.bytes for s in planned} == {p.name: p.stat().st_size for p in files}
    index = read_json(config.out / "model.safetensors.index.json")
    sizes = 0
    for path in files:
        for name, tensor in load_file(path).items():
            assert index["weight_map"].pop(name) == path.name
            sizes += tensor.nbytes
    assert index["weight_map"] == {}
    assert index["metadata"]["total_size"] == sizes

    run_until(config.model_copy(update={"shard_size_mb": 0}), "compile")

    assert [path.name for path in config.out.glob("*.safetensors")] == ["model.safetensors"]
    assert not list(config.out.glob("*.index.json"))


def test_one_file_is_written_without_an_index(converted: Any) -> None:
    out = converted.config.out
    choice = read_choice(converted.path("allocate"))

    (shard,) = plan_shards(output_layout(converted.spec, choice), 8192)

    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert shard.bytes == (out / "model.safetensors").stat().st_size
    assert not list(out.glob("*.index.json"))


def test_output_holds_exactly_the_tensors_of_the_format(converted: Any) -> None:
    keys = [p.key for s in converted.spec.sublayers for p in s.projections] + ["lm_head"]
    quantized = {name for key in keys for name in tensor_names(key)}

    tensors = written_tensors(converted.config.out)

    norms = {
        f"model.layers.{i}.{n}_layernorm.weight"
        for i in (0, 1)
        for n in ("input", "post_attention")
    }
    assert set(tensors) == quantized | norms | {"model.embed_tokens.weight", "model.norm.weight"}
    assert not any(name.endswith("q_perm") for name in tensors)


def test_embedding_and_norms_are_the_source_in_fp16(converted: Any) -> None:
    tensors = written_tensors(converted.config.out)
    source = load_file(converted.config.source / "model.safetensors")

    for name in plain_tensors(converted.spec):
        assert tensors[name].dtype == torch.float16
        assert torch.equal(tensors[name], source[name].half())


def test_quantized_tensors_are_those_of_the_quantize_stage(converted: Any) -> None:
    tensors = written_tensors(converted.config.out)

    for name in result_files(converted.spec):
        report = read_report(converted.path("quantize") / name)
        digests = {item.name: item.sha256 for item in report.matrices}
        stage = load_file(converted.path("quantize") / name)
        for key, tensor in stage.items():
            assert torch.equal(tensors[key], tensor)
        keys = {key.rpartition(".")[0] for key in stage}
        for key in keys:
            matrix = QuantizedMatrix.from_tensors(key, tensors)
            assert reconstruction_digest(matrix.dequantize()) == digests[key.rpartition(".")[2]]


def test_bits_in_the_files_are_those_allotted(converted: Any) -> None:
    allocation = read_json(converted.path("allocate") / ALLOCATION_FILE)
    tensors = written_tensors(converted.config.out)

    bits = 0
    for sublayer in converted.spec.sublayers:
        for p in sublayer.projections:
            bits += 8 * sum(t.nbytes for name, t in tensors.items() if name.startswith(f"{p.key}."))

    assert bits == allocation["used_bits"]
    assert bits / allocation["numel"] == allocation["bpw"] <= 4.0


def test_config_gets_the_block_and_keeps_the_rest(converted: Any) -> None:
    before = read_json(converted.config.source / "config.json")

    after = read_json(converted.config.out / "config.json")

    block = after.pop("quantization_config")
    assert after == before
    assert block == {
        "quant_method": "exl2",
        "version": "0.1.0",
        "bits": 4.0,
        "head_bits": 6,
        "calibration": {"rows": 5, "length": 96, "dataset": "text.parquet"},
    }
    assert (converted.config.out / "config.json").read_text().startswith('{\n    "')


def test_standard_calibration_is_named_default(source: Path, tmp_path: Path) -> None:
    config = prepared(source)
    standard = config.model_copy(
        update={
            "out": tmp_path / "second",
            "calibration": config.calibration.model_copy(update={"text": "standard"}),
        }
    )

    run_until(standard, "compile")

    block = read_json(standard.out / "config.json")["quantization_config"]
    assert block["calibration"]["dataset"] == "(default)"


def test_files_of_the_model_go_along_and_no_others(source: Path) -> None:
    for name in ("generation_config.json", "README.md", "chat_template.jinja", "tokenizer.model"):
        (source / name).write_text(json.dumps({"content": name}))
    for name in ("pytorch_model.bin", "model.safetensors.index.json", ".hidden", "old.pth"):
        (source / name).write_text("not to be carried")
    for name in ("wandb-key.txt", "train_private.csv", "tf_model.h5", "trainer_state.json"):
        (source / name).write_text("not to be carried")
    (source / RECORD_FILE).write_text("{}")
    (source / "onnx").mkdir()
    (source / "onnx" / "file.json").write_text("{}")
    config = prepared(source)

    run_until(config, "compile")

    assert sorted(path.name for path in config.out.iterdir()) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        RECORD_FILE,
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]
    assert read_json(config.out / RECORD_FILE)["source"] == str(source)
    for path in carried_files(source):
        assert (config.out / path.name).read_bytes() == path.read_bytes()


def test_record_tells_source_options_and_errors(converted: Any) -> None:
    record = read_json(converted.config.out / RECORD_FILE)

    assert record["source"] == str(converted.config.source.resolve())
    assert record["options"]["bpw"] == 4.0
    places = {"device", "gpu_split", "reserve", "devices", "max_memory"}
    assert not {"validate_options", *places} & record["options"].keys()
    assert record["allocation"]["used_bits"] > 0
    assert [layer["name"] for layer in record["layers"]] == [
        *(sublayer.name for sublayer in converted.spec.sublayers),
        "lm_head",
    ]
    json.dumps(record, allow_nan=False)  # raises for what is not JSON


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (f"{Q_PROJ}.q_weight", Q_PROJ),
        (f"{Q_PROJ}.q_scale", Q_PROJ),
        (f"{Q_PROJ}.q_scale_max", Q_PROJ),
        (f"{Q_PROJ}.q_invperm", Q_PROJ),
        (f"{Q_PROJ}.bias", f"{Q_PROJ}.bias"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.q_weight", "lm_head"),
    ],
)
def test_reading_back_detects_a_flipped_bit(
    tensor: str, named: str, quantized: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(run: Any, spec: Any) -> dict[str, object]:
        path = run.config.out / "model.safetensors"
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        begin = 8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]
        data[begin] ^= 1
        path.write_bytes(data)
        return of_config(run, spec)

    of_config = compile_module._config
    monkeypatch.setattr(compile_module, "_config", flip)

    pipeline = before(quantized, "compile", tmp_path / "work", out=tmp_path / "out")

    with pytest.raises(ReconstructionMismatch, match=rf"`{named}` in "):
        pipeline.run("compile", progress=silent)


def test_same_options_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    first = prepared(source, bpw=5.0)
    second = first.model_copy(update={"work_root": tmp_path / "work", "out": tmp_path / "again"})

    for config in (first, second):
        run_until(config, "compile")

    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert [digest(first.out / n) for n in names] == [digest(second.out / n) for n in names]


def test_foreign_folder_is_refused_and_left_alone(quantized: Pipeline, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("mine")
    pipeline = before(quantized, "compile", tmp_path / "work", out=out)

    with pytest.raises(StoreError, match="was not made from this source by exl2flow"):
        pipeline.run("compile", progress=silent)

    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_text() == "mine"


def test_value_beyond_fp16_is_refused_by_name(source: Path) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, path)

    with pytest.raises(NonFiniteState, match=r"`model\.norm\.weight` does not fit fp16"):
        run_until(prepared(source), "compile")


def test_a_chosen_head_is_told(source: Path) -> None:
    measurement = written_in_nats(source.parent / "nats.json", resolve(source))
    config = prepared(source, measurement=measurement, target_bytes=95_000)

    choice = read_choice(run_until(config, "compile").path("allocate"))

    block = read_json(config.out / "config.json")["quantization_config"]
    assert block["head_bits"] == min(choice["lm_head"].bit_widths)
    assert (config.out / "model.safetensors").stat().st_size <= 95_000


def test_tuned_tensors_replace_the_quantized_ones(source: Path) -> None:
    tune = {"steps": 2, "tokens": 32, "interval": 1, "held_out_rows": 1}
    config = prepared(source, tune=tune)

    pipeline = run_until(config, "compile")

    tuned: dict[str, torch.Tensor] = {}
    for path in sorted((pipeline.path("tune") / "sublayers").glob("*.safetensors")):
        tuned |= load_file(path)
    tensors = written_tensors(config.out)
    assert set(plain_tensors(resolve(source))) | {"lm_head.q_weight"} <= set(tuned)
    assert set(tensors) == set(tuned)
    assert [name for name in tensors if not torch.equal(tensors[name], tuned[name])] == []
    quantized = load_file(pipeline.path("quantize") / "sublayers" / "head.safetensors")
    assert not torch.equal(tensors["lm_head.q_scale_max"], quantized["lm_head.q_scale_max"])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": torch.float16}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"dtype": torch.bfloat16, "shards": 2}),
        ("qwen2", {"head_dim": 24, "config_form": 4}),
        ("qwen3", {"dtype": torch.bfloat16, "tie_word_embeddings": True}),
    ],
)
def test_family_converts_reloads_and_matches_its_source(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = make_tiny(family, tmp_path / "model", num_hidden_layers=1, **options)
    config = prepared(source, bpw=8.0, head_bits=8)

    run_until(config, "compile")

    spec = resolve(config.out)
    assert resolve(source).family == spec.family
    tensors = written_tensors(config.out)
    assert "lm_head.q_weight" in tensors
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    tied = read_json(config.out / "config.json")["tie_word_embeddings"]
    assert tied == options.get("tie_word_embeddings", False)
    assert spec.quant_method == "exl2"
    rows = torch.randint(VOCAB_SIZE, (2, 48))
    (score,) = evaluate([config.out], rows, reference=source)
    assert score.kl_divergence is not None
    # eight bits: relative errors of about 0.005 in logits of size 1 to 4
    assert 0 < score.kl_divergence < 5e-4
    losses = [math.log(value or 0) for value in (score.perplexity, score.reference_perplexity)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
