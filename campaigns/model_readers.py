"""Readers of weights, configs, quantized matrices, measurements, calibration text and adapters."""

import json
import os
import pickle
from pathlib import Path

import pandas as pd
import torch
from adapters import make_adapter
from measurements import written_in_nats
from mutations import changed_body, changed_bytes, changed_header, changed_tensors
from reader import JSON, Reader
from safetensors.torch import load_file, save
from tiny import FAMILY_CONFIGS, TEXT, make_tiny, tiny_config

from exl2flow.core.store.model_files import carried_files, public_content
from exl2flow.engine.adapters import Adapter
from exl2flow.inference import load_model
from exl2flow.inference.report.frames import measurement_frame
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.model import (
    CanonicalTensors,
    QuantizedLinear,
    QuantizedMatrix,
    QuantParams,
    TensorFiles,
    expected_tensors,
    resolve,
)
from exl2flow.model.files.gptq import GptqMatrix
from exl2flow.model.files.source_tensors import check_claimed, check_tensors, has_all_layers
from exl2flow.model.layers.linear import PackedLinear
from exl2flow.model.layers.rope import attention_factor, inverse_frequencies
from exl2flow.quant.measure.measurement import read_measurement
from exl2flow.quant.tokenize.parquet import records

K, N = 96, 32


class Headers(Reader):
    """Headers of a dense source, one tensor of it in fp8."""

    file = "model.safetensors"
    changes = (changed_header,)

    def prepare(self) -> list[bytes]:
        (self.folder / "config.json").write_text("{}")
        weight = torch.randn(4, 8)
        tensors = {
            "a.weight": weight,
            "b.weight": weight.half(),
            "c": weight.bfloat16()[0],
            "d.weight": weight.to(torch.float8_e4m3fn),
            "d.weight_scale": torch.ones(1),
        }
        return [save(tensors), save({"a.weight": weight})]

    def use(self) -> None:
        tensors = TensorFiles(self.folder)
        tensors.undecodable()
        for name in tensors.names:
            assert tensors.read(name).shape == tensors.shape(name)
            assert tensors.nbytes(name) >= 0


class Bodies(Reader):
    """Weights of a dense source: read, and one token generated from them."""

    file = "model.safetensors"
    changes = (changed_body,)

    def prepare(self) -> list[bytes]:
        make_tiny("llama", self.folder, num_hidden_layers=1, vocab_size=299)
        return [self.path.read_bytes()]

    def use(self) -> None:
        model = load_model(self.folder, device="cpu")
        with torch.inference_mode():
            assert model.decoder.forward(torch.tensor([[1, 2]])).shape[-1] == 299


class Experts(Reader):
    """Weights of a source with experts, a shared one among them: read, and run."""

    file = "model.safetensors"
    changes = (changed_tensors, changed_tensors, changed_header, changed_body)
    family = "qwen2-moe"

    def prepare(self) -> list[bytes]:
        make_tiny(self.family, self.folder, num_hidden_layers=2, vocab_size=299)
        return [self.path.read_bytes()]

    def use(self) -> None:
        spec = resolve(self.folder)
        has_all_layers(spec)
        check_tensors(spec, lossy=False)
        check_claimed(spec)
        model = load_model(self.folder, device="cpu")
        with torch.inference_mode():
            logits = model.decoder.forward(torch.arange(20)[None])
        assert logits.shape == (1, 20, 299)


class States(Experts):
    """Weights of a source with a layer that has a state."""

    family = "qwen3.5"


class Config(Reader):
    """`config.json` of several families, in both forms."""

    file = "config.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        ropes: list[dict[str, object]] = [
            {},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0},
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        ]
        configs = [
            tiny_config(family, rope=rope, config_form=form)
            for rope in ropes
            for family in FAMILY_CONFIGS
            for form in (4, 5)
            if family not in ("qwen3", "qwen3.5") or "short_factor" not in rope  # other heads
        ]
        wrapped = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": tiny_config("llama") | {"model_type": "gemma3_text", "head_dim": 16},
        }
        make_tiny("llama", self.folder)
        return [json.dumps(each).encode() for each in (*configs, wrapped)]

    def use(self) -> None:
        public_content(self.path)
        spec = resolve(self.folder)
        assert len(spec.sublayers) <= 2 * spec.num_layers
        expected_tensors(spec)
        for positions in (8, spec.max_positions):
            inverse_frequencies(spec.attending[0].rope, positions)
        attention_factor(spec.attending[0].rope)
        if spec.family.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
            return  # its tensors are not here
        has_all_layers(spec)
        check_tensors(spec, lossy=False)
        check_claimed(spec)


class Index(Reader):
    """The index of a source in two files."""

    file = "model.safetensors.index.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        make_tiny("llama", self.folder, shards=2, num_hidden_layers=1)
        parts = map(load_file, self.folder.glob("*.safetensors"))
        self.right = {name: tensor for part in parts for name, tensor in part.items()}
        return [self.path.read_bytes()]

    def use(self) -> None:
        spec = resolve(self.folder)
        tensors = CanonicalTensors(spec)
        assert {*expected_tensors(spec)} <= {*tensors.names} == {*self.right}
        assert all(torch.equal(tensors.read(name), self.right[name]) for name in self.right)
        assert all(path.parent == self.folder for path in carried_files(self.folder))


class Measurement(Reader):
    """`measurement.json` of matrices with their costs."""

    file = "measurement.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        self.spec = resolve(make_tiny("llama", self.folder, num_hidden_layers=1))
        return [self._short(written_in_nats(self.path, self.spec).read_bytes())]

    def _short(self, data: bytes) -> bytes:
        whole = json.loads(data)
        whole["measurement"] = {k: v[:2] for k, v in whole["measurement"].items()}
        return json.dumps(whole).encode()

    def use(self) -> None:
        read_measurement(self.path, self.spec)
        measurement_frame(self.path)


