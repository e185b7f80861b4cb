"""Kinds of layers of experts, as families have them."""

from exl2flow.kernels import RouterRule, Scores

SMALL = {"size": 128, "inner": 96}
LAYERS = {
    "mixtral": (RouterRule(experts=8, top=2, norm=1.0), SMALL),
    "qwen3": (RouterRule(experts=128, top=8, norm=1.0), {"size": 256, "inner": 64}),
    "wide": (RouterRule(experts=4, top=2), {"size": 128, "inner": 416}),
    "narrow": (RouterRule(experts=40, top=3), {"size": 96, "inner": 32}),
    "qwen2": (RouterRule(experts=8, top=3), {**SMALL, "shared": 224, "gated": True}),
    "granite": (
        RouterRule(experts=8, top=3, scores=Scores.TOP_SOFTMAX),
        {**SMALL, "shared": 64, "multiplier": 0.22},
    ),
    "gpt-oss": (
        RouterRule(experts=32, top=4, scores=Scores.TOP_SOFTMAX),
        {**SMALL, "biases": True, "activation": "clamped_swiglu"},
    ),
    "glm4.5": (
        RouterRule(
            experts=16,
            top=4,
            scores=Scores.SIGMOID,
            norm=1.0,
            least_norm=1e-20,
            scaling=2.5,
            groups=4,
            top_groups=2,
        ),
        {**SMALL, "shared": 96, "corrected": True},
    ),
    "large": (RouterRule(experts=4, top=2), {"size": 4096, "inner": 64}),
    "dbrx": (RouterRule(experts=16, top=4, norm=2.0), {**SMALL, "centered": True}),
    "llama4": (
        RouterRule(experts=16, top=1, scores=Scores.TOP_SIGMOID, scales_input=True),
        {**SMALL, "shared": 96},
    ),
}
