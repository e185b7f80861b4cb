"""Train the codes and scales of a sublayer, or of several, to return what the source returns.

A layer's output says thousands of numbers about each token, so far fewer tokens are needed than to
train a whole model. The sublayers read states of the quantized model. What they should return lies
between what the source's return for them and what these returned for the source's own states: they
mend a part of the errors of earlier sublayers, as far as corrected targets do.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch

from exl2flow.core.options.config import RoundingOptions
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.runtime.ranks import pieces
from exl2flow.model import ModelSpec, Sublayer, SublayerSpec
from exl2flow.quant.rounding.error_feedback import RoundedMatrix
from exl2flow.quant.sensitivity.fisher import OutputFactor
from exl2flow.quant.training.descent import Descent
from exl2flow.quant.training.gradients import Gradients
from exl2flow.quant.training.judges import Judges
from exl2flow.quant.training.kept import kept_in
from exl2flow.quant.training.row_order import RowOrder
from exl2flow.quant.training.trainable import Rates, TrainedLinear
from exl2flow.quant.walk.deal import Deal
from exl2flow.quant.walk.needs import FLOAT

STEP_TOKENS = {"cpu": 2048, "cuda": 8192}
SCALE_RATE = 1e-3
# bytes: source, codes, what was moved and its best, two gradients, moments, decoded
TRAINED_WEIGHT = 48
SCORES = 6  # copies of a row's attention scores
TRAINING_SHARE = 0.8  # of a GPU's memory, beside the libraries
JUDGEMENTS = 8  # in the course of a training
LEAST_SIZE = 1e-20  # of a state, squared


Texts = Mapping[str, torch.Tensor]  # text → rows, int64 (rows, t)


class Trainee(Protocol):
    """What is trained: a sublayer, or what is called like one."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to the next hidden states, (b, t, hidden)."""

    def settled(self, states: torch.Tensor) -> torch.Tensor:
        """See `Sublayer`."""


Wanted = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """What a block is trained on.

    device: of the block. deal: of the rows to train on. states: that enter it, of the quantized
    model, fp32 (rows, t, hidden). wanted: what the block should return, given states of some rows,
    on its device, and the places of these rows. metric: of errors in the output, or None. texts:
    what judges; its rows follow this rank's own ones, and all ranks have them. at_once: rows of a
    forward and backward pass at most.
    """

    device: torch.device
    deal: Deal
    states: torch.Tensor
    wanted: Wanted
    metric: OutputFactor | None
    texts: Texts
    at_once: int = 1

    def errors(self, block: Trainee, rows: Sequence[int]) -> torch.Tensor:
        """Return the error of each row's outputs in the metric, over the size of tokens, (rows,).

        What follows normalizes states, so an error matters by its share of the state.
        """
        places = torch.tensor(rows, device=self.states.device)
        hidden = self.states[places].to(self.device)
        with torch.no_grad():
            wanted = self.wanted(hidden, places)
            size = wanted.square().mean(-1, keepdim=True).clamp_(min=LEAST_SIZE).rsqrt_()
        error = (block.settled(block(hidden)) - wanted) * size
        weighed = error if self.metric is None else self.metric.apply(error)
        return (weighed * error).flatten(1).sum(1)


