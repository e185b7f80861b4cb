"""Names of all tensors in EXL2 files, as exllamav2 0.3.2 writes and loads them.

The list follows the keys in its `architecture.py` and the tensors that its conversion writes. `N`
stands for each layer of the text model, braces for alternatives, and `EXL2` for the five tensors of
a packed matrix. exllamav2 copies vision towers, so their names are those of published models; a
tower has one layer here.
"""

import itertools
import re
from collections.abc import Iterator

PACKED = "q_weight,q_scale,q_scale_max,q_groups,q_invperm"

ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.EXL2")
ATTENTION = ("model.layers.N.self_attn.{q,k,v,o}_proj.EXL2",)
MLP = ("model.layers.N.mlp.{gate,up,down}_proj.EXL2",)
NORMS = ("model.layers.N.{input,post_attention}_layernorm.weight",)
LLAMA = (*ENDS, *ATTENTION, *MLP, *NORMS)
HEAD_NORMS = ("model.layers.N.self_attn.{q,k}_norm.weight",)
QKV_BIASES = ("model.layers.N.self_attn.{q,k,v}_proj.bias",)
GEMMA_NORMS = (
    "model.layers.N.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight",
)
GEMMA = (*ENDS, *ATTENTION, *MLP, *GEMMA_NORMS)
BIASED_ENDS = (*ENDS, "model.norm.bias")
BIASED_ATTENTION = (*ATTENTION, "model.layers.N.self_attn.{q,k,v,o}_proj.bias")
PLAIN_MLP = ("model.layers.N.mlp.{c_fc,c_proj}.{EXL2,bias}",)
GPT2 = (
    *BIASED_ENDS,
    "model.wpe.weight",
    *BIASED_ATTENTION,
    *PLAIN_MLP,
    "model.layers.N.{ln_1,ln_2}.{weight,bias}",
)
DBRX = (
    *ENDS,
    *ATTENTION,
    *NORMS,
    "model.layers.N.block_sparse_moe.gate.weight",
    "model.layers.N.block_sparse_moe.experts.{0,1,2,3,4}.{w1,v1,w2}.EXL2",
)
MIXTRAL = (
    *ENDS,
    *ATTENTION,
    *NORMS,
    "model.layers.N.block_sparse_moe.gate.weight",
    "model.layers.N.block_sparse_moe.experts.{0,1,2,3,4}.{w1,w2,w3}.EXL2",
)
QWEN3_MOE = (
    *ENDS,
    *ATTENTION,
    *NORMS,
    *HEAD_NORMS,
    "model.layers.N.mlp.gate.weight",
    "model.layers.N.mlp.experts.{0,1,2,3,4,5,6,7}.{gate,up,down}_proj.EXL2",
)
QWEN2_TOWER = (
    "visual.patch_embed.proj.weight",
    "visual.blocks.0.attn.{qkv,proj}.{weight,bias}",
)
QWEN2_5_TOWER = (
    *QWEN2_TOWER,
    "visual.blocks.0.{norm1,norm2}.weight",
    "visual.blocks.0.mlp.{gate_proj,up_proj,down_proj}.{weight,bias}",
    "visual.merger.ln_q.weight",
    "visual.merger.mlp.{0,2}.{weight,bias}",
)
SIGLIP = "vision_tower.vision_model"
GEMMA3_TOWER = (
    f"{SIGLIP}.embeddings.patch_embedding.{{weight,bias}}",
    f"{SIGLIP}.embeddings.position_embedding.weight",
    f"{SIGLIP}.encoder.layers.0.{{layer_norm1,layer_norm2}}.{{weight,bias}}",
    f"{SIGLIP}.encoder.layers.0.self_attn.{{q,k,v,out}}_proj.{{weight,bias}}",
    f"{SIGLIP}.encoder.layers.0.mlp.{{fc1,fc2}}.{{weight,bias}}",
    f"{SIGLIP}.post_layernorm.{{weight,bias}}",
    "multi_modal_projector.mm_input_projection_weight",
    "multi_modal_projector.mm_soft_emb_norm.weight",
)
PIXTRAL_TOWER = (
    "vision_tower.{patch_conv,ln_pre}.weight",
    "vision_tower.transformer.layers.0.{attention_norm,ffn_norm}.weight",
    "vision_tower.transformer.layers.0.attention.{q,k,v,o}_proj.weight",
    "vision_tower.transformer.layers.0.feed_forward.{gate,up,down}_proj.weight",
)
LLAVA_PROJECTOR = ("multi_modal_projector.{linear_1,linear_2}.{weight,bias}",)
MISTRAL3_PROJECTOR = (
    "multi_modal_projector.{norm,patch_merger.merging_layer,linear_1,linear_2}.weight",
)


