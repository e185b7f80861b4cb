"""The source model as quantization sees it: spec with overrides, lazy tensors, working dtype."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from exl2flow.core.errors import NonFiniteState
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.background import look_ahead, pinned
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.runtime.memory import free_memory, limit_memory, limit_of
from exl2flow.model import (
    CanonicalTensors,
    Head,
    ModelSpec,
    NormSpec,
    ProjectionSpec,
    Sublayer,
    SublayerSpec,
    TensorFiles,
    build_embedding,
    build_head,
    build_sublayer,
    resolve,
)
from exl2flow.model.config.spec import router_tensors
from exl2flow.model.layers.stream import CALIBRATION_ROWS, EXPERT_ROWS, rows_together
from exl2flow.quant.walk.working_memory import working_bytes

NARROW = torch.float16  # of weights on a GPU, for speed
PARTS = ("weight", "bias")  # of a projection in a file
DTYPE = torch.float32  # of weights and states while converting


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """A model read one sublayer at a time, its weights as `dtype`."""

    spec: ModelSpec
    tensors: TensorFiles
    device: torch.device
    dtype: torch.dtype = DTYPE
    keeps_states: bool = True  # on the device, if they fit

    @classmethod
    def open(
        cls,
        config: RunOptions,
        device: str,
        *,
        gradients: bool = False,
        keeps_states: bool = True,
    ) -> "SourceModel":
        """Open the source of a conversion; reads headers only.

        Args:
            config: the conversion.
            device: for the tensors.
            gradients: whether gradients are needed, which narrow weights do not have.
            keeps_states: whether states stay on the device, if they fit.
        """
        rope = config.rope
        spec = resolve(config.source).with_rope(scale=rope.scale, alpha=rope.alpha)
        where = torch.device(device)
        limit_memory(where, config.max_memory)
        dtype = NARROW if where.type == "cuda" and not gradients else DTYPE
        return cls(
            spec=spec,
            tensors=CanonicalTensors(spec),
            device=where,
            dtype=dtype,
            keeps_states=keeps_states,
        )

    def sublayer(self, sublayer: SublayerSpec) -> Sublayer:
        """Read one sublayer.

        Raises:
            NonFiniteState: a weight is NaN or infinite.
        """
        look()
        built = build_sublayer(
            self.spec, sublayer, self.tensors, dtype=self.dtype, device=self.device
        )
        for norm in sublayer.norms:
            self._check_norm(norm)
        if sublayer.sinks is not None:
            self._check_finite(sublayer.sinks, self.tensors.read(sublayer.sinks))
        for name, _ in sublayer.plain.values():
            self._check_finite(name, self.tensors.read(name))
        if sublayer.group is not None:
            for name in router_tensors(self.spec, sublayer.group):
                self._check_finite(name, self.tensors.read(name))
        tensors = {}
        for projection in sublayer.projections:
            linear = built.linears[projection.name]
            tensors[f"{projection.key}.weight"] = linear.weight
            if linear.bias is not None:
                tensors[f"{projection.key}.bias"] = linear.bias
        # a single check for all, because each one waits for the device
        if not torch.stack([_is_finite(tensor) for tensor in tensors.values()]).all():
            for name, tensor in tensors.items():
                self._check_finite(name, tensor)
        return built

    def sublayers(self, order: Sequence[SublayerSpec]) -> Iterator[Sublayer]:
        """Read sublayers in order; with a GPU, each while the previous one is in use.

        Raises:
            NonFiniteState: a weight is NaN or infinite.
        """

        def begin(sublayer: SublayerSpec) -> Callable[[], Sublayer]:
            if self.device.type == "cuda":
                keys = [projection.key for projection in sublayer.projections]
                self.tensors.fetch(f"{key}.{part}" for key in keys for part in PARTS)
            return partial(self.sublayer, sublayer)

        return look_ahead(order, begin, depth=1)

    def head(self) -> Head:
        """Read the final norm and the head.

        Raises:
            NonFiniteState: a weight is NaN or infinite.
        """
        head = build_head(self.spec, self.tensors, dtype=self.dtype, device=self.device)
        self._check_finite(f"{self.spec.head.key}.weight", head.linear.weight)
        return head

    def _check_norm(self, norm: NormSpec) -> None:
        for name in norm.names:
            self._check_finite(name, self.tensors.read(name))

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if not _is_finite(tensor):
            raise NonFiniteState(
                f"`{name}` of `{self.spec.source_dir}` holds NaN or infinity in "
                f"{non_finite_share(tensor)}; download or export the model again"
            )

    def check(self) -> None:
        """Read all weights.

        Raises:
            NonFiniteState: one is NaN or infinite.
        """
        self.initial_states(torch.zeros((1, 1), dtype=torch.int64))
        for sublayer in self.spec.sublayers:
            self.sublayer(sublayer)

    def initial_states(self, ids: torch.Tensor, here: Sequence[int] | None = None) -> torch.Tensor:
        """Return the hidden states entering the first sublayer, fp32 (rows, t, hidden).

        Their memory comes from `room`. Rows that begin with a negative id become Gaussian noise
        with the mean and deviation of all other rows (format section 6).

        Args:
            ids: int64 (rows, t).
            here: the rows to return; None: all.

        Raises:
            NonFiniteState: the embedding, the final norm or the head is NaN or infinite.
        """
        name = f"{self.spec.embedding_key}.weight"
        if self.device.type == "cuda":
            self.tensors.fetch([f"{self.spec.head.key}.weight", name])
        self.head()  # used last, checked first
        dtype = self.tensors.dtype(name)
        embedding = build_embedding(self.spec, self.tensors, dtype=dtype, device=self.device)
        self._check_finite(name, embedding.weight)
        self._check_norm(self.spec.final_norm)
        noise = ids[:, 0] < 0
        if here is not None and not noise.any():
            ids, noise, here = ids[here], noise[here], None
        states = self.room((*ids.shape, self.spec.hidden_size))
        for row, tokens in zip(states, ids, strict=True):
            look()
            row.copy_(embedding(tokens[None], dtype=DTYPE)[0])
        if noise.any():
            others = states[~noise] if (~noise).any() else states
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(states[noise].shape, generator=generator).to(states.device)
            states[noise] = drawn * others.std() + others.mean()
        return states if here is None else self.placed(states[here])

    def room(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return fp32 memory for states: on the device if they fit there beside a sublayer's work.

        With a GPU, main memory is pinned.
        """
        if self.device.type == "cpu":
            return torch.empty(shape, dtype=DTYPE)
        work = working_bytes(self.spec, limit_of(self.device))
        needed = math.prod(shape) * DTYPE.itemsize + work
        if self.keeps_states and needed <= free_memory(self.device):
            with suppress(torch.OutOfMemoryError):
                return torch.empty(shape, dtype=DTYPE, device=self.device)
        return torch.empty(shape, dtype=DTYPE, pin_memory=True)

    def entering(self, states: torch.Tensor, sublayer: SublayerSpec | None) -> torch.Tensor:
        """Return states, or gradients by them, as a sublayer takes and returns them.

        Args:
            states: fp32 (rows, t, hidden), or pairs (rows, t, 2 · hidden), see `layers.experts`.
            sublayer: None: the head.

        Returns:
            The same states, or others in memory from `room`.
        """
        width = self.spec.hidden_size * (2 if sublayer is not None and sublayer.is_paired else 1)
        had = states.shape[-1]
        if had == width:
            return states
        changed = self.room((*states.shape[:-1], width))
        changed[..., :had].copy_(states[..., :width])
        changed[..., had:].zero_()
        return changed

    def placed(self, states: torch.Tensor) -> torch.Tensor:
        """Return states in memory from `room`."""
        if self.device.type == "cpu":
            return states
        return self.room(tuple(states.shape)).copy_(states)


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Tell whether all elements are finite, bool (), without a copy of a large tensor."""
    largest: torch.Tensor = torch.linalg.vector_norm(tensor, ord=math.inf)
    return largest.isfinite()


def non_finite_share(tensor: torch.Tensor) -> str:
    """Return how many elements are NaN or infinite, in words."""
    return f"{int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} elements"


def row_batches(
    sublayer: Sublayer, states: torch.Tensor, pieces: Sequence[slice] | None = None
) -> Iterator[slice]:
    """Yield batches of rows of states (rows, t, hidden) that pass a sublayer together; 1 on a CPU.

    The size depends on shapes and the memory limit only, because results depend on it. Batches of a
    piece are about equal; none has rows of two. None: all rows are one piece.
    """
    device, together = device_of(sublayer), 1
    if device.type == "cuda":
        spec = sublayer.spec
        room, feature = limit_of(device), widest(spec.projections)
        together = rows_together(feature, states.shape[1], room, most=most_rows(spec))
    for piece in [slice(0, len(states))] if pieces is None else pieces:
        rows = piece.stop - piece.start
        count = -(-rows // together)
        cuts = [piece.start + rows * batch // max(1, count) for batch in range(count + 1)]
        yield from (slice(*ends) for ends in pairwise(cuts))


def most_rows(sublayer: SublayerSpec) -> int:
    """Return how many rows pass a sublayer together on a GPU that has room for them."""
    return CALIBRATION_ROWS if sublayer.group is None else EXPERT_ROWS


def widest(projections: Sequence[ProjectionSpec]) -> int:
    """Return the features of the widest activation that projections read or write."""
    return max(max(p.in_features, p.out_features) for p in projections)


def placed_like(states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return `output` on the device of `states`; a copy to pinned memory may still be running."""
    return pinned(output) if states.is_pinned() else output.to(states.device)


