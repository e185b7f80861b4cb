"""Architectures and kinds of layers that are known but do not run yet, by what they need."""

import re

STATE = "layers with a state (linear attention, Mamba or convolutions)"
LATENT = "attention to compressed keys and values (MLA)"
EXPERTS = "a mixture of experts"
GRAPH = "norms, blocks or activations that the graph does not have yet"
CHUNKS = "attention within chunks of the text"
SPARSE = "attention to a selection of the keys"

# ends each refusal
PAGES = (
    "`docs/reference/models.md` lists what is, and `docs/concepts/families.md` explains how to add "
    "one"
)
SUFFIX = re.compile("For[A-Z].*$")  # of most architectures: `ForCausalLM` and the like

# need → names of architectures without `SUFFIX`; one with several needs is listed by the first
NEEDS = {
    STATE: """
        Qwen4Exp KimiLinear BailingHybrid BailingMoeV3 Mamba Mamba2 FalconMamba
        FalconH1 Jamba Bamba Zamba Zamba2 NemotronH NemotronH_Omni_Reasoning_V3 Lfm2 Lfm2Vl
        Lfm2Moe Lfm3 Lfm3Vl OlmoHybrid MiniMax RecurrentGemma Rwkv Glm5Next Zaya xLSTM
    """,
    LATENT: """
        DeepseekV2 DeepseekV3 DeepseekV32 GlmMoeDsa Glm4MoeLite Mistral4 MistralLarge4 KimiK25
        LongcatFlash MiniCPM3 Youtu AXK1 HYV4
    """,
    SPARSE: "MiniMaxM3Sparse MiniMaxM3VL",
    EXPERTS: """
        Qwen3OmniMoe Glm4vMoe Ernie4_5_VLMoe Ernie4_5_VL_Moe HYV3
        Phimoe Cohere2Moe ExaoneMoe FlexOlmo Afmoe JetMoe MiMoV2 MiMoV2Flash
        DeepseekV4 Aria AriaText MuseSpark Laguna Mellum Step3p5 Step3p7 Kolibri1 Inkling Inkling2
    """,
    GRAPH: """
        Gemma4 Gemma4Unified Gemma3n MuseGlimmer StableLm Phi Falcon Helium Apertus HyperCLOVAX
        HyperCLOVAXVisionV2 DeciLM Glm4v Spark2_5
    """,
}

LAYER_NEEDS = {  # by names in `layer_types`
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"), STATE),
    "chunked_attention": CHUNKS,
    **dict.fromkeys(("indexed_attention", "compressed_sparse_attention"), SPARSE),
    **dict.fromkeys(("deepseek_sparse_attention", "heavily_compressed_attention"), SPARSE),
    "moe": EXPERTS,
}


def need_of(name: str) -> str | None:
    """Return what a known architecture or `model_type` needs; None: it is unknown."""
    return _NEED_OF.get(_plain(name.removesuffix("_text")))


def _plain(name: str) -> str:
    """Return a name as architectures and model types share it: `qwen35moe`."""
    return SUFFIX.sub("", name).replace("_", "").lower()


_NEED_OF = {_plain(stem): need for need, stems in NEEDS.items() for stem in stems.split()}
