"""Arguments and results of `Ops.sample`."""

from dataclasses import dataclass, fields

import torch

from exl2flow.core.options.sampling import SamplingSettings

COLUMNS = tuple(field.name for field in fields(SamplingSettings) if field.metadata)
NOT_FINITE = -1  # the id of a row with NaN or +infinity, or with nothing but -infinity
STRONGEST = 1e30  # greatest change of a logit; sums of them are finite in fp32
MOST_REPEATED = 1024  # greatest `dry_max_ngram`


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSteps:
    """Steps of a call of `sample`; those left out must be disabled in the settings of all rows.

    most: candidates that are ranked; 1: an argmax; None: all.
    top: likeliest tokens to return with their probabilities.
    probabilities: return that of each sampled token.
    dry: longest repetition that DRY looks for, 0 if none does.
    rest: steps of the chain beyond temperature, top-k, top-p and min-p.
    sorts: steps that order candidates anew, typical sampling and XTC.
    """

    most: int | None
    top: int = 0
    probabilities: bool = False
    cfg: bool = False
    penalties: bool = False
    bias: bool = False
    dry: int = 0
    masked: bool = False
    rest: bool = False
    sorts: bool = False

    @property
    def adjusts(self) -> bool:
        """Whether some step changes logits before candidates are ranked."""
        return bool(self.cfg or self.penalties or self.bias or self.dry or self.masked)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Settings, histories and masks of the sampler, a row per slot; a call advances them.

    vocab_size: ids from there on are never sampled.
    table: fp64 (n, columns), the settings by `COLUMNS`; a disabled step has a neutral value.
    history: int32 (n, max_tokens + 1), ids of prompt and text; `vocab_size` stands for ids not in
        the vocabulary and fills the rest. Idle slots write to the last column.
    counts: int32 (n,), ids in the history.
    active: int32 (n,), 1 for slots in use; the history and mu of others do not move.
    mu: fp64 (n,), Mirostat's bound of the surprise in bits; infinity without Mirostat.
    partner, lead: int64 (n,), the slots whose logits are mixed in and whose id is taken.
    bias: fp32 (n, width), added to the logits. allowed, breakers, ignored: int32 (n, words), masks
        of the ids that may be sampled, that end a repetition (`vocab_size` among them), and that
        XTC leaves alone. None where no step needs them.
    """

    vocab_size: int
    table: torch.Tensor
    history: torch.Tensor
    counts: torch.Tensor
    active: torch.Tensor
    mu: torch.Tensor
    partner: torch.Tensor
    lead: torch.Tensor
    bias: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    breakers: torch.Tensor | None = None
    ignored: torch.Tensor | None = None

    @property
    def numbers(self) -> dict[str, torch.Tensor]:
        """The settings by column, fp64 (n, 1) each."""
        return dict(zip(COLUMNS, self.table[..., None].unbind(1), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Sampled ids and their probabilities; the next replay of a CUDA graph overwrites them.

    ids: int64 (n,), `NOT_FINITE` for a row whose logits are not finite.
    probabilities: fp64 (n,) in the final distribution; None unless the steps want them.
    top_ids, top_probabilities: (n, k), descending, ids that were dropped with probability 0; None
        unless the steps want them.
    """

    ids: torch.Tensor
    probabilities: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_probabilities: torch.Tensor | None = None
