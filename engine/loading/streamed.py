"""Run many rows of text through a model with one sublayer in memory at a time.

On a GPU a model computes as at inference: packed matrices, fp16 states, the same kernels. A
reference keeps fp32 states over fp16 weights there. On a CPU everything is fp32.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from exl2flow.core.runtime.background import look_ahead
from exl2flow.core.runtime.memory import free_memory
from exl2flow.kernels import Threads
from exl2flow.model import (
    CanonicalTensors,
    Sublayer,
    SublayerSpec,
    build_embedding,
    build_head,
    resolve,
)
from exl2flow.model.layers.experts import entering
from exl2flow.model.layers.stream import StreamedSublayers, rows_together

FP32 = torch.float32
TOKENS_TOGETHER = 8192  # that pass a sublayer together on a GPU ...
WIDE_TENSORS = 12  # ... if this many fp32 tensors of the widest activation fit
SUBLAYERS_AHEAD = 2  # read while a GPU computes another one
Look = Callable[[SublayerSpec], None]


class StreamedModel:
    """A model folder; only embedding and head stay in memory."""

    def __init__(self, folder: Path, device: torch.device, *, is_reference: bool = False) -> None:
        """Open a folder and load its embedding and head.

        Raises:
            SourceModelError: the folder is not a runnable model.
        """
        self.folder, self.is_reference = folder, is_reference
        self.device = device
        on_gpu = device.type == "cuda"
        packed = on_gpu and not is_reference
        spec = resolve(folder)
        self.spec = spec.undivided() if packed else spec  # fp16 sums of experts are not divided
        tensors = CanonicalTensors(self.spec)
        self.bytes = sum(path.stat().st_size for path in tensors.files)
        weights = torch.float16 if on_gpu else FP32
        self.dtype = FP32 if is_reference else weights  # of hidden states
        self.embedding = build_embedding(self.spec, tensors, dtype=self.dtype, device=device)
        self._sublayers = StreamedSublayers(
            spec=self.spec, tensors=tensors, dtype=weights, device=device, packed=packed
        )
        self.head = build_head(
            self.spec,
            tensors,
            dtype=weights,
            device=device,
            embedding=self.embedding if self.dtype == weights else None,
            packed=packed,
        )

    def states(
        self, texts: Sequence[torch.Tensor], look: Look = lambda spec: None
    ) -> list[torch.Tensor]:
        """Return the states of several texts after the last sublayer, (rows, t, hidden) each.

        texts: int64 (rows, t) each, on the device; row lengths may differ between texts. look:
        called with each sublayer before it runs; may raise to stop.
        """
        hidden = [torch.cat([self.embedding(row[None]) for row in ids]) for ids in texts]
        for sublayer in self._read():
            size = self.spec.hidden_size
            hidden = [entering(states, sublayer.spec, size) for states in hidden]
            for states in hidden:
                for rows in torch.split(states, self._rows_together(states.shape[1])):
                    look(sublayer.spec)
                    rows.copy_(sublayer(rows))
        return [states[..., : self.spec.hidden_size] for states in hidden]

    def _rows_together(self, tokens: int) -> int:
        """Return how many rows of `tokens` tokens pass a sublayer together; 1 on a CPU."""
        if self.device.type == "cpu":
            return 1
        spec = self.spec
        attention = max(layer.width for layer in spec.attentions)
        widest = max(spec.hidden_size, spec.widest_mlp, attention)
        return rows_together(
            widest,
            tokens,
            free_memory(self.device),
            tensors=WIDE_TENSORS,
            most=TOKENS_TOGETHER // tokens,
        )

    def _read(self) -> Iterator[Sublayer]:
        """Yield the sublayers in order; for a GPU, threads prefetch the next ones."""
        if self.device.type == "cpu":
            yield from self._sublayers
            return
        with Threads(SUBLAYERS_AHEAD, self.device) as threads:

            def begin(sublayer: SublayerSpec) -> Callable[[], Sublayer]:
                return threads.begin(partial(self._sublayers.read, sublayer, self.device)).result

            yield from look_ahead(self._sublayers.spec.sublayers, begin, depth=SUBLAYERS_AHEAD)
