"""Perplexity of models, and their divergence from a reference, on rows of text.

All models of a comparison share the reference's forward pass; logits exist for a few positions at
a time and are never stored. Definitions, over positions 1..t-1 of every row: perplexity is
`exp(-mean ln p(next))`, KL divergence `Σ p_ref ln(p_ref / p)` in nats, top-1 agreement the share of
positions where both rank the same token first.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.reports import RowSums, Score
from exl2flow.core.runtime.memory import free_memory
from exl2flow.core.runtime.ranks import ALONE, WorkRanks, pieces
from exl2flow.engine.loading.streamed import StreamedModel
from exl2flow.inference.scoring.intervals import intervals
from exl2flow.model import SublayerSpec, check_ids, with_bos
from exl2flow.model.layers.decoder import divergence_terms

STATE_BYTES = 1 << 27  # of hidden states held at a time on a CPU, all models together ...
LEAST_ROWS = 4  # ... but no fewer rows, because each block of rows decodes all matrices
STATE_SHARE = 0.5  # of a GPU's free memory, for hidden states
LOGIT_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}  # of logits held at a time, per model
Advance = Callable[[int, int, str], None]
RowKey = tuple[int, int]  # text, row
Save = Callable[[Mapping[RowKey, "RowScores"]], None]
Report = Callable[[int, SublayerSpec], None]  # called with the model's number and a sublayer


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Results of one row, for each of m models, in main memory.

    losses: -ln p(next), fp32 (m, t - 1), or (m + 1, t - 1) with the reference's last;
    divergences: nats, fp32 (m, t - 1); agreements: uint8 (m, t - 1). The last two are empty without
    a reference.
    """

    losses: torch.Tensor
    divergences: torch.Tensor
    agreements: torch.Tensor


def evaluate(
    models: Sequence[Path],
    ids: torch.Tensor,
    *,
    reference: Path | None = None,
    device: torch.device | str = "cpu",
    advance: Advance | None = None,
    ranks: WorkRanks = ALONE,
) -> list[Score]:
    """Score models on one text, int64 (rows, t); for arguments see `evaluate_texts`."""
    scores = evaluate_texts(
        models, [ids], reference=reference, device=device, advance=advance, ranks=ranks
    )
    return [score for (score,) in scores]


@torch.inference_mode()
def evaluate_texts(
    models: Sequence[Path],
    texts: Sequence[torch.Tensor],
    *,
    reference: Path | None = None,
    device: torch.device | str = "cpu",
    advance: Advance | None = None,
    known: Mapping[RowKey, RowScores] | None = None,
    save: Save = lambda scores: None,
    ranks: WorkRanks = ALONE,
) -> list[list[Score]]:
    """Score models on several texts, in one pass over their files if memory allows.

    Args:
        models: model folders, EXL2 or plain.
        texts: int64 (rows, t) each, t at least 2.
        reference: folder of the model to measure divergence from.
        device: where to compute.
        advance: called with (sublayers done, total, current one), at the end with all of them
            done; may raise to stop.
        known: scores of rows from an earlier, interrupted call.
        save: called with the scores of each finished block of rows.
        ranks: that share the rows of each text.

    Returns:
        The scores of each model, one per text; at other ranks than 0 none.

    Raises:
        ConfigError: a model's vocabulary differs from the reference's.
        SourceModelError: a token is not in the vocabulary.
    """
    place = torch.device(device)
    runners = [StreamedModel(Path(folder), place) for folder in models]
    base = StreamedModel(Path(reference), place, is_reference=True) if reference else None
    everyone = [*runners, base] if base else runners
    _check_vocabularies(everyone)
    texts = [with_bos(ids, everyone[-1].spec) for ids in texts]
    for ids in texts:
        check_ids(ids, everyone[-1].spec)
    row_scores = dict(known or {})
    own = [key for key in _rows_of(ranks, texts) if key not in row_scores]
    blocks = list(_blocks(everyone, texts, own))
    *starts, passes = accumulate((len(model.spec.sublayers) for model in everyone), initial=0)
    total = len(blocks) * passes

    def report(block: int, model: int, sublayer: SublayerSpec) -> None:
        if advance:
            advance(block * passes + starts[model] + sublayer.index, total, sublayer.name)

    for number, block in enumerate(blocks):
        scores = dict(_scored(everyone, texts, block, partial(report, number)))
        row_scores |= scores
        save(scores)
    if advance and blocks:
        advance(total, total, "")
    for told in ranks.told_by_all(row_scores):
        row_scores |= told
    return [] if ranks.rank else _all_scores(everyone, texts, row_scores)


def _rows_of(ranks: WorkRanks, texts: Sequence[torch.Tensor]) -> Iterator[RowKey]:
    """Yield the rows that a rank scores: pieces of each text (rows, t)."""
    for text, ids in enumerate(texts):
        for piece in ranks.own(len(ids)):
            yield from ((text, row) for row in piece)


def _all_scores(
    everyone: Sequence[StreamedModel],
    texts: Sequence[torch.Tensor],
    row_scores: Mapping[RowKey, RowScores],
) -> list[list[Score]]:
    """Return the scores of each model but the reference, one per text."""
    scored = [
        ([row_scores[text, row] for row in range(len(ids))], _digest(ids))
        for text, ids in enumerate(texts)
    ]
    runners = [place for place, model in enumerate(everyone) if not model.is_reference]
    return [[_score(everyone, i, rows, digest) for rows, digest in scored] for i in runners]


def _digest(ids: torch.Tensor) -> str:
    """Return the SHA-256 of a text's ids (rows, t) and of their shape."""
    content = ids.cpu().numpy().astype("<i8").tobytes()
    return hashlib.sha256(f"{tuple(ids.shape)}".encode() + content).hexdigest()


