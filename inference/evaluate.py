"""Perplexity and divergence of models from a reference, one sublayer and one row at a time.

All models of a comparison share the reference's forward pass; logits exist for a few hundred
positions at a time and are never stored. Definitions, over the positions 1..t-1 of every row:
perplexity `exp(-mean ln p(next))`, KL divergence `Σ p_ref ln(p_ref / p)` in nats, top-1 agreement
the share of positions where both rank the same token first.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch

from exl2flow.core.errors import ConfigError
from exl2flow.inference.load import StreamedSublayers
from exl2flow.model import (
    Head,
    ModelSpec,
    TensorFiles,
    build_embedding,
    build_head,
    check_ids,
    resolve,
)

log = logging.getLogger(__name__)

DTYPE = torch.float32
STATE_BYTES = 1 << 27  # hidden states held at a time, all models together
LOGIT_BYTES = 1 << 26  # logits held at a time, per model
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one model reached on the rows; the divergence fields are None without a reference."""

    model: str
    perplexity: float
    reference_perplexity: float | None
    kl_divergence: float | None
    kl_median: float | None
    kl_p99: float | None
    top1_agreement: float | None
    tokens: int
    bytes: int

    @classmethod
    def of(cls, model: str, values: Mapping[str, object]) -> Self | None:
        """Return a score from a file that any version wrote; None if it has no perplexity or sizes.

        Unknown fields are ignored; missing divergences are None.
        """
        found = {name: _number(values.get(name)) for name in cls.__slots__ if name != "model"}
        whole = [found.pop(name) for name in ("tokens", "bytes")]
        perplexity = found.pop("perplexity")
        if perplexity is None or not all(isinstance(value, int) for value in whole):
            return None
        tokens, size = (int(value or 0) for value in whole)
        return cls(model=model, perplexity=perplexity, tokens=tokens, bytes=size, **found)


def _number(value: object) -> float | None:
    """Return a number of a JSON file, infinity among them; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or abs(value) < 2**63 else None


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Per-position results of one model."""

    losses: list[np.ndarray] = field(default_factory=list)
    divergences: list[np.ndarray] = field(default_factory=list)
    agreements: int = 0

    def perplexity(self) -> float:
        mean = float(np.concatenate(self.losses).mean(dtype=np.float64))
        return math.exp(mean) if mean < 700 else math.inf


class _Streamed:
    """A model folder of which only embedding and head stay in memory."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.spec: ModelSpec = resolve(folder)
        tensors = TensorFiles(folder)
        self.bytes = sum(path.stat().st_size for path in tensors.files)
        self.embedding = build_embedding(self.spec, tensors, dtype=DTYPE, device=device)
        self.sublayers = StreamedSublayers(self.spec, tensors, dtype=DTYPE, device=device)
        self.head: Head = build_head(
            self.spec, tensors, dtype=DTYPE, device=device, embedding=self.embedding
        )
        self.tally = _Tally()

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the states after the last sublayer, fp32 (rows, t, hidden) on the device."""
        states = torch.stack([self.embedding(row[None])[0] for row in ids])
        for sublayer in self.sublayers:
            for row in range(len(states)):
                states[row] = sublayer(states[row : row + 1])[0]
        return states


@torch.inference_mode()
def evaluate(
    models: Sequence[Path],
    ids: torch.Tensor,
    *,
    reference: Path | None = None,
    device: torch.device | str = "cpu",
    advance: Advance | None = None,
) -> list[Score]:
    """Score models on token rows.

    Args:
        models: model folders, EXL2 or plain.
        ids: int64 (rows, t), t at least 2.
        reference: folder of the model to diverge from.
        device: where to compute.
        advance: called with (rows done, rows, detail).

    Raises:
        ConfigError: a model's vocabulary differs from the reference's.
        SourceModelError: a token is not in the vocabulary.
    """
    place = torch.device(device)
    runners = [_Streamed(Path(folder), place) for folder in models]
    base = _Streamed(Path(reference), place) if reference is not None else None
    everyone = [*runners, base] if base else runners
    _check_vocabularies(everyone)
    check_ids(ids, everyone[-1].spec)
    row_bytes = ids.shape[1] * max(r.spec.hidden_size for r in everyone) * DTYPE.itemsize
    block = max(1, STATE_BYTES // (row_bytes * len(everyone)))
    for begin in range(0, len(ids), block):
        rows = ids[begin : begin + block].to(place)
        states = [runner.states(rows) for runner in everyone]
        for index, row in enumerate(rows):
            _score_row(runners, base, row, [s[index] for s in states])
        if advance is not None:
            advance(min(begin + block, len(ids)), len(ids), "rows")
    return [_score(runner, base, ids) for runner in runners]


def _check_vocabularies(runners: Sequence[_Streamed]) -> None:
    for runner in runners[:-1]:
        if runner.spec.vocab_size != runners[-1].spec.vocab_size:
            raise ConfigError(
                f"`{runner.folder}` has {runner.spec.vocab_size} tokens, `{runners[-1].folder}` "
                f"{runners[-1].spec.vocab_size}; compare models with one vocabulary"
            )


def _score_row(
    runners: Sequence[_Streamed],
    base: _Streamed | None,
    row: torch.Tensor,
    states: Sequence[torch.Tensor],
) -> None:
    """Add the positions of one row to the tallies; states are (t, hidden) per model."""
    width = runners[0].spec.vocab_size * DTYPE.itemsize
    step = max(1, LOGIT_BYTES // width)
    for begin in range(0, len(row) - 1, step):
        span = slice(begin, min(begin + step, len(row) - 1))
        targets = row[span.start + 1 : span.stop + 1]
        expected = None
        if base is not None:
            expected = _log_probabilities(base, states[-1][span])
            base.tally.losses.append(_losses(expected, targets))
        for runner, hidden in zip(runners, states, strict=False):
            found = _log_probabilities(runner, hidden[span])
            runner.tally.losses.append(_losses(found, targets))
            if expected is not None:
                divergence = (expected.exp() * (expected - found)).sum(dim=1)
                runner.tally.divergences.append(divergence.cpu().numpy())
                agree = expected.argmax(dim=1) == found.argmax(dim=1)
                runner.tally.agreements += int(agree.sum())


def _log_probabilities(runner: _Streamed, hidden: torch.Tensor) -> torch.Tensor:
    """Return fp32 (positions, v)."""
    return torch.log_softmax(runner.head(hidden[None])[0].float(), dim=-1)


def _losses(log_probabilities: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    chosen = log_probabilities.gather(1, targets[:, None])[:, 0]
    return np.asarray(-chosen.cpu().numpy())


def _score(runner: _Streamed, base: _Streamed | None, ids: torch.Tensor) -> Score:
    tally = runner.tally
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    kl = np.concatenate(tally.divergences).astype(np.float64) if base else None
    return Score(
        model=str(runner.folder),
        perplexity=tally.perplexity(),
        reference_perplexity=base.tally.perplexity() if base else None,
        kl_divergence=None if kl is None else float(kl.mean()),
        kl_median=None if kl is None else float(np.median(kl)),
        kl_p99=None if kl is None else float(np.quantile(kl, 0.99)),
        top1_agreement=None if kl is None else tally.agreements / tokens,
        tokens=tokens,
        bytes=runner.bytes,
    )
