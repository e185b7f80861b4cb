"""Draft tokens of known texts: as many are right as wanted, at the cost of real drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from exl2flow.engine.drafts import DraftKind, DraftRequest, Proposal, SharedSlots
from exl2flow.engine.drafts.mtp import MtpProposer
from exl2flow.engine.drafts.ngram import COPIED, SHORTEST, NgramProposer
from exl2flow.engine.drafts.suffixes import Match
from exl2flow.inference import LoadedModel, Mtp, NgramDraft
from exl2flow.kernels import STEP_TOKENS

FIRST = 5  # id with which the first text begins; the next one begins with the next id
BLOCK, DRAWS = 32, 4096  # draws of a text, evenly spread in each block

Text = tuple[int, ...]


class Known:
    """Texts that are known by their first ids, and which of their draft tokens are right.

    All is on the device. How many are right follows from a draw per step, so it is alike for any
    number of drafts.
    """

    def __init__(self, texts: Sequence[Text], vocabulary: int, device: torch.device) -> None:
        room = max(map(len, texts)) + STEP_TOKENS
        padded = [[*ids, *[0] * (room - len(ids))] for ids in texts]
        self._ids, self._vocabulary = torch.tensor(padded, device=device), vocabulary
        self._ahead = torch.arange(1, STEP_TOKENS, device=device)
        self._draws = torch.stack([draws(row) for row in range(len(texts))]).to(device)
        self._rates = torch.zeros(STEP_TOKENS, device=device)
        self._steps = torch.zeros(len(texts), 1, dtype=torch.int64, device=device)

    def begin(self, rates: Sequence[float]) -> None:
        """Let at least the first 1, 2, … draft tokens be right with these probabilities."""
        self._rates[: len(rates)] = torch.tensor(rates, device=self._rates.device)
        self._steps.zero_()

    def put(self, drafted: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor) -> None:
        """Exchange draft tokens (slots, drafts) behind the last tokens of texts."""
        slots, count = drafted.shape
        texts = (history[:slots, :1].long() - FIRST).clamp(0, len(self._ids) - 1)
        places = (lengths[:slots, None] + self._ahead[:count]).clamp(max=self._ids.shape[1] - 1)
        right, steps = self._ids[texts, places.long()], self._steps[:slots]
        is_right = self._draws[:slots].gather(1, steps % DRAWS) < self._rates[:count]
        drafted.copy_(torch.where(is_right, right, (right + 1) % self._vocabulary))
        steps += 1


def draws(seed: int) -> torch.Tensor:
    """Return random numbers below 1, in each block one of each part of them, in random order."""
    source = torch.Generator().manual_seed(seed)
    order = torch.rand(DRAWS // BLOCK, BLOCK, generator=source).argsort(dim=1)
    return ((order + torch.rand(order.shape, generator=source)) / BLOCK).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Mtp):
    """Proposes what is known, once the block has done its work."""

    known: Known

    def start(self, model: LoadedModel, slots: SharedSlots) -> "ReplayProposer":
        return ReplayProposer(self, model, slots)


class ReplayProposer(MtpProposer):
    """Exchanges what the block drafts as part of the same recording."""

    def __init__(self, draft: Replay, model: LoadedModel, slots: SharedSlots) -> None:
        super().__init__(draft, model, slots)
        self._texts = draft.known

    def _chain(self, batch: int, count: int, drafts: int) -> None:
        super()._chain(batch, count, drafts)
        if drafts:
            own = self.drafted[:batch, :drafts]
            self._texts.put(own, self._slots.history, self._slots.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(NgramDraft):
    """Copies known texts, by their first ids; or proposes what is always wrong."""

    texts: Mapping[int, Text] = field(default_factory=dict)
    is_right: bool = True
    vocabulary: int = 0

    def start(self, *_: object) -> "CopyProposer":
        return CopyProposer(self)


class CopyProposer(NgramProposer):
    """Looks for n-grams as ever, and proposes something else."""

    def __init__(self, draft: Copying) -> None:
        super().__init__(draft.tokens)
        self._draft = draft

    def match(self, request: DraftRequest) -> Match:
        found = super().match(request)
        return Match(COPIED if self._draft.is_right else SHORTEST, found.end)

    def continued(self, request: DraftRequest, match: Match) -> Proposal:
        count, begin = len(super().continued(request, match).ids), len(request.ids)
        ids = self._draft.texts[request.ids[0]][begin : begin + count]
        if not self._draft.is_right:
            ids = tuple((token + 1) % self._draft.vocabulary for token in ids)
        return Proposal(ids, DraftKind.NGRAM)
