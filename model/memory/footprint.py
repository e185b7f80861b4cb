"""GPU memory of a running model: weights, cache, layout, workspace.

Everything but `DEVICE_BYTES` is computed from shapes. The weights are the bytes of the model's
files: embedding, norms, packed codes, scales and permutations, head.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from exl2flow.kernels import CACHE_FORMATS, MOST_BESIDE, PAGE_TOKENS, DeltaSlots
from exl2flow.kernels.interface.cache_formats import LayerStore
from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.interface.packed import TILE
from exl2flow.model.config.delta_spec import DeltaSpec
from exl2flow.model.config.experts_spec import MlpSpec
from exl2flow.model.config.mtp import DRAFT_TILES, MtpSpec
from exl2flow.model.config.spec import AttentionSpec, ModelSpec
from exl2flow.model.config.sublayer_spec import ProjectionSpec, SublayerSpec

# A process besides its tensors: CUDA context, compiled kernels, cuBLAS workspaces and recorded
# graphs (0.80 GB measured, docs/benchmarks.md), and fragmentation of the allocator
DEVICE_BYTES = 2**30
PROMPT_TOKENS = 2048  # of a prompt in one forward pass
SCALE_BYTES = 1  # per column and group in GPU layout; files take half
ORDER_BYTES = 8  # per in-feature in GPU layout; files take four
HALF = 2  # bytes
PLACE_BYTES = 2  # of an in-feature of an expert, where its row is
EXPERT_BYTES = 2048  # of an expert's addresses and lists of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Size of the texts that a model processes at once.

    context: tokens of the longest text; pages: of the cache, besides a spare one; sequences: that
    are decoded together.
    """

    context: int
    pages: int
    cache_format: str
    sequences: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """Bytes that parts of a model need on one device besides those of its files.

    cache, layout: see `Footprint`, the sum of the parts; the others are the most of one part.
    rotations: tables that all layers share; attending, computing: what a prompt needs in an
    attention, with one layer's keys and values, and between attentions, with decoded matrices;
    logits.
    """

    cache: int = 0
    layout: int = 0
    rotations: int = 0
    attending: int = 0
    computing: int = 0
    logits: int = 0

    def __add__(self, other: "DeviceNeed") -> "DeviceNeed":
        """Return the needs of both on one device."""
        return DeviceNeed(
            cache=self.cache + other.cache,
            layout=self.layout + other.layout,
            rotations=max(self.rotations, other.rotations),
            attending=max(self.attending, other.attending),
            computing=max(self.computing, other.computing),
            logits=max(self.logits, other.logits),
        )

    @property
    def work(self) -> int:
        """Bytes that are free again after each pass."""
        return max(self.attending, self.computing) + self.logits

    @property
    def total(self) -> int:
        """The sum."""
        return self.cache + self.layout + self.rotations + self.work

    @classmethod
    def of_embedding(cls, spec: ModelSpec, texts: Texts) -> "DeviceNeed":
        """Return the needs of the embedding: hidden states."""
        return cls(computing=HALF * _prompt_tokens(texts) * 4 * spec.hidden_size)

    @classmethod
    def of_layer(
        cls, spec: ModelSpec, index: int, texts: Texts, *, packed: bool = True
    ) -> "DeviceNeed":
        """Return the needs of a layer; `packed`: its matrices are quantized."""
        sublayers = [s for s in spec.sublayers if s.layer_index == index]
        matrices = [p for s in sublayers for p in s.projections]
        attention = spec.attentions[index]
        largest = max(p.numel for p in matrices)
        beside = min(max(map(_beside, sublayers)), MOST_BESIDE // HALF)
        attended = 4 * spec.hidden_size + 2 * attention.width
        widths = (4 + packed) * spec.hidden_size + 3 * spec.widest_mlp + _expert_widths(spec, index)
        tokens, copied = _prompt_tokens(texts), pages(texts.context) * PAGE_TOKENS
        grown = sum(_layout_bytes(p.in_features, p.out_features) for p in matrices)
        return cls(
            cache=layer_bytes(attention, texts.pages + 1, texts.cache_format)
            + state_bytes(attention, texts.sequences),
            layout=packed * grown + _expert_tables(spec, index, matrices),
            rotations=_rotation_bytes(spec, texts),
            attending=HALF * (tokens * attended + 2 * kv_width(attention) * copied),
            computing=HALF * (tokens * widths + packed * max(largest, beside)),
        )

    @classmethod
    def of_block(cls, block: MtpSpec, texts: Texts) -> "DeviceNeed":
        """Return the needs of a block that drafts tokens: its layer, and its copy of the head."""
        head, joint = block.layer.head, block.joint
        copied = min(sum(DRAFT_TILES) * TILE, head.out_features) * head.in_features
        grown = _layout_bytes(joint.in_features, joint.out_features)
        return cls.of_layer(block.layer, 0, texts) + cls(layout=grown + copied)

    @classmethod
    def of_head(cls, spec: ModelSpec, texts: Texts, *, packed: bool = True) -> "DeviceNeed":
        """Return the needs of the head: logits fp32, and what sorts them."""
        return cls(
            layout=packed * _layout_bytes(spec.head.in_features, spec.head.out_features),
            logits=HALF * (1 + 8 * texts.sequences) * 2 * spec.vocab_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that a model needs besides those of its files.

    cache: keys and values of the context, and states; layout: the most by which scales and
    permutations grow in GPU layout; work: activations of a prompt, one layer's cache, decoded
    matrices, and rotations; device: `DEVICE_BYTES`.
    """

    context: int
    cache_format: str
    cache: int
    layout: int
    work: int
    device: int = DEVICE_BYTES

    @property
    def total(self) -> int:
        """The sum."""
        return self.cache + self.layout + self.work + self.device

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        context: int,
        cache_format: str,
        sequences: int = 1,
        tokens: int | None = None,
        block: MtpSpec | None = None,
    ) -> "Footprint":
        """Return the needs for sequences of `context` tokens; they do not depend on the bits.

        tokens: of the cache; None: as many as the sequences have together. block: drafts tokens.
        """
        texts = Texts(
            context=context,
            pages=sequences * pages(context) if tokens is None else pages(tokens),
            cache_format=cache_format,
            sequences=sequences,
        )
        share = DeviceNeed.of_embedding(spec, texts) + DeviceNeed.of_head(spec, texts)
        for index in range(spec.num_layers):
            share += DeviceNeed.of_layer(spec, index, texts)
        if block is not None:
            share += DeviceNeed.of_block(block, texts)
        return cls(
            context=context,
            cache_format=cache_format,
            cache=share.cache,
            layout=share.layout,
            work=share.work + share.rotations,
        )


def exact_format(device: torch.device) -> str:
    """Return the cache format that stores keys and values as a model computes them on a device."""
    return "fp16" if device.type == "cuda" else "fp32"


def pages(tokens: int) -> int:
    """Return how many cache pages hold this many tokens."""
    return -(-tokens // PAGE_TOKENS)


def cache_bytes(spec: ModelSpec, *, context: int, cache_format: str) -> int:
    """Return the bytes reserved for the cache of a text, its states included."""
    count = pages(context)
    return sum(
        layers * (layer_bytes(layer, count, cache_format) + state_bytes(layer, 1))
        for layer, layers in Counter(spec.attentions).items()
    )


@cache
def store_bytes(
    kv_heads: int, head_dim: int, count: int, cache_format: str, page_tokens: int = PAGE_TOKENS
) -> int:
    """Return the bytes reserved for `count` pages of one layer."""
    form, meta = CACHE_FORMATS[cache_format], torch.device("meta")
    return LayerStore.empty(
        form,
        pages=count,
        kv_heads=kv_heads,
        head_dim=head_dim,
        device=meta,
        page_tokens=page_tokens,
    ).nbytes


def kv_width(layer: AttentionSpec | DeltaSpec) -> int:
    """Return the elements of all keys of a token, of which a layer with a state has none."""
    return layer.kv_width if isinstance(layer, AttentionSpec) else 0


def layer_bytes(
    layer: AttentionSpec | DeltaSpec, count: int, cache_format: str, page_tokens: int = PAGE_TOKENS
) -> int:
    """Return the bytes reserved for `count` pages of a layer."""
    if not isinstance(layer, AttentionSpec):
        return 0
    return store_bytes(layer.num_kv_heads, layer.head_dim, count, cache_format, page_tokens)


def state_bytes(layer: AttentionSpec | DeltaSpec, slots: int) -> int:
    """Return the bytes reserved on a GPU for the states of a layer, and of a spare slot."""
    if isinstance(layer, AttentionSpec):
        return 0
    return delta_slots(layer, slots + 1, device=torch.device("meta")).nbytes


def delta_slots(
    delta: DeltaSpec, *leading: int, device: torch.device, page_tokens: int = PAGE_TOKENS
) -> DeltaSlots:
    """Return states (*leading, …), the last of which are slots, for a device."""
    slots = DeltaSlots.empty(
        *leading,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        channels=delta.channels,
        taps=delta.conv,
        element=torch.float32 if device.type == "cpu" else torch.float16,
        device=device,
    )
    return replace(slots, page_tokens=page_tokens)


def _rotation_bytes(spec: ModelSpec, texts: Texts) -> int:
    """Return the bytes of cosines and sines of all positions, fp32."""
    return texts.context * sum(4 * rope.rotary_dim for rope in spec.ropes)


def _prompt_tokens(texts: Texts) -> int:
    """Return the tokens of prompts in one forward pass."""
    return min(PROMPT_TOKENS, texts.context * texts.sequences)


def _expert_widths(spec: ModelSpec, index: int) -> int:
    """Return the numbers of a token in a pass of many: what each of its experts reads and adds."""
    layer = spec.mlps[index]
    if isinstance(layer, MlpSpec):
        return 0
    shared = 0 if layer.shared is None else layer.shared.intermediate_size
    widest = max(layer.expert.intermediate_size, shared)
    slots = layer.rule.top + (layer.shared is not None)
    return slots * (max(spec.hidden_size, widest) + widest + spec.hidden_size)


def _expert_tables(spec: ModelSpec, index: int, matrices: Sequence[ProjectionSpec]) -> int:
    """Return the bytes of routers in fp32, and of the tables by which tokens find experts."""
    layer = spec.mlps[index]
    if isinstance(layer, MlpSpec):
        return 0
    router = HALF * layer.rule.experts * spec.hidden_size
    places = sum(p.in_features for p in matrices if p.is_routed and p.role in ("up", "down"))
    return router + PLACE_BYTES * places + EXPERT_BYTES * layer.rule.experts


def _beside(sublayer: SublayerSpec) -> int:
    """Return the elements of the linears that read the same."""
    captures = dict.fromkeys(p.capture for p in sublayer.projections)
    return max(sum(p.numel for p in sublayer.reading(capture)) for capture in captures)


def _layout_bytes(rows: int, columns: int) -> int:
    """Return the most by which a matrix grows in GPU layout: with the smallest groups."""
    padded = -(-columns // PANEL_ROWS) * PANEL_ROWS  # tiles are as wide as panels are high
    groups = rows // PANEL_ROWS
    spare = (padded - columns) * rows  # codes of padding columns, at most a byte each
    return spare + groups * padded * SCALE_BYTES // 2 + rows * ORDER_BYTES // 2