class PartMeasurement(Measurement):
    """`measurement.json` of sublayers, as exllamav2 writes it."""

    def prepare(self) -> list[bytes]:
        [whole] = [json.loads(data) for data in super().prepare()]
        single, parts = whole["measurement"], {}
        for part in (part for s in self.spec.sublayers for part in s.parts):
            parts[part.name] = [
                {
                    "accuracy": 0.9,
                    "total_bits": sum(single[p.key][i]["total_bits"] for p in part.projections),
                    **{p.name: single[p.key][i][p.name] for p in part.projections},
                }
                for i in range(2)
            ]
        return [json.dumps({"measurement": parts, "last_module_idx": 4}).encode()]


class Parquet(Reader):
    """A user's calibration text, with a column of text and one of numbers, or a dictionary."""

    file = "rows.parquet"

    def prepare(self) -> list[bytes]:
        frame = pd.DataFrame({"text": [*TEXT, None, " "], "n": range(5)})
        coded = frame.astype({"text": "category"})
        return [
            frame.to_parquet(compression=compression) for compression in (None, "snappy", "gzip")
        ] + [coded.to_parquet()]

    def use(self) -> None:
        assert all(isinstance(text, str) for row in records(self.path, None) for text in row)


class Exl2(Reader):
    """A quantized matrix: read, inspected, decoded and multiplied."""

    file = "model.safetensors"
    changes = (changed_tensors, changed_tensors, changed_tensors, changed_header, changed_body)

    def prepare(self) -> list[bytes]:
        found = []
        for bits in (5, 3), (8, 2):
            codes, scales = torch.randint(0, 4, (K, N)), torch.randint(0, 16, (3, N))
            params = {"bit_widths": bits, "proportions": (0.3, 0.7), "group_sizes": (32, 32)}
            matrix = QuantizedMatrix.encode(
                codes=codes.to(torch.uint8),
                groups=QuantParams(**params).groups(K),
                scale_codes=scales.to(torch.uint8),
                max_scales=torch.rand(3).half(),
                perm=torch.randperm(K),
                bias=torch.randn(N),
            )
            found.append(save(matrix.to_tensors("model.layers.0.mlp.q")))
        return found

    def matrix(self, tensors: dict[str, torch.Tensor]) -> QuantizedMatrix | GptqMatrix:
        inspect_model(self.folder)
        return QuantizedMatrix.from_tensors("model.layers.0.mlp.q", tensors)

    def use(self) -> None:
        files = TensorFiles(self.folder)
        matrix = self.matrix({name: files.read(name) for name in files.names})
        decoded = QuantizedLinear(matrix, out_features=N - 1, dtype=torch.float32, device="cpu")
        packed = PackedLinear(matrix, out_features=N - 1, orders={})
        for linear in (decoded, packed):
            assert linear(torch.ones(1, matrix.shape[0])).dim() == 2


class Gptq(Exl2):
    """The same for a GPTQ matrix."""

    def prepare(self) -> list[bytes]:
        words = torch.randint(-(2**31), 2**31 - 1, (K // 8, N))
        tensors = {
            "q.qweight": words.to(torch.int32),
            "q.qzeros": torch.randint(0, 2**31 - 1, (3, N // 8)).to(torch.int32),
            "q.scales": torch.rand(3, N).half(),
            "q.g_idx": (torch.arange(K) // 32)[torch.randperm(K)].to(torch.int32),
            "q.bias": torch.randn(N),
        }
        return [save(tensors)]

    def matrix(self, tensors: dict[str, torch.Tensor]) -> GptqMatrix:
        return GptqMatrix.from_tensors("q", tensors, zero_offset=1)


class LoraConfig(Reader):
    """`adapter_config.json` of a LoRA adapter."""

    file = "adapter/adapter_config.json"
    changes = JSON

    def prepare(self) -> list[bytes]:
        source = make_tiny("llama", self.folder, num_hidden_layers=1)
        self.model = load_model(source, device="cpu")
        make_adapter(self.path.parent, source, rank=2)
        return [self.path.read_bytes()]

    def use(self) -> None:
        Adapter.load(self.path.parent, self.model)


class Lora(LoraConfig):
    """Its weights."""

    file = "adapter/adapter_model.safetensors"
    changes = (changed_tensors, changed_tensors, changed_header, changed_body)


class Touch:
    """What a pickle runs, if anything does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


class LoraPickle(LoraConfig):
    """The same as pickles, which must not run code."""

    file = "adapter/adapter_model.bin"
    changes = (changed_bytes,)

    def prepare(self) -> list[bytes]:
        weights = self.path.with_name("adapter_model.safetensors")
        source = make_tiny("llama", self.folder, num_hidden_layers=1)
        self.model = load_model(source, device="cpu")
        make_adapter(self.path.parent, source, rank=2)
        tensors = load_file(weights)
        weights.unlink()
        torch.save(tensors, self.path)
        found = [self.path.read_bytes()]
        torch.save(tensors, self.path, _use_new_zipfile_serialization=False)
        found.append(self.path.read_bytes())
        bad = Touch(self.folder / "ran")
        self.hostile = [pickle.dumps(bad), pickle.dumps({"a": bad}, protocol=0)]
        return found

    def use(self) -> None:
        try:
            super().use()
        finally:
            assert not (self.folder / "ran").exists(), "a pickle ran code"
