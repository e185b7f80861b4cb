"""What a model is: families, resolved specs, weights, layers, tokenizer, EXL2 tensors."""

from exl2flow.model.config.families import FAMILIES
from exl2flow.model.config.family import Family
from exl2flow.model.config.resolution import resolve
from exl2flow.model.config.rope_spec import RopeKind, RopeSpec
from exl2flow.model.config.spec import AttentionSpec, MlpSpec, ModelSpec, expected_tensors
from exl2flow.model.config.sublayer_spec import (
    NormSpec,
    ProjectionSpec,
    Role,
    SublayerPart,
    SublayerSpec,
)
from exl2flow.model.files.canonical import CanonicalTensors, fused_rows
from exl2flow.model.files.exl2 import QuantizedMatrix, QuantParams
from exl2flow.model.files.headers import carried, check_dtypes, check_layers, unclaimed
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.attention import (
    AttentionSublayer,
    KvCache,
    LayerCache,
    Projected,
    attend,
)
from exl2flow.model.layers.decoder import (
    Decoder,
    Embedding,
    Head,
    build_embedding,
    build_head,
    check_ids,
    with_bos,
)
from exl2flow.model.layers.linear import (
    DenseLinear,
    Linear,
    PackedLinear,
    QuantizedLinear,
    load_linear,
    narrowed,
)
from exl2flow.model.layers.mlp import MlpSublayer
from exl2flow.model.layers.placement import Placement
from exl2flow.model.layers.rope import RopeTable, RopeTables
from exl2flow.model.layers.sublayer import Sublayer
from exl2flow.model.layers.sublayers import build_sublayer
from exl2flow.model.memory.composition import Composition
from exl2flow.model.text.chat_template import ChatTemplate, Message
from exl2flow.model.text.text_stream import TextStream
from exl2flow.model.text.tokenizer import Tokenizer

__all__ = [
    "FAMILIES",
    "AttentionSpec",
    "AttentionSublayer",
    "CanonicalTensors",
    "ChatTemplate",
    "Composition",
    "Decoder",
    "DenseLinear",
    "Embedding",
    "Family",
    "Head",
    "KvCache",
    "LayerCache",
    "Linear",
    "Message",
    "MlpSpec",
    "MlpSublayer",
    "ModelSpec",
    "NormSpec",
    "PackedLinear",
    "Placement",
    "Projected",
    "ProjectionSpec",
    "QuantParams",
    "QuantizedLinear",
    "QuantizedMatrix",
    "Role",
    "RopeKind",
    "RopeSpec",
    "RopeTable",
    "RopeTables",
    "Sublayer",
    "SublayerPart",
    "SublayerSpec",
    "TensorFiles",
    "TextStream",
    "Tokenizer",
    "attend",
    "build_embedding",
    "build_head",
    "build_sublayer",
    "carried",
    "check_dtypes",
    "check_ids",
    "check_layers",
    "expected_tensors",
    "fused_rows",
    "load_linear",
    "narrowed",
    "resolve",
    "unclaimed",
    "with_bos",
]
