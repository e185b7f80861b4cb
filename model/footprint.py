"""GPU memory of a running model: weights, cache, layout, workspace.

Everything but `DEVICE_BYTES` is computed from shapes. The weights are the bytes of the model's
files: embedding, norms, packed codes, scales and permutations, head.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from exl2flow.kernels import CACHE_FORMATS, MOST_BESIDE, PAGE_TOKENS
from exl2flow.kernels.cache_formats import LayerStore
from exl2flow.kernels.groups import PANEL_ROWS
from exl2flow.model.spec import ModelSpec
from exl2flow.model.sublayer_spec import SublayerSpec

# A process besides its tensors: CUDA context, compiled kernels, cuBLAS workspaces and recorded
# graphs (0.80 GB measured, docs/benchmarks.md), and fragmentation of the allocator
DEVICE_BYTES = 2**30
PROMPT_TOKENS = 2048  # of a prompt in one forward pass
SCALE_BYTES = 1  # per column and group in GPU layout; files take half
ORDER_BYTES = 8  # per in-feature in GPU layout; files take four
HALF = 2  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a model needs besides the bytes of its files; all in bytes.

    cache: keys and values of the context; layout: the most by which scales and permutations grow in
    GPU layout; work: activations of a prompt, one layer's cache and decoded matrices; device:
    `DEVICE_BYTES`.
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
        cls, spec: ModelSpec, *, context: int, cache_format: str, sequences: int = 1
    ) -> "Footprint":
        """Return the needs for sequences of `context` tokens; they do not depend on the bits."""
        matrices = [p for s in spec.sublayers for p in s.projections] + [spec.head]
        largest = max(p.in_features * p.out_features for p in matrices[:-1])
        beside = max(_beside(s) for s in spec.sublayers)
        decoded = max(largest, min(beside, MOST_BESIDE // HALF))
        widest_keys = max(attention.kv_width for attention in spec.attentions)
        held = 2 * widest_keys * pages(context) * PAGE_TOKENS
        widths = 4 * spec.hidden_size + 3 * spec.mlp.intermediate_size
        widths += 2 * max(attention.width for attention in spec.attentions)
        activations = min(PROMPT_TOKENS, context * sequences) * widths
        logits = (1 + 8 * sequences) * 2 * spec.vocab_size  # fp32, and what sorts them
        return cls(
            context=context,
            cache_format=cache_format,
            cache=cache_bytes(
                spec,
                context=(sequences * pages(context) + 1) * PAGE_TOKENS,  # and a spare page
                cache_format=cache_format,
            ),
            layout=sum(_layout_bytes(p.in_features, p.out_features) for p in matrices),
            work=HALF * (activations + held + decoded + logits),
        )


def exact_format(device: torch.device) -> str:
    """Return the cache format that stores keys and values as a model computes them on a device."""
    return "fp16" if device.type == "cuda" else "fp32"


def pages(tokens: int) -> int:
    """Return how many cache pages hold this many tokens."""
    return -(-tokens // PAGE_TOKENS)


def cache_bytes(spec: ModelSpec, *, context: int, cache_format: str) -> int:
    """Return the bytes reserved for a cache."""
    shapes = Counter((layer.num_kv_heads, layer.head_dim) for layer in spec.attentions)
    form, meta = CACHE_FORMATS[cache_format], torch.device("meta")
    return sum(
        layers
        * LayerStore.empty(
            form, pages=pages(context), kv_heads=kv_heads, head_dim=head_dim, device=meta
        ).nbytes
        for (kv_heads, head_dim), layers in shapes.items()
    )


def _beside(sublayer: SublayerSpec) -> int:
    """Return the elements of the linears that read the same."""
    captures = {p.capture for p in sublayer.projections}
    return max(
        sum(p.in_features * p.out_features for p in sublayer.reading(capture))
        for capture in captures
    )


def _layout_bytes(rows: int, columns: int) -> int:
    """Return the most by which a matrix grows in GPU layout: with the smallest groups."""
    padded = -(-columns // PANEL_ROWS) * PANEL_ROWS  # tiles are as wide as panels are high
    groups = rows // PANEL_ROWS
    spare = (padded - columns) * rows  # codes of padding columns, at most a byte each
    return spare + groups * padded * SCALE_BYTES // 2 + rows * ORDER_BYTES // 2