def _inside(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a text model inside a wrapper."""
    return tuple(f"language_model.{name}" for name in names)


NAMES: dict[str, tuple[str, ...]] = {  # by checkpoint of `tests/support/checkpoints.py`
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": (*LLAMA, *QKV_BIASES),
    "qwen3": (*LLAMA, *HEAD_NORMS),
    "yi": (*ENDS, *ATTENTION, *MLP, "model.layers.N.{ln1,ln2}.weight"),
    "phi3": LLAMA,
    "phi3-tied": LLAMA,  # with a packed head in addition to the embedding
    "qwen2.5-vl": (*LLAMA, *QKV_BIASES, *QWEN2_5_TOWER),
    "qwen2-vl": (
        *LLAMA,
        *QKV_BIASES,
        *QWEN2_TOWER,
        "visual.blocks.0.{norm1,norm2}.{weight,bias}",
        "visual.blocks.0.mlp.{fc1,fc2}.{weight,bias}",
        "visual.merger.ln_q.{weight,bias}",
        "visual.merger.mlp.{0,2}.{weight,bias}",
    ),
    "llava": (*_inside(LLAMA), *PIXTRAL_TOWER, *LLAVA_PROJECTOR),
    "mistral3": (*_inside(LLAMA), *PIXTRAL_TOWER, *MISTRAL3_PROJECTOR),
    "gemma": LLAMA,
    "gemma2": GEMMA,
    "gemma3": (
        *_inside((*GEMMA, *HEAD_NORMS)),
        *GEMMA3_TOWER,
    ),
    "glm4": (
        *LLAMA,
        *QKV_BIASES,
        "model.layers.N.{post_self_attn,post_mlp}_layernorm.weight",
    ),
    "cohere": (*ENDS, *ATTENTION, *MLP, "model.layers.N.input_layernorm.weight"),
    "cohere-qk-norm": (
        *ENDS,
        *ATTENTION,
        *MLP,
        "model.layers.N.input_layernorm.weight",
        *HEAD_NORMS,
    ),
    "cohere2": (*ENDS, *ATTENTION, *MLP, "model.layers.N.input_layernorm.weight"),
    "granite": LLAMA,
    "starcoder2": (
        *BIASED_ENDS,
        *BIASED_ATTENTION,
        *PLAIN_MLP,
        "model.layers.N.{input,post_attention}_layernorm.{weight,bias}",
    ),
    "mixtral": MIXTRAL,
    "dbrx": DBRX,
    "qwen3-moe": QWEN3_MOE,
    "gpt2": GPT2,
    "gpt-bigcode": GPT2,
    "internlm2": (
        *ENDS,
        *ATTENTION,
        "model.layers.N.{attention_norm,ffn_norm}.weight",
        "model.layers.N.feed_forward.{w1,w2,w3}.EXL2",
    ),
    "orion": (
        *BIASED_ENDS,
        *ATTENTION,
        *MLP,
        "model.layers.N.{input,post_attention}_layernorm.{weight,bias}",
    ),
    "minicpm": LLAMA,
    "index": LLAMA,
}


def expanded(pattern: str, num_layers: int) -> Iterator[str]:
    """Yield the names that a pattern stands for."""
    parts = re.split(r"{([^}]*)}", re.sub(r"\.EXL2$", ".{EXL2}", pattern))
    choices = [
        part.replace("EXL2", PACKED).split(",") if i % 2 else [part] for i, part in enumerate(parts)
    ]
    layers = range(num_layers) if ".N." in pattern else range(1)
    for layer, words in itertools.product(layers, itertools.product(*choices)):
        yield "".join(words).replace(".N.", f".{layer}.")
