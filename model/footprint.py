"""GPU memory of a running model: weights, cache, layout, workspace.

Everything is computed from shapes except `DEVICE_BYTES`. Weights are the bytes of the model's
files: embedding, norms, packed codes, scales and permutations, head.
"""

from dataclasses import dataclass

import torch

from exl2flow.kernels import CACHE_FORMATS, PAGE_TOKENS
from exl2flow.kernels.cache_formats import LayerStore
from exl2flow.kernels.groups import PANEL_ROWS
from exl2flow.model.spec import ModelSpec

# What a process takes besides its tensors: the CUDA context, compiled kernels, cuBLAS's workspace
# and recorded steps (0.80 GB on an H200, docs/benchmarks.md), splinters of the allocator.
DEVICE_BYTES = 2**30
PROMPT_TOKENS = 2048  # of a prompt are processed at a time
SCALE_BYTES = 1  # of a column and group, laid out; files have half of it
ORDER_BYTES = 8  # of an in-feature, laid out; files have four
HALF = 2  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a model needs besides the bytes of its files; all in bytes.

    cache: keys and values of the context; layout: how much scales and permutations grow in the
    layout of the kernels, at most; work: activations of a prompt, one layer's cache and one matrix
    as fp16; device: a constant.
    """

    context: int
    cache_format: str
    cache: int
    layout: int
    work: int
    device: int = DEVICE_BYTES

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.cache + self.layout + self.work + self.device

    @classmethod
    def of(cls, spec: ModelSpec, *, context: int, cache_format: str) -> "Footprint":
        """Return the footprint, whatever the bits, for one sequence of `context` tokens."""
        attention, mlp = spec.attention, spec.mlp
        matrices = [p for s in spec.sublayers for p in s.projections] + [spec.head]
        largest = max(p.in_features * p.out_features for p in matrices[:-1])
        held = 2 * attention.num_kv_heads * attention.head_dim * pages(context) * PAGE_TOKENS
        widths = 4 * spec.hidden_size + 3 * mlp.intermediate_size
        widths += 2 * attention.num_heads * attention.head_dim
        activations = min(PROMPT_TOKENS, context) * widths
        return cls(
            context=context,
            cache_format=cache_format,
            cache=cache_bytes(spec, context=context, cache_format=cache_format),
            layout=sum(_layout_bytes(p.in_features, p.out_features) for p in matrices),
            work=HALF * (activations + held + largest + 2 * spec.vocab_size),
        )


def pages(tokens: int) -> int:
    """Return the number of cache pages for so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def cache_bytes(spec: ModelSpec, *, context: int, cache_format: str) -> int:
    """Return the bytes that a cache reserves for its pages."""
    store = LayerStore.empty(
        CACHE_FORMATS[cache_format],
        pages=pages(context),
        kv_heads=spec.attention.num_kv_heads,
        head_dim=spec.attention.head_dim,
        device=torch.device("meta"),
    )
    return spec.num_layers * store.nbytes


def _layout_bytes(rows: int, columns: int) -> int:
    """Return how much a matrix grows at most when it is laid out, with the smallest groups."""
    padded = -(-columns // PANEL_ROWS) * PANEL_ROWS  # tiles are as wide as panels are high
    groups = rows // PANEL_ROWS
    spare = (padded - columns) * rows  # codes of columns that pad it, at most a byte each
    return spare + groups * padded * SCALE_BYTES // 2 + rows * ORDER_BYTES // 2
