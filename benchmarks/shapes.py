"""Models in the shape of published ones, whose weights are random.

`NAME-as-llama` is a Llama with the matrices of NAME.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from exl2flow.core.store.files import write_tensors
from exl2flow.model import ModelSpec, ProjectionSpec, expected_tensors, resolve

TOKENIZER = Path(__file__).parent.parent / "demo" / "model"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
LLAMAS = {
    "tiny": (128, 352, 2, 4, 2, 32, 4096),
    "small": (512, 1408, 2, 8, 4, 64, 4096),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128, 128256),
    "7b": (4096, 11008, 32, 32, 32, 128, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "13b": (5120, 13824, 40, 40, 40, 128, 32000),
    "14b": (5120, 13824, 48, 40, 8, 128, 152064),
    "24b": (5120, 32768, 40, 32, 8, 128, 131072),
    "32b": (5120, 27648, 64, 40, 8, 128, 152064),
    "70b": (8192, 28672, 80, 64, 8, 128, 32000),
    "head": (8192, 1024, 2, 64, 8, 128, 152064),
}
OTHERS = {
    "gemma3-12b": (3840, 15360, 48, 16, 8, 256, 262208),
    "glm4-9b": (4096, 13696, 40, 32, 2, 128, 151552),
    "command-r7b": (4096, 14336, 32, 32, 8, 128, 256000),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, 128, 151936),
    "gpt-oss-20b": (2880, 2880, 24, 64, 8, 64, 201088),
    "qwen3.6-27b": (5120, 17408, 64, 24, 4, 256, 248320),
    "qwen3.6-35b-a3b": (2048, 512, 40, 16, 2, 256, 248320),
    "mixtral-8x7b": (4096, 14336, 32, 32, 8, 128, 32000),
}
CONFIGS: dict[str, dict[str, object]] = {
    "gemma3-12b": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 1024,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "glm4-9b": {
        "architectures": ["Glm4ForCausalLM"],
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "command-r7b": {
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "logit_scale": 0.25,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
    },
    "qwen3.6-27b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_num_value_heads": 48,
        "partial_rotary_factor": 0.25,
    },
    "qwen3.6-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "partial_rotary_factor": 0.25,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
SHAPES = [*LLAMAS, *(name + end for name in OTHERS for end in ("", "-as-llama"))]
SHARD_BYTES = 5_000_000_000


def write_config(folder: Path, shape: str, layers: int | None = None) -> ModelSpec:
    """Write the files of a model folder other than its weights; layers: None: as many as it has."""
    name = shape.removesuffix("-as-llama")
    sizes = dict(zip(SIZES, (LLAMAS | OTHERS)[name], strict=True))
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    base = json.loads((TOKENIZER / "config.json").read_bytes())
    kept = {"attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "torch_dtype"}
    other = CONFIGS.get(shape)
    config = base if other is None else {key: base[key] for key in kept} | other
    config |= sizes | {"tie_word_embeddings": False, "max_position_embeddings": 65536}
    folder.mkdir()
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return resolve(folder)


def linears(spec: ModelSpec) -> list[ProjectionSpec]:
    """Return all linears, the head last."""
    return [*(p for sublayer in spec.sublayers for p in sublayer.projections), spec.head]


def plain(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return what is not a weight of a linear: embedding, routers, norms of 1, biases of 0."""
    matrices = {f"{projection.key}.weight" for projection in linears(spec)}
    found = {}
    for name, shape in expected_tensors(spec).items():
        if name == f"{spec.embedding_key}.weight":
            found[name] = torch.randn(shape).half()
        elif name not in matrices and len(shape) == 2:
            found[name] = (torch.randn(shape) * shape[1] ** -0.5).half()
        elif name not in matrices:
            value = 0.0 if name.endswith(".bias") else 1 - spec.family.norm_offset
            found[name] = torch.full(shape, value).half()
    return found


def make_model(folder: Path, shape: str, layers: int | None = None) -> None:
    """Write a model of random fp16 weights."""
    spec = write_config(folder, shape, layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tensors = {
        f"{p.key}.weight": (
            torch.randn(p.out_features, p.in_features, device=device) * p.in_features**-0.5
        ).half()
        for p in linears(spec)
    }
    for number, shard in enumerate(shards(tensors | plain(spec))):
        write_tensors(folder / f"model-{number:05d}.safetensors", shard)


def shards(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Split tensors into files of the size usual on the Hub."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor.cpu()
    yield shard