def relative_distance(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return ‖output - expected‖ / ‖expected‖, (), on the device of `output`."""
    expected = expected.to(output.device, non_blocking=True)
    distance = torch.linalg.vector_norm(output - expected)
    ratio: torch.Tensor = distance / torch.linalg.vector_norm(expected)
    return ratio


def device_of(sublayer: Sublayer) -> torch.device:
    """Return the device of a sublayer's weights."""
    return next(iter(sublayer.linears.values())).weight.device


class StatesCheck:
    """Rejects NaN or infinity in hidden states; waits for the device only once."""

    def __init__(self, where: str, first: int = 0) -> None:
        self.where, self.first = where, first  # number of the first row
        self._rows: list[int] = []
        self._largest: list[torch.Tensor] = []

    def add(self, rows: Sequence[int], states: torch.Tensor) -> None:
        """Check the states of some rows, fp32 (rows, t, hidden)."""
        self._rows.extend(rows)
        self._largest.append(torch.linalg.vector_norm(states, ord=math.inf, dim=(1, 2)))

    def finish(self, found: torch.Tensor | Mapping[int, torch.Tensor]) -> None:
        """Tell what was found.

        Args:
            found: row → its states.

        Raises:
            NonFiniteState: naming sublayer, row and share of elements.
        """
        if not self._largest:
            return
        finite = torch.cat(self._largest).isfinite().tolist()
        for row, is_finite in zip(self._rows, finite, strict=True):
            if not is_finite:
                raise NonFiniteState(
                    f"hidden states after `{self.where}` hold NaN or infinity in "
                    f"{non_finite_share(found[row])} of row {self.first + row}; the model "
                    "overflows on this text: check the source, or try other calibration data"
                )