def _check_vocabularies(runners: Sequence[StreamedModel]) -> None:
    for runner in runners[:-1]:
        if runner.spec.vocab_size != runners[-1].spec.vocab_size:
            raise ConfigError(
                f"`{runner.folder}` has {runner.spec.vocab_size} tokens, `{runners[-1].folder}` "
                f"{runners[-1].spec.vocab_size}; compare models with one vocabulary"
            )


def _blocks(
    everyone: Sequence[StreamedModel],
    texts: Sequence[torch.Tensor],
    rows: Sequence[RowKey],
) -> Iterator[list[RowKey]]:
    """Split rows, (text, row) each, into blocks whose hidden states fit in memory together."""
    device = everyone[0].device
    on_gpu = device.type == "cuda"
    room = int(STATE_SHARE * free_memory(device)) if on_gpu else STATE_BYTES
    tokens = max((texts[text].shape[1] for text, _ in rows), default=1)
    row_bytes = sum(m.spec.hidden_size * m.dtype.itemsize * tokens for m in everyone)
    together = max(1 if on_gpu else LEAST_ROWS, room // row_bytes)
    for begin in range(0, len(rows), together):
        yield list(rows[begin : begin + together])


def _scored(
    everyone: Sequence[StreamedModel],
    texts: Sequence[torch.Tensor],
    block: Sequence[RowKey],
    report: Report,
) -> Iterator[tuple[RowKey, RowScores]]:
    """Yield the scores of a block of rows; those of two pieces do not pass together."""
    whole = [[(text, row) for row in p] for text, x in enumerate(texts) for p in pieces(len(x))]
    keys = [[key for key in piece if key in block] for piece in whole]
    parts = [part for part in keys if part]
    place = everyone[0].device
    ids = [texts[part[0][0]][[row for _, row in part]].to(place) for part in parts]
    states = [model.states(ids, partial(report, i)) for i, model in enumerate(everyone)]
    for number, part in enumerate(parts):
        for index, key in enumerate(part):
            hidden = [of_model[number][index] for of_model in states]
            yield key, _row_scores(everyone, ids[number][index], hidden)


def _row_scores(
    everyone: Sequence[StreamedModel], ids: torch.Tensor, states: Sequence[torch.Tensor]
) -> RowScores:
    """Return the scores of one row of ids (t,) from each model's states (t, hidden)."""
    width = everyone[0].spec.vocab_size * torch.float32.itemsize
    step = max(1, LOGIT_BYTES[ids.device.type] // width)
    has_base = everyone[-1].is_reference
    models = len(everyone) - has_base
    losses = torch.empty(len(everyone), len(ids) - 1, device=ids.device)
    divergences = torch.empty(models if has_base else 0, len(ids) - 1, device=ids.device)
    agreements = torch.empty_like(divergences, dtype=torch.uint8)
    for span in (slice(i, min(i + step, len(ids) - 1)) for i in range(0, len(ids) - 1, step)):
        targets = ids[span.start + 1 : span.stop + 1, None]
        base: torch.Tensor | None = None
        for index in reversed(range(len(everyone))):  # the reference first, which is the last
            logs = _log_probabilities(everyone[index], states[index][span])
            losses[index, span] = -logs.gather(1, targets)[:, 0]
            if base is not None:
                divergences[index, span] = divergence_terms(base, logs).sum(dim=1)
                agreements[index, span] = base.argmax(dim=1) == logs.argmax(dim=1)
            elif has_base:
                base = logs
    return RowScores(
        losses=losses.cpu(), divergences=divergences.cpu(), agreements=agreements.cpu()
    )


def _log_probabilities(model: StreamedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Return log probabilities, fp32 (positions, v)."""
    return torch.log_softmax(model.head(hidden[None])[0].float(), dim=-1)


def _score(
    everyone: Sequence[StreamedModel],
    index: int,
    rows: Sequence[RowScores],
    digest: str,
) -> Score:
    """Return one model's score from the results of all rows of a text."""
    has_base = everyone[-1].is_reference
    sums = _sums(rows, index, has_base)
    kl = None
    if has_base:
        kl = np.concatenate([row.divergences[index].double().numpy() for row in rows])
    return Score(
        model=str(everyone[index].folder),
        perplexity=_perplexity(rows, index),
        reference_perplexity=_perplexity(rows, -1) if has_base else None,
        kl_divergence=None if kl is None else float(kl.mean()),
        kl_median=None if kl is None else float(np.median(kl)),
        kl_p99=None if kl is None else float(np.quantile(kl, 0.99)),
        top1_agreement=None if kl is None else sum(sums.agreements or ()) / len(kl),
        tokens=sum(sums.tokens),
        bytes=everyone[index].bytes,
        text=digest,
        rows=sums,
        intervals=intervals(sums),
    )


def _sums(rows: Sequence[RowScores], index: int, has_base: bool) -> RowSums:
    """Return one model's sums over the positions of each row."""
    divergences = [float(row.divergences[index].double().sum()) for row in rows if has_base]
    agreements = [int(row.agreements[index].sum()) for row in rows if has_base]
    return RowSums(
        tokens=tuple(row.losses.shape[1] for row in rows),
        losses=tuple(float(row.losses[index].double().sum()) for row in rows),
        divergences=tuple(divergences) if has_base else None,
        agreements=tuple(agreements) if has_base else None,
    )


def _perplexity(rows: Sequence[RowScores], index: int) -> float:
    mean = float(torch.cat([row.losses[index] for row in rows]).double().mean())
    return math.exp(mean) if mean < 700 else math.inf