def corrected_output(source: Trainee, returned: torch.Tensor | None, strength: float) -> Wanted:
    """Return what a block should return: what the source's does, corrected for earlier errors.

    Args:
        source: the block with the source's weights.
        returned: what the source's own states become, fp32 (rows, t, hidden), if known.
        strength: how far to go from the source's output to `returned`, 0 to 1.
    """

    def wanted(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        output = source.settled(source(hidden))
        if returned is None:
            return output
        own = source.settled(returned[places].to(output.device))
        return output.lerp(own, strength)

    return wanted


def train_block(
    rounded: Mapping[str, RoundedMatrix],
    source: Sublayer,
    rows: BlockRows,
    options: RoundingOptions,
) -> tuple[dict[str, RoundedMatrix], float]:
    """Return the trained matrices by projection, and their error over the one before.

    They are those of the lowest error on the rows that judge, of which no text got worse: maybe
    the matrices as they were rounded.

    Args:
        rounded: the matrices by projection.
        source: the sublayer with the source's weights.
        rows: to train on, of which some judge.
        options: of rounding.
    """
    sublayer = copy(source)
    code = options.block_rate / math.sqrt(options.block_steps)
    rates = Rates(scale=SCALE_RATE, norm=0.0, code=code)
    linears = {
        p.name: TrainedLinear(
            rounded[p.name],
            rates,
            out_features=p.out_features,
            bias=source.linears[p.name].bias,
            towards=source.linears[p.name].weight,
        )
        for p in sublayer.spec.projections
    }
    sublayer.linears = dict(linears)
    judges = train(sublayer, [*linears.values()], rows, options.block_steps)
    score = judges.scores()[judges.best]
    return {name: linear.rounded() for name, linear in linears.items()}, score


def train(
    block: Trainee,
    linears: Sequence[TrainedLinear],
    rows: BlockRows,
    steps: int,
    *,
    tokens: int | None = None,
) -> Judges:
    """Train the linears of a block, recall the best of their values, and return the judgements.

    `tokens` of a step: those of `STEP_TOKENS` if None.
    """
    tokens = tokens or STEP_TOKENS[rows.device.type]
    return _Training(block, linears, rows, steps, tokens).run()


class _Training:
    """A course of steps, judged from time to time."""

    def __init__(
        self,
        block: Trainee,
        linears: Sequence[TrainedLinear],
        rows: BlockRows,
        steps: int,
        step_tokens: int,
    ) -> None:
        self.block, self.linears, self.rows, self.deal = block, linears, rows, rows.deal
        self.descent = Descent([p for linear in linears for p in linear.parameters], steps)
        self.gradients = Gradients(self.descent.values, rows.deal.ranks)
        self.judges = Judges(rows.texts)
        together = max(1, step_tokens // rows.states.shape[1])
        self.order = RowOrder(pieces(rows.deal.rows), together, seed=0)

    def run(self) -> Judges:
        """Do all steps, recall the best values, and return the judgements."""
        self._judge()
        interval, steps = max(1, self.descent.steps // JUDGEMENTS), self.descent.steps
        while self.descent.done < steps:
            self._advance()
            if self.descent.done % interval == 0 or self.descent.done == steps:
                self._judge()
        self.descent.recall()
        return self.judges

    @torch.no_grad()
    def _judge(self) -> None:
        """Add the errors of the rows that judge, and keep the values if they are the best."""
        ranks, first = self.deal.ranks, len(self.deal.own)
        self._hold()
        found = list[float]()
        for piece in ranks.own(len(self.rows.states) - first):
            for rows in self._passes([first + row for row in piece]):
                found += self.rows.errors(self.block, rows).tolist()
        self._bound()
        self.judges.judgements.append([error for own in ranks.told_by_all(found) for error in own])
        if self.judges.best == len(self.judges.judgements) - 1:
            self.descent.keep()

    @torch.enable_grad()
    def _advance(self) -> None:
        """Do a step; gradients are divided by the first error."""
        self.descent.forget_gradients()
        self._hold()
        taken, ranks, first = sorted(self.order(self.descent.done)), self.deal.ranks, self.deal.own
        by_rank = [
            [
                part
                for piece in self.deal.of_rank(rank)
                if (part := [r for r in taken if r in piece])
            ]
            for rank in range(ranks.count)
        ]
        for of_piece in by_rank[ranks.rank]:
            for rows in self._passes([row - first.start for row in of_piece]):
                loss = self.rows.errors(self.block, rows).sum()
                self.gradients.add(loss / (self.judges.mean(0) or 1.0))
            self.gradients.take()
        self.gradients.share([*map(len, by_rank)])
        self.descent.step()
        self._bound()

    def _passes(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield rows as they pass the block together."""
        for begin in range(0, len(rows), self.rows.at_once):
            look()
            yield rows[begin : begin + self.rows.at_once]

    def _hold(self) -> None:
        for linear in self.linears:
            linear.hold()

    def _bound(self) -> None:
        for linear in self.linears:
            linear.bound()


def row_bytes(model: ModelSpec, sublayer: SublayerSpec, tokens: int) -> int:
    """Forecast the bytes of activations that a backward pass over a row of a sublayer needs."""
    score = max((layer.num_heads for layer in model.attending), default=0) * tokens**2
    readers = [p for p in sublayer.projections if not p.is_routed]
    width = sum(p.in_features + 3 * p.out_features for p in readers or sublayer.projections)
    return FLOAT * (tokens * width + SCORES * score * sublayer.has_attention)


def block_bytes(
    model: ModelSpec, sublayer: SublayerSpec, tokens: int, memory: int | None = None
) -> int:
    """Forecast the bytes that training a sublayer needs, of `memory` of a GPU; None: a CPU."""
    weights = TRAINED_WEIGHT * sum(p.numel for p in sublayer.projections)
    return weights + max(kept_in(memory), row_bytes(model, sublayer, tokens))


def trains_within(limit: int | None, model: ModelSpec, sublayer: SublayerSpec, tokens: int) -> bool:
    """Tell whether a GPU can train a sublayer, if tensors may take `limit` bytes; None: a CPU.

    Depends on shapes and the limit only, so that a run goes on as it began.
    """
    if limit is None:
        return True
    return block_bytes(model, sublayer, tokens, limit) <= TRAINING_SHARE * limit


def output_metric_of(sublayer: Sublayer, outputs: Sequence[OutputFactor]) -> OutputFactor | None:
    """Return the metric of a sublayer's output, given those of its last projections; None: none.

    A norm after these is in the way, and experts have their own gradients each. What attention and
    the MLP of a parallel block add has the same gradient.
    """
    is_plain = "after" not in sublayer.norms and sublayer.spec.group is None
    return outputs[0] if outputs and is_plain else None
