"""Models: families, resolved specs, weights, layers, tokenizers, EXL2 tensors."""

from exl2flow.model.config.resolution import resolve
from exl2flow.model.config.spec import ModelSpec, expected_tensors
from exl2flow.model.config.sublayer_spec import (
    NormSpec,
    ProjectionSpec,
    Role,
    SublayerPart,
    SublayerSpec,
)
from exl2flow.model.files.canonical import CanonicalTensors, fused_rows
from exl2flow.model.files.exl2 import QuantizedMatrix, QuantParams
from exl2flow.model.files.headers import carried, check_layers, check_tied_head
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.attention import attend
from exl2flow.model.layers.cache import KvCache, LayerCache
from exl2flow.model.layers.decoder import (
    Decoder,
    Embedding,
    Head,
    build_embedding,
    build_head,
    check_ids,
    with_bos,
)
from exl2flow.model.layers.linear import DenseLinear, Linear, QuantizedLinear, narrowed
from exl2flow.model.layers.placement import Placement
from exl2flow.model.layers.rope import RopeTable, RopeTables
from exl2flow.model.layers.sublayer import Sublayer
from exl2flow.model.layers.sublayers import build_sublayer
from exl2flow.model.memory.composition import Composition
from exl2flow.model.text.chat_template import ChatTemplate
from exl2flow.model.text.messages import Message
from exl2flow.model.text.text_stream import TextStream
from exl2flow.model.text.tokenizer import Tokenizer

__all__ = [
    "CanonicalTensors",
    "ChatTemplate",
    "Composition",
    "Decoder",
    "DenseLinear",
    "Embedding",
    "Head",
    "KvCache",
    "LayerCache",
    "Linear",
    "Message",
    "ModelSpec",
    "NormSpec",
    "Placement",
    "ProjectionSpec",
    "QuantParams",
    "QuantizedLinear",
    "QuantizedMatrix",
    "Role",
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
    "check_ids",
    "check_layers",
    "check_tied_head",
    "expected_tensors",
    "fused_rows",
    "narrowed",
    "resolve",
    "with_bos",
]
