"""The gated delta rule on a GPU: for a few new tokens of each text, and for prompts."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from exl2flow.kernels.cuda.compiler import SCAN_COLUMNS, SCAN_ROOM, launch, raw_stream
from exl2flow.kernels.interface.cache_formats import STEP_TOKENS
from exl2flow.kernels.interface.delta import CHUNK_TOKENS, DeltaArgs, DeltaSegment, DeltaSlots
from exl2flow.kernels.reference import delta as torch_delta
from exl2flow.kernels.streams import on_device

HEAD_DIM, TAPS = 128, 4  # that the kernels have
FEW_TOKENS = 8  # of a text's new ones, which need less shared memory than more do
THREADS = 256  # of a CTA; in a step, two for a column of a state
WARPS = THREADS // 32


def delta_step(
    x: torch.Tensor,
    qkv: torch.Tensor,
    z: torch.Tensor,
    args: DeltaArgs,
    slots: DeltaSlots,
    lengths: torch.Tensor,
    to: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Ops.delta_step`: one launch, a CTA for a value head of a text."""
    if not _fits(x, args):
        return torch_delta.delta_step(x, qkv, z, args, slots, lengths, to)
    batch, count, hidden = x.shape
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    launch(
        "delta.cu",
        f"delta_step<{FEW_TOKENS if count <= FEW_TOKENS else STEP_TOKENS}>",
        (args.value_heads, batch),
        *(x.contiguous(), qkv.contiguous(), z.contiguous(), y, 0 if to is None else to, lengths),
        *(args.conv, args.decay, args.step, args.maps, args.norm),
        *(slots.state, slots.behind, slots.keys, slots.deltas, slots.decays, slots.inputs),
        *(slots.aside, slots.aside_inputs, slots.aside_at),
        *(count, hidden, args.key_heads, np.float32(args.eps)),
        threads=THREADS,
    )
    return y


def delta_scan(
    x: torch.Tensor,
    qkv: torch.Tensor,
    z: torch.Tensor,
    args: DeltaArgs,
    slots: DeltaSlots,
    segments: Sequence[DeltaSegment],
) -> torch.Tensor:
    """See `Ops.delta_scan`: all chunks at once, then each text's in turn, then the outputs.

    Tokens before the first multiple of 64 are a chunk of their own.
    """
    if not _fits(x, args):
        return torch_delta.delta_scan(x, qkv, z, args, slots, segments)
    heads = args.key_heads, args.value_heads
    logits = torch.mm(x[0], args.maps.half().mT, out_dtype=torch.float32)
    table, longest, chunks = _table(tuple(segments), x.device, raw_stream(x.get_device()))
    halves, floats = z.new_empty, logits.new_empty
    keys, queries = halves(2, chunks, args.key_heads, CHUNK_TOKENS, HEAD_DIM)
    solved, scores = halves(2, chunks, args.value_heads, CHUNK_TOKENS, CHUNK_TOKENS)
    logs = floats(chunks, args.value_heads, CHUNK_TOKENS)
    outputs, y = floats(z.shape), halves(z.shape)
    qkv, parts = qkv.contiguous(), (keys, queries, solved, scores, logs)
    launch(
        "delta_scan.cu",
        "delta_chunks",
        (longest, args.key_heads, len(segments)),
        *(qkv, logits, table, args.conv, args.decay, args.step),
        *(slots.inputs, slots.aside_inputs, *parts, *heads),
        threads=THREADS,
    )
    launch(
        "delta_scan.cu",
        "delta_scan",
        (args.value_heads * HEAD_DIM // SCAN_COLUMNS, len(segments)),
        *(qkv, table, args.conv, slots.inputs, *parts, slots.state, slots.aside, outputs, *heads),
        threads=THREADS,
        shared=SCAN_ROOM,
    )
    launch(
        "delta_scan.cu",
        "delta_gate",
        (x.shape[1], -(-args.value_heads // WARPS)),
        *(qkv, z.contiguous(), y, table, args.norm, outputs, slots.inputs, slots.behind),
        *(slots.aside_at, *heads, np.float32(args.eps)),
        threads=THREADS,
    )
    return y


def _fits(x: torch.Tensor, args: DeltaArgs) -> bool:
    sizes = (args.key_dim, args.value_dim, args.conv.shape[1])
    return x.dtype == torch.float16 and sizes == (HEAD_DIM, HEAD_DIM, TAPS)


@lru_cache(maxsize=4)  # a pass asks once per layer
def _table(
    segments: tuple[DeltaSegment, ...], device: torch.device, _stream: int
) -> tuple[torch.Tensor, int, int]:
    """Return the segments for the kernels of a stream, the most chunks of one, those of all."""
    rows, longest, chunks = list[list[int]](), 0, 0
    for s in segments:
        rows.append([s.slot, s.begin, s.start, s.count, chunks])
        count = -(-(s.begin + s.count) // CHUNK_TOKENS) - s.begin // CHUNK_TOKENS
        longest, chunks = max(longest, count), chunks + count
    return on_device(torch.tensor(rows, dtype=torch.int32), device), longest, chunks
