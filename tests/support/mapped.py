"""Checkpoints of families that transformers has no class for.

The nearest class computes the reference logits. Its random weights are stored under the family's
names and in its packing, with a config that has the family's keys.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from packed_configs import GPT_OSS, GPT_OSS_ROPE
from safetensors.torch import save_file
from tiny import COMMON
from torch import nn

Tensors = dict[str, torch.Tensor]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
KEPT_ROPE = {"rope_theta": 5000.0, "rope_scaling": None}  # the same in the keys of these configs


def _keep(tensors: Tensors) -> Tensors:
    return tensors


def _leave(model: Any) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """How a family differs from its nearest class.

    start: the beginning of the nearest class's name.
    values: of its config, in addition to `COMMON`; config: the same in the family's keys.
    build, finish: change the nearest model before and after its parameters are drawn.
    store: turns the nearest model's tensors into the family's.
    """

    architecture: str
    start: str = "Llama"
    values: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    build: Callable[[Any], None] = _leave
    finish: Callable[[Any], None] = _leave
    store: Callable[[Tensors], Tensors] = _keep

    def write(self, model: nn.Module, folder: Path) -> None:
        """Write the tensors and the config of the family."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().clone() for name, t in model.named_parameters()}
        path = folder / "model.safetensors"
        save_file(self.store(tensors), path, metadata={"format": "pt"})
        config = COMMON | KEPT_ROPE | {"architectures": [self.architecture]} | self.config
        kept = {key: value for key, value in config.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(kept))


def _use_layer_norms(model: Any) -> None:
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.LayerNorm(child.weight.shape, eps=child.variance_epsilon))


@torch.no_grad()
def _normalize_head(model: Any) -> None:
    model.lm_head.weight.copy_(nn.functional.normalize(model.lm_head.weight))


def _stretch_head(tensors: Tensors) -> Tensors:
    """Multiply the rows of the head by 1, 2 and 3 in turn, which normalization removes again."""
    head = tensors["lm_head.weight"]
    return tensors | {"lm_head.weight": head * (torch.arange(len(head)) % 3 + 1)[:, None]}


INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn": "attention",
    "o_proj": "wo",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


YI_NAMES = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
QKV = ("q_proj", "k_proj", "v_proj")


def _pack_internlm2(tensors: Tensors) -> Tensors:
    """Put q, k and v into one tensor: for each key head its queries, the key, the value."""
    stored = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", part)] for part in QKV]
            groups = [p.unflatten(0, (COMMON["num_key_value_heads"], -1)) for p in parts]
            packed = torch.cat(groups, dim=1).flatten(0, 1)
            stored[_renamed(name.replace("q_proj", "wqkv"), INTERNLM2_NAMES)] = packed
        elif "k_proj" not in name and "v_proj" not in name:
            stored[_renamed(name, INTERNLM2_NAMES)] = tensor
    return stored


def _rename_norms(tensors: Tensors) -> Tensors:
    return {_renamed(name, YI_NAMES): tensor for name, tensor in tensors.items()}


def _renamed(name: str, words: dict[str, str]) -> str:
    return ".".join(words.get(word, word) for word in name.split("."))


PACKED = (".gate_up_proj", ".down_proj")


def _codes(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales in mxfp4 for experts (e, in, out), the same for each name."""
    experts, k, n = weight.shape
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    shape = (experts, n, k // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)


@torch.no_grad()
def _decode_experts(model: Any) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name, parameter in model.named_parameters():
        if name.endswith(PACKED):
            codes = _codes(name, parameter)
            parameter.copy_(convert_moe_packed_tensors(*codes, dtype=torch.float32))


def _in_mxfp4(tensors: Tensors) -> Tensors:
    stored = {name: tensor for name, tensor in tensors.items() if not name.endswith(PACKED)}
    for name in tensors.keys() - stored.keys():
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = _codes(name, tensors[name])
    return stored


MAPPED = {
    "iquest-coder": Mapped(
        architecture="IQuestCoderForCausalLM",
        values=ROPE | {"head_dim": 24, "attention_bias": True, "mlp_bias": True},
        config={
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": False,
        },
    ),
    "gpt-oss-mxfp4": Mapped(
        architecture="GptOssForCausalLM",
        start="GptOss",
        values=GPT_OSS | {"rope_parameters": GPT_OSS_ROPE | {"rope_theta": 5000.0}},
        config=GPT_OSS
        | {"model_type": "gpt_oss", "swiglu_limit": 7.0, "rope_scaling": GPT_OSS_ROPE}
        | {"quantization_config": {"quant_method": "mxfp4"}},
        finish=_decode_experts,
        store=_in_mxfp4,
    ),
    "yi": Mapped(
        architecture="YiForCausalLM", values=ROPE, config={"model_type": "Yi"}, store=_rename_norms
    ),
    "internlm2": Mapped(
        architecture="InternLM2ForCausalLM",
        values=ROPE,
        config={"model_type": "internlm2", "bias": False},
        store=_pack_internlm2,
    ),
    "internlm2-biases": Mapped(
        architecture="InternLM2ForCausalLM",
        values=ROPE | {"attention_bias": True},
        config={"model_type": "internlm2", "bias": True},
        store=_pack_internlm2,
    ),
    "orion": Mapped(
        architecture="OrionForCausalLM",
        values=ROPE | {"rms_norm_eps": 0.01},
        config={"model_type": "orion", "rms_norm_eps": 0.01},
        build=_use_layer_norms,
    ),
    "minicpm": Mapped(
        architecture="MiniCPMForCausalLM",
        start="Granite",
        values=ROPE
        | {
            "embedding_multiplier": 12,
            "residual_multiplier": 1.4 / 2**0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 64 / 48,
            "tie_word_embeddings": True,
        },
        config={
            "model_type": "minicpm",
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 48,
            "tie_word_embeddings": "absent",  # which means that it is tied
        },
    ),
    "minicpm-head": Mapped(
        architecture="MiniCPMForCausalLM",
        start="Granite",
        values=ROPE | {"attention_multiplier": 0.25, "logits_scaling": 64 / 48},
        config={
            "model_type": "minicpm",
            "scale_emb": 1,
            "scale_depth": 2**0.5,
            "dim_model_base": 48,
        },
    ),
    "index": Mapped(
        architecture="IndexForCausalLM",
        values=ROPE,
        config={"model_type": "index", "norm_head": 1},
        finish=_normalize_head,
        store=_stretch_head,
    ),
    "index-head": Mapped(
        architecture="IndexForCausalLM",
        values=ROPE,
        config={"model_type": "index", "norm_head": False},
    ),
}
