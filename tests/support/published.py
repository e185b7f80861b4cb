"""Published models: their configs, written by hand, and their published parameter counts.

A config holds the keys that shape the graph, as the model's own `config.json` spells them (most of
them in the form of transformers 4). Keys that change no shape, such as most rope factors, are left
out.

Each count names its source:

- HUB: the total in the Hub's safetensors metadata, as quoted in public tables
- LOADED: the sum over the loaded model's parameters, as quoted in logs and programs
- LLAMA_CPP: the count that llama.cpp prints for a model
- CARD: a model card, a README or a file size

A count with a unit is rounded. `tower` is the part of the count outside the text model: the vision
tower and projector, counted in the model that transformers 5.23 builds from the published config.
"""

from dataclasses import dataclass
from typing import Any

from exl2flow.model.config.families import FAMILIES

HUB, LOADED, LLAMA_CPP, CARD = "hub", "loaded", "llama.cpp", "card"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model.

    count: exact, or as published, such as "7.6B". tower: its part outside the text model.
    has_embedding: False: the count leaves out embedding and head.
    """

    config: dict[str, Any]
    count: int | str
    source: str
    tower: int = 0
    has_embedding: bool = True


def _model(
    architecture: str,
    sizes: tuple[int, int, int, int, int, int],
    count: int | str,
    source: str,
    *,
    has_embedding: bool = True,
    **others: object,
) -> Published:
    """`sizes` are those of hidden states and MLP, layers, heads, kv heads and vocabulary."""
    return Published(
        config=_named(sizes) | {"architectures": [architecture]} | others,
        count=count,
        source=source,
        has_embedding=has_embedding,
    )


def _named(sizes: tuple[int, int, int, int, int, int]) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys = (*names, "num_key_value_heads", "vocab_size")
    return {**dict(zip(keys, sizes, strict=True)), "max_position_embeddings": 4096}


def _wrapper(
    architecture: str, text: dict[str, Any], count: int | str, source: str, *, tower: int
) -> Published:
    config = {"architectures": [architecture], "text_config": text, "vision_config": {}}
    return Published(config=config, count=count, source=source, tower=tower)


LLAMA, MISTRAL, QWEN2, QWEN3 = (
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
PHI3, GEMMA, GEMMA2, GEMMA3 = (
    f"{name}ForCausalLM" for name in ("Phi3", "Gemma", "Gemma2", "Gemma3")
)
TIED = {"tie_word_embeddings": True}
STATES: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_5_EXPERTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
APART = {"tie_word_embeddings": False}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131_072,
}
SOFT_CAPS = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
GEMMA3_4B = {  # its config leaves out heads, their size and the vocabulary
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
}
GEMMA3_12B = GEMMA3_4B | {
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
GEMMA3_27B = GEMMA3_12B | {
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
}
MINISTRAL3_ROPE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
}


def _ministral3(
    sizes: tuple[int, int, int, int, int, int], *, is_tied: bool = False
) -> dict[str, Any]:
    others = {"model_type": "ministral3", "head_dim": 128, "tie_word_embeddings": is_tied}
    return _named(sizes) | others | MINISTRAL3_ROPE


QWEN25_VL = _named((3584, 18_944, 28, 28, 4, 152_064)) | {  # published without `text_config`
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "use_sliding_window": False,
    "vision_config": {},
    **APART,
}
GRANITE = {
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
    **TIED,
}


def _granite4(layers: int, **others: object) -> dict[str, Any]:
    return {
        "layer_types": ["attention"] * layers,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        **(GRANITE | {"attention_multiplier": 0.015625, "logits_scaling": 10.0}),
        **others,
    }


COHERE = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "use_qk_norm": False}
EVERY_FOURTH = ["sliding_attention"] * 3 + ["full_attention"]
STARCODER2 = {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "sliding_window": 4096,
    "use_bias": True,
}

QWEN_MOE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2_MOE = QWEN_MOE | {"norm_topk_prob": False, "use_sliding_window": False}
QWEN3_MOE = QWEN_MOE | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
SIGMOID = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}
GLM45 = {
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1_000_000.0,
}
ERNIE_MOE = {
    "moe_num_experts": 64,
    "moe_layer_interval": 1,
    "moe_gate": "topk",
    "use_bias": False,
    "rope_theta": 500_000.0,
}


def _drafting(hidden: int, of_layer: int, vocabulary: int = 151_552) -> int:
    """Return the parameters of GLM's layer that drafts, beside those that other layers have.

    Embedding and head of its own, the projection of both inputs, and three norms.
    """
    return of_layer + 2 * vocabulary * hidden + 2 * hidden**2 + 3 * hidden


GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201_088,
}
LLAMA4_TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "max_position_embeddings": 1_048_576,
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "vocab_size": 202_048,
}
LLAMA4_SCOUT = LLAMA4_TEXT | {
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 10_485_760,
    "num_local_experts": 16,
    "use_qk_norm": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
LLAMA4_MAVERICK = LLAMA4_TEXT | {
    "interleave_moe_layer_step": 2,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}
LLAMA4_VL, LLAMA4_TOWER = "Llama4ForConditionalGeneration", 871_932_416

PUBLISHED: dict[str, Published] = {
    "gpt-oss-20b": Published(
        config=GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
        count="20.91B",
        source=CARD,
    ),
    "gpt-oss-120b": Published(
        config=GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
        count="116.83B",
        source=CARD,
    ),
    "dbrx": Published(
        config={
            "architectures": ["DbrxForCausalLM"],
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000},
            "d_model": 6144,
            "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
            "max_seq_len": 32_768,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100_352,
        },
        count=131_596_523_520,
        source=HUB,
    ),
    "Llama-4-Scout": _wrapper(LLAMA4_VL, LLAMA4_SCOUT, 108_641_793_536, HUB, tower=LLAMA4_TOWER),
    "Llama-4-Maverick": _wrapper(
        LLAMA4_VL, LLAMA4_MAVERICK, 401_583_781_376, HUB, tower=LLAMA4_TOWER
    ),
    "Llama-4-Scout, text model alone": Published(
        config=LLAMA4_SCOUT | {"architectures": ["Llama4ForCausalLM"]},
        count=107_769_861_120,
        source=LOADED,
    ),
    "Llama-3.1-8B": _model(
        LLAMA, (4096, 14_336, 32, 32, 8, 128_256), 8_030_261_248, HUB, **APART, **LLAMA3_ROPE
    ),
    "Llama-3.2-1B": _model(
        LLAMA,
        (2048, 8192, 16, 32, 8, 128_256),
        1_235_814_400,
        HUB,
        head_dim=64,
        **TIED,
        **LLAMA3_ROPE,
    ),
    "Llama-3.2-3B": _model(
        LLAMA,
        (3072, 8192, 28, 24, 8, 128_256),
        3_212_749_824,
        HUB,
        head_dim=128,
        **TIED,
        **LLAMA3_ROPE,
    ),
    "Llama-3.3-70B": _model(
        LLAMA, (8192, 28_672, 80, 64, 8, 128_256), 70_553_706_496, HUB, **APART, **LLAMA3_ROPE
    ),
    "Yi-1.5-6B": _model(LLAMA, (4096, 11_008, 32, 32, 4, 64_000), 6_061_035_520, HUB, **APART),
    "Yi-34B": _model(  # as it was first published
        "YiForCausalLM", (7168, 20_480, 60, 56, 8, 64_000), 34_388_917_248, HUB, **APART
    ),
    "llava-1.5-7b": _wrapper(
        "LlavaForConditionalGeneration",
        {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064},
        7_063_427_072,
        LOADED,
        tower=324_487_168,
    ),
    "Mistral-7B-v0.3": _model(
        MISTRAL,
        (4096, 14_336, 32, 32, 8, 32_768),
        7_248_023_552,
        HUB,
        sliding_window=None,
        **APART,
    ),
    "Mistral-Nemo-2407": _model(
        MISTRAL,
        (5120, 14_336, 40, 32, 8, 131_072),
        12_247_782_400,
        HUB,
        head_dim=128,
        sliding_window=None,
        **APART,
    ),
    "pixtral-12b": _wrapper(
        "LlavaForConditionalGeneration",
        {  # its config leaves out the number of heads
            "model_type": "mistral",
            "hidden_size": 5120,
            "intermediate_size": 14_336,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131_072,
            "max_position_embeddings": 1_024_000,
            "sliding_window": None,
        },
        "12.68B",
        HUB,
        tower=434_957_312,
    ),
    "Mistral-Small-3.1-24B": _wrapper(
        "Mistral3ForConditionalGeneration",
        _named((5120, 32_768, 40, 32, 8, 131_072))
        | {"model_type": "mistral", "head_dim": 128, "sliding_window": None, **APART},
        24_011_361_280,
        HUB,
        tower=438_958_080,
    ),
    "Ministral-8B-2410": _model(
        "MinistralForCausalLM",
        (4096, 12_288, 36, 32, 8, 131_072),
        8_019_808_256,
        HUB,
        head_dim=128,
        sliding_window=32_768,
        **APART,
    ),
    "Ministral-3-3B": _wrapper(
        "Mistral3ForConditionalGeneration",
        _ministral3((3072, 9216, 26, 32, 8, 131_072), is_tied=True),
        3_849_090_048,
        HUB,
        tower=420_083_712,
    ),
    "Ministral-3-8B": _wrapper(
        "Mistral3ForConditionalGeneration",
        _ministral3((4096, 14_336, 34, 32, 8, 131_072)),
        8_918_026_716,
        HUB,
        tower=428_472_320 + 2 * 34 * 7,  # and the scales of 238 fp8 matrices and their inputs
    ),
    "Ministral-3-14B": _wrapper(
        "Mistral3ForConditionalGeneration",
        _ministral3((5120, 16_384, 40, 32, 8, 131_072)),
        "13.5B",  # of the text model
        CARD,
        tower=0,
    ),
    "Qwen2.5-7B": _model(QWEN2, (3584, 18_944, 28, 28, 4, 152_064), 7_615_616_512, HUB, **APART),
    "Qwen2.5-32B": _model(QWEN2, (5120, 27_648, 64, 40, 8, 152_064), 32_763_876_352, HUB, **APART),
    "Qwen2.5-72B": _model(QWEN2, (8192, 29_568, 80, 64, 8, 152_064), 72_706_203_648, HUB, **APART),
    "Qwen3-0.6B": _model(
        QWEN3, (1024, 3072, 28, 16, 8, 151_936), 596_049_920, LOADED, head_dim=128, **TIED
    ),
    "Qwen3-8B": _model(
        QWEN3, (4096, 12_288, 36, 32, 8, 151_936), 8_190_735_360, HUB, head_dim=128, **APART
    ),
    "Qwen3-32B": _model(
        QWEN3, (5120, 25_600, 64, 64, 8, 151_936), 32_762_123_264, HUB, head_dim=128, **APART
    ),
    "Qwen2-VL-7B": Published(
        config=QWEN25_VL | {"architectures": ["Qwen2VLForConditionalGeneration"]},
        count=8_291_375_616,
        source=HUB,
        tower=675_759_104,
    ),
    "Qwen2.5-VL-7B": Published(
        config=QWEN25_VL | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]},
        count=8_292_166_656,
        source=LOADED,
        tower=676_550_144,
    ),
    "Qwen3-VL-8B": _wrapper(
        "Qwen3VLForConditionalGeneration",
        _named((4096, 12_288, 36, 32, 8, 151_936))
        | {"model_type": "qwen3_vl_text", "head_dim": 128, **APART},
        8_767_123_696,
        HUB,
        tower=576_388_336,
    ),
    "Phi-3-mini-4k": _model(
        PHI3, (3072, 8192, 32, 32, 32, 32_064), 3_821_079_552, HUB, sliding_window=2047, **APART
    ),
    "Phi-4": _model(PHI3, (5120, 17_920, 40, 40, 10, 100_352), 14_659_507_200, HUB, **APART),
    "Phi-4-mini": _model(
        PHI3,
        (3072, 8192, 32, 24, 8, 200_064),
        3_836_021_760,
        HUB,
        partial_rotary_factor=0.75,
        sliding_window=262_144,
        **TIED,
    ),
    "gemma-2b": _model(
        GEMMA, (2048, 16_384, 18, 8, 1, 256_000), 2_506_172_416, LOADED, head_dim=256
    ),
    "gemma-7b": _model(
        GEMMA, (3072, 24_576, 28, 16, 16, 256_000), 8_537_680_896, LOADED, head_dim=256
    ),
    "gemma-2-9b": _model(
        GEMMA2,
        (3584, 14_336, 42, 16, 8, 256_000),
        9_241_705_984,
        HUB,
        head_dim=256,
        query_pre_attn_scalar=256,
        **SOFT_CAPS,
    ),
    "gemma-2-27b": _model(
        GEMMA2,
        (4608, 36_864, 46, 32, 16, 256_000),
        27_227_128_320,
        HUB,
        head_dim=128,
        query_pre_attn_scalar=144,
        **SOFT_CAPS,
    ),
    "gemma-3-270m": _model(
        GEMMA3,
        (640, 2048, 18, 4, 1, 262_144),
        268_098_176,
        LLAMA_CPP,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "gemma-3-1b": _model(
        GEMMA3,
        (1152, 6912, 26, 4, 1, 262_144),
        999_885_952,
        HUB,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "gemma-3-4b": _wrapper(
        "Gemma3ForConditionalGeneration", GEMMA3_4B, 4_300_079_472, HUB, tower=419_816_304
    ),
    "gemma-3-12b": _wrapper(
        "Gemma3ForConditionalGeneration", GEMMA3_12B, 12_187_325_040, HUB, tower=421_290_864
    ),
    "gemma-3-27b": _wrapper(
        "Gemma3ForConditionalGeneration", GEMMA3_27B, 27_432_406_640, HUB, tower=423_060_336
    ),
    "glm-4-9b-chat": _model(
        "GlmForCausalLM",
        (4096, 13_696, 40, 32, 2, 151_552),
        9_399_951_360,
        LOADED,
        head_dim=128,
        partial_rotary_factor=0.5,
        attention_bias=True,
        **APART,
    ),
    "GLM-4-9B-0414": _model(
        "Glm4ForCausalLM",
        (4096, 13_696, 40, 32, 2, 151_552),
        9_400_279_040,
        HUB,
        head_dim=128,
        partial_rotary_factor=0.5,
        attention_bias=True,
        **APART,
    ),
    "GLM-4-32B-0414": _model(
        "Glm4ForCausalLM",
        (6144, 23_040, 61, 48, 2, 151_552),
        "32.57B",
        LLAMA_CPP,
        head_dim=128,
        partial_rotary_factor=0.5,
        attention_bias=False,
        **APART,
    ),
    "c4ai-command-r-v01": _model(
        "CohereForCausalLM", (8192, 22_528, 40, 64, 64, 256_000), "35B", CARD, **COHERE
    ),
    "aya-expanse-8b": _model(
        "CohereForCausalLM", (4096, 14_336, 32, 32, 8, 256_000), 8_028_033_024, LOADED, **COHERE
    ),
    "c4ai-command-r7b-12-2024": _model(
        "Cohere2ForCausalLM",
        (4096, 14_336, 32, 32, 8, 256_000),
        "8.03B",
        LLAMA_CPP,
        sliding_window=4096,
        sliding_window_pattern=4,
        **(COHERE | {"logit_scale": 0.25, "rope_theta": 50_000.0}),
    ),
    "granite-3.3-2b": _model(
        "GraniteForCausalLM", (2048, 8192, 40, 32, 8, 49_159), 2_533_539_840, HUB, **GRANITE
    ),
    "granite-3.3-8b": _model(
        "GraniteForCausalLM", (4096, 12_800, 40, 32, 8, 49_159), 8_170_864_640, HUB, **GRANITE
    ),
    "granite-4.0-350m": _model(
        "GraniteMoeHybridForCausalLM",
        (1024, 2048, 28, 16, 4, 100_352),
        352_379_904,
        HUB,
        **_granite4(28, shared_intermediate_size=2048),
    ),
    "granite-4.0-1b": _model(
        "GraniteMoeHybridForCausalLM",
        (2048, 4096, 40, 16, 4, 100_352),
        1_631_750_144,
        HUB,
        **_granite4(40, shared_intermediate_size=4096),
    ),
    "granite-4.0-micro": _model(
        "GraniteMoeHybridForCausalLM",
        (2560, 8192, 40, 40, 8, 100_352),
        3_402_836_480,
        HUB,
        **_granite4(40, shared_intermediate_size=8192),
    ),
    "OLMo-2-7B": _model(
        "Olmo2ForCausalLM", (4096, 11_008, 32, 32, 32, 100_352), 7_298_617_344, HUB, **APART
    ),
    "OLMo-2-13B": _model(
        "Olmo2ForCausalLM", (5120, 13_824, 40, 40, 40, 100_352), 13_716_198_400, HUB, **APART
    ),
    "OLMo-2-32B": _model(
        "Olmo2ForCausalLM", (5120, 27_648, 64, 40, 8, 100_352), 32_234_279_936, LOADED, **APART
    ),
    "Olmo-3-7B": _model(
        "Olmo3ForCausalLM",
        (4096, 11_008, 32, 32, 32, 100_278),
        7_298_011_136,
        LOADED,
        sliding_window=4096,
        layer_types=EVERY_FOURTH * 8,
        **APART,
    ),
    "Olmo-3-32B": _model(
        "Olmo3ForCausalLM",
        (5120, 27_648, 64, 40, 8, 100_278),
        32_233_522_176,
        LOADED,
        sliding_window=4096,
        layer_types=EVERY_FOURTH * 16,
        **APART,
    ),
    "SmolLM3-3B": _model(
        "SmolLM3ForCausalLM",
        (2048, 11_008, 36, 16, 4, 128_256),
        3_075_098_624,
        HUB,
        no_rope_layers=[1, 1, 1, 0] * 9,
        use_sliding_window=False,
        sliding_window=None,
        **TIED,
    ),
    "EXAONE-4.0-1.2B": _model(
        "Exaone4ForCausalLM",
        (2048, 4096, 30, 32, 8, 102_400),
        "1.28B",
        CARD,
        head_dim=64,
        sliding_window=None,
        layer_types=["full_attention"] * 30,
        **TIED,
    ),
    "EXAONE-4.0-32B": _model(
        "Exaone4ForCausalLM",
        (5120, 27_392, 64, 40, 8, 102_400),
        "30.95B",
        CARD,
        has_embedding=False,
        head_dim=128,
        sliding_window=4096,
        layer_types=EVERY_FOURTH * 16,
        **APART,
    ),
    "Seed-OSS-36B": _model(
        "SeedOssForCausalLM",
        (5120, 27_648, 64, 80, 8, 155_136),
        36_151_104_512,
        HUB,
        head_dim=128,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        **APART,
    ),
    "ERNIE-4.5-0.3B": _model(
        "Ernie4_5ForCausalLM",
        (1024, 3072, 18, 16, 2, 103_424),
        360_748_032,  # of a fine-tuned model
        LOADED,
        head_dim=128,
        use_bias=False,
        **TIED,
    ),
    "Hunyuan-0.5B": _model(
        "HunYuanDenseV1ForCausalLM",
        (1024, 3584, 24, 16, 8, 120_818),
        "539M",
        HUB,
        head_dim=128,
        use_qk_norm=True,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        **TIED,
    ),
    "Minitron-4B": _model(
        "NemotronForCausalLM",
        (3072, 9216, 32, 24, 8, 256_000),
        "7.8GiB",  # of an fp16 file
        CARD,
        head_dim=128,
        hidden_act="relu2",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        **APART,
    ),
    "starcoder2-3b": _model(
        "Starcoder2ForCausalLM", (3072, 12_288, 30, 24, 2, 49_152), "3.03B", HUB, **STARCODER2
    ),
    "starcoder2-15b": _model(
        "Starcoder2ForCausalLM",
        (6144, 24_576, 40, 48, 4, 49_152),
        15_957_889_024,
        HUB,
        **STARCODER2,
        **APART,
    ),
    "Orion-14B": _model(
        "OrionForCausalLM",
        (5120, 15_360, 40, 40, 40, 84_608),
        "14B",
        CARD,
        rms_norm_eps=1e-5,
        **APART,
    ),
    "internlm2_5-7b": _model(
        "InternLM2ForCausalLM",
        (4096, 14_336, 32, 32, 8, 92_544),
        7_737_708_544,
        LOADED,
        bias=False,
        **APART,
    ),
    "internlm2_5-20b": _model(
        "InternLM2ForCausalLM",
        (6144, 16_384, 48, 48, 8, 92_544),
        19_861_149_696,
        LOADED,
        bias=False,
        **APART,
    ),
    "MiniCPM-2B": _model(
        "MiniCPMForCausalLM",
        (2304, 5760, 40, 36, 36, 122_753),
        2_724_880_896,
        LOADED,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
    ),
    "Index-1.9B": _model(
        "IndexForCausalLM",
        (2048, 5888, 36, 16, 16, 65_029),
        "1.9B",
        CARD,
        has_embedding=False,
        norm_head=1,
        **APART,
    ),
    "gpt2": Published(
        config={
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": 50_257,
        },
        count=124_439_808,
        source=LOADED,
    ),
    "starcoder": Published(
        config={
            "architectures": ["GPTBigCodeForCausalLM"],
            "activation_function": "gelu_pytorch_tanh",
            "multi_query": True,
            "n_embd": 6144,
            "n_inner": 24_576,
            "n_layer": 40,
            "n_head": 48,
            "n_positions": 8192,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": 49_152,
        },
        count=15_517_456_384,  # of a fine-tuned model
        source=LOADED,
    ),
    "Mixtral-8x7B": _model(
        "MixtralForCausalLM",
        (4096, 14_336, 32, 32, 8, 32_000),
        46_702_792_704,
        HUB,
        rope_theta=1_000_000.0,
        **MIXTRAL,
        **APART,
    ),
    "Mixtral-8x22B": _model(
        "MixtralForCausalLM",
        (6144, 16_384, 56, 48, 8, 32_000),
        140_620_634_112,
        HUB,
        rope_theta=1_000_000.0,
        **MIXTRAL,
        **APART,
    ),
    "Qwen1.5-MoE-A2.7B": _model(
        "Qwen2MoeForCausalLM",
        (2048, 5632, 24, 16, 16, 151_936),
        14_315_784_192,
        HUB,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        **QWEN2_MOE,
        **APART,
    ),
    "Qwen2-57B-A14B": _model(
        "Qwen2MoeForCausalLM",
        (3584, 18_944, 28, 28, 4, 151_936),
        "57.4B",
        HUB,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20_480,
        **QWEN2_MOE,
        **APART,
    ),
    "Qwen3-30B-A3B": _model(
        "Qwen3MoeForCausalLM",
        (2048, 6144, 48, 32, 4, 151_936),
        30_532_122_624,
        HUB,
        moe_intermediate_size=768,
        **QWEN3_MOE,
        **APART,
    ),
    "Qwen3-235B-A22B": _model(
        "Qwen3MoeForCausalLM",
        (4096, 12_288, 94, 64, 4, 151_936),
        235_093_634_560,
        HUB,
        moe_intermediate_size=1536,
        **QWEN3_MOE,
        **APART,
    ),
    "OLMoE-1B-7B": _model(
        "OlmoeForCausalLM",
        (2048, 1024, 16, 16, 16, 50_304),
        6_919_161_856,
        HUB,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        clip_qkv=None,
        rms_norm_eps=1e-5,
        **APART,
    ),
    "GLM-4.5-Air": Published(
        config=_named((4096, 10_944, 46, 96, 8, 151_552))
        | {"architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": 1408}
        | {"n_routed_experts": 128, "first_k_dense_replace": 1, "use_qk_norm": False}
        | {"routed_scaling_factor": 1.0, **GLM45, **SIGMOID, **APART},
        count=110_468_824_832,
        source=HUB,
        tower=_drafting(4096, 2_341_492_864),
    ),
    "GLM-4.5": Published(
        config=_named((5120, 12_288, 92, 96, 8, 151_552))
        | {"architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": 1536}
        | {"n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True}
        | {"routed_scaling_factor": 2.5, **GLM45, **SIGMOID, **APART},
        count=358_337_791_296,
        source=HUB,
        tower=_drafting(5120, 3_935_625_632),
    ),
    "dots.llm1": _model(
        "Dots1ForCausalLM",
        (4096, 10_944, 62, 32, 32, 152_064),
        142_774_381_696,
        HUB,
        head_dim=128,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        scoring_func="noaux_tc",
        sliding_window=None,
        **SIGMOID,
        **APART,
    ),
    "ERNIE-4.5-21B-A3B": _model(
        "Ernie4_5_MoeForCausalLM",
        (2560, 12_288, 28, 20, 4, 103_424),
        21_825_437_888,
        HUB,
        moe_k=6,
        moe_intermediate_size=1536,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=27,
        **ERNIE_MOE,
        **TIED,
    ),
    "Hunyuan-A13B": _model(
        "HunYuanMoEV1ForCausalLM",
        (4096, 3072, 32, 32, 8, 128_167),
        80_393_183_232,
        HUB,
        head_dim=128,
        num_experts=64,
        moe_topk=[8] * 32,
        num_shared_expert=[1] * 32,
        moe_intermediate_size=[3072] * 32,
        use_qk_norm=True,
        use_cla=False,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        **TIED,
    ),
    "MiniMax-M2": _model(
        "MiniMaxM2ForCausalLM",
        (3072, 1536, 62, 48, 8, 200_064),
        "228.7B",
        HUB,
        head_dim=128,
        num_local_experts=256,
        num_experts_per_tok=8,
        rotary_dim=64,
        scoring_func="sigmoid",
        use_qk_norm=True,
        use_routing_bias=True,
        num_mtp_modules=3,
        rope_theta=5_000_000.0,
        **APART,
    ),
    "granite-3.1-1b-a400m": _model(
        "GraniteMoeForCausalLM",
        (1024, 512, 24, 16, 8, 49_155),
        1_334_628_352,
        HUB,
        num_local_experts=32,
        num_experts_per_tok=8,
        **(GRANITE | {"attention_multiplier": 0.015625, "logits_scaling": 6.0}),
    ),
    "granite-3.1-3b-a800m": _model(
        "GraniteMoeForCausalLM",
        (1536, 512, 32, 24, 8, 49_155),
        3_298_793_472,
        HUB,
        num_local_experts=40,
        num_experts_per_tok=8,
        **(GRANITE | {"attention_multiplier": 0.015625, "logits_scaling": 6.0}),
    ),
    "Qwen3-VL-30B-A3B": _wrapper(
        "Qwen3VLMoeForConditionalGeneration",
        _named((2048, 6144, 48, 32, 4, 151_936))
        | {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, **QWEN3_MOE, **APART},
        31_070_754_032,
        HUB,
        tower=538_631_408,
    ),
    "Qwen3-Next-80B-A3B": _model(
        "Qwen3NextForCausalLM",
        (2048, 5120, 48, 16, 2, 151_936),
        "80B",
        CARD,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
        **STATES,
        **APART,
    ),
    "Qwen3.5-27B": _wrapper(
        "Qwen3_5ForConditionalGeneration",
        _named((5120, 17_408, 64, 24, 4, 248_320))
        | {"model_type": "qwen3_5_text", **STATES, "linear_num_value_heads": 48, **APART},
        "27B",
        CARD,
        tower=0,
    ),
    "Qwen3.5-27B, its text model": _model(
        "Qwen3_5ForCausalLM",
        (5120, 17_408, 64, 24, 4, 248_320),
        "27B",
        CARD,
        **STATES | {"linear_num_value_heads": 48},
        **APART,
    ),
    "Qwen3.6-35B-A3B": _wrapper(
        "Qwen3_5MoeForConditionalGeneration",
        _named((2048, 512, 40, 16, 2, 248_320))
        | {"model_type": "qwen3_5_moe_text", **STATES, **QWEN3_5_EXPERTS, **APART},
        "35B",
        CARD,
        tower=0,
    ),
    "Qwen3.6-35B-A3B, its text model": _model(
        "Qwen3_5MoeForCausalLM",
        (2048, 512, 40, 16, 2, 248_320),
        "35B",
        CARD,
        **STATES,
        **QWEN3_5_EXPERTS,
        **APART,
    ),
}


def row_of(name: str) -> tuple[str, str | None]:
    """Return the key of a model's row in the table of families."""
    config = PUBLISHED[name].config
    (architecture,) = config["architectures"]
    kind = config.get("text_config", {}).get("model_type")
    flat = {row.architecture: row.text_type for row in FAMILIES.values() if row.is_flat_too}
    return architecture, kind or flat.get(architecture)
