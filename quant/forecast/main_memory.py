"""Main memory that each stage takes where its work is on a GPU, from shapes alone.

The work itself is on the GPU. Main memory holds what is on its way there or back: weights, Fisher
factors, results, states. It is pinned. torch makes pinned blocks powers of two and keeps them for
as long as the process lives, so a stage also has the blocks of those before it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.background import HELPERS, MOST_WAITING
from exl2flow.core.runtime.memory import pinned_block
from exl2flow.core.store.need import Need
from exl2flow.model import CanonicalTensors, ModelSpec, ProjectionSpec
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.model.files.weights import PIECE_BYTES
from exl2flow.quant.quantize.matrix_work import ERROR_ROWS
from exl2flow.quant.sensitivity.fisher import block_size
from exl2flow.quant.sensitivity.stage import SENSITIVITY, factor_bytes_of, head_block
from exl2flow.quant.walk.needs import FLOAT, HALF, Card
from exl2flow.quant.walk.pinned import is_tall
from exl2flow.quant.walk.walk import STATE_FILES

MAKERS = ("refine", "quantize")  # of matrices
RESULT = 1  # bytes per weight of a packed matrix, at most; beside it are its values

T = TypeVar("T")
Blocks = Counter[int]  # size of a pinned block → how many
Part = tuple[tuple[int, int, int], ...]  # of a sublayer or the head: capture, in- and out-features


def beside_gpu(
    config: RunOptions, spec: ModelSpec, card: Card, needs: Mapping[str, Need]
) -> dict[str, Need]:
    """Return the needs with the main memory of a machine that has this GPU."""
    forecast, found = _Forecast(config, spec, card), dict[str, Need]()
    pool: Blocks = Counter()
    for stage, need in needs.items():
        for blocks in forecast.moments(stage, need):
            pool |= blocks
        own = forecast.not_pinned(stage, need)
        pinned = sum(size * count for size, count in pool.items())
        found[stage] = replace(need, memory_bytes=own + pinned)
    return found


class _Forecast:
    """Sizes of what a run over a model moves between main memory and the GPU."""

    def __init__(self, config: RunOptions, spec: ModelSpec, card: Card) -> None:
        self.config, self.spec, self.card = config, spec, card
        self.parts = [*(_part(s.projections) for s in spec.sublayers), _part((spec.head,))]
        self.groups = {
            part: factor_bytes_of(sublayer, block=config.sensitivity.block)
            for part, sublayer in zip(self.parts, spec.sublayers, strict=False)
            if sublayer.group is not None and sublayer.group.is_last
        }
        self.itemsize = _itemsize(spec)
        self.embedding = spec.vocab_size * spec.hidden_size

    def moments(self, stage: str, need: Need) -> Iterator[Blocks]:
        """Yield what a stage pins at the same time: at its start, during its walk, at its end."""
        if stage == "compile":
            matrices = [(k, n) for part in self.parts for _, k, n in part]
            yield _most(matrices, HELPERS, lambda matrix: [HALF * _stored(*matrix)])
        if need.holds != "sublayer":
            return
        yield _blocks([self.itemsize * size for size in (self.spec.head.numel, self.embedding)])
        yield self._walk(stage, need)
        head = _stored(*self.parts[-1][0][1:])
        if is_tall(head, self.card.memory):
            yield _blocks(2 * [FLOAT * head])

    def _walk(self, stage: str, need: Need) -> Blocks:
        sublayers = self.parts[:-1]
        blocks = _most(sublayers, 2, lambda part: [self.itemsize * k * n for _, k, n in part])
        blocks += _blocks(HELPERS * [PIECE_BYTES])
        blocks += _blocks(self._states(stage, need))
        if SENSITIVITY.enabled(self.config):
            together = MOST_WAITING + 1 if stage == "sensitivity" else 2
            blocks += _most(self.parts, together, self._factors)
        if stage in MAKERS:
            blocks += _most(self.parts, MOST_WAITING + 1, _results)
        return blocks

    def _states(self, stage: str, need: Need) -> list[int]:
        """Return the states that are in main memory, or the copy of them that is being saved."""
        rows, is_pinned = self.config.calibration, bool(need.pinned_bytes)
        if stage == "sensitivity":  # gradients too, and what they become
            states = FLOAT * self.spec.hidden_size * rows.row_tokens * self.config.sensitivity.rows
            return [states] * (3 if is_pinned else 1)
        if stage == "allocate":  # what is not pinned is most of it
            return []
        states = need.passing_bytes // STATE_FILES
        row = FLOAT * self.spec.hidden_size * rows.row_tokens
        kept = rows.measure_rows if stage == "measure" else ERROR_ROWS + 1
        return [states, *(kept * [row] if is_pinned else [])]

    def _factors(self, part: Part) -> list[int]:
        """Return the sizes of a part's Fisher factors, packed; about those of a group's."""
        block = self.config.sensitivity.block
        if part in self.groups:
            return len(part) * [self.groups[part] // len(part)]
        block = head_block(block) if part == self.parts[-1] else block
        widths = {capture: k for capture, k, _ in part}
        sizes = [_packed(k) for k in widths.values()]
        for _, _, n in part:
            columns = padded_columns(n)
            size = block_size(columns, block)
            sizes.append(columns // size * _packed(size))
        return sizes

    def not_pinned(self, stage: str, need: Need) -> int:
        """Return the bytes of a stage that are not pinned."""
        if stage == "allocate":
            return need.pinned_bytes
        if stage == "measure" and not SENSITIVITY.enabled(self.config):
            return need.pinned_bytes // 2  # outputs of all rows as one tensor
        if stage == "compile":  # the embedding as read, as written, and read back
            return (self.itemsize + 2 * HALF) * self.embedding
        return 0 if need.holds == "sublayer" else need.memory_bytes


def _packed(k: int) -> int:
    """Return the bytes of one half of a symmetric matrix (k, k), fp32."""
    return FLOAT * (k // 2) * (k + 1)


def _part(projections: Sequence[ProjectionSpec]) -> Part:
    captures = {
        capture: at for at, capture in enumerate(dict.fromkeys(p.capture for p in projections))
    }
    return tuple((captures[p.capture], p.in_features, p.out_features) for p in projections)


def _stored(k: int, n: int) -> int:
    return k * padded_columns(n)


def _results(part: Part) -> list[int]:
    """Return the sizes of the matrices of a part, packed and as values."""
    return [size * _stored(k, n) for _, k, n in part for size in (RESULT, HALF)]


def _blocks(sizes: Sequence[int]) -> Blocks:
    return Counter(map(pinned_block, sizes))


def _most(items: Sequence[T], count: int, sizes: Callable[[T], list[int]]) -> Blocks:
    """Return the most blocks that `count` neighbours among items take together."""
    known = {item: _blocks(sizes(item)) for item in dict.fromkeys(items)}
    windows = {tuple(items[at : at + count]) for at in range(max(1, len(items) - count + 1))}
    most: Blocks = Counter()
    for window in windows:
        most |= sum((known[item] for item in window), start=Counter())
    return most


def _itemsize(spec: ModelSpec) -> int:
    """Return the bytes of a source's weight in memory; 2 if its files are not here."""
    try:
        return CanonicalTensors(spec).dtype(f"{spec.embedding_key}.weight").itemsize
    except Exl2FlowError:
        return HALF
