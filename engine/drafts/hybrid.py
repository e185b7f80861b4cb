"""Draft tokens from two kinds: copies of the text where it repeats itself, else from a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from exl2flow.engine.cache.views import Segment
from exl2flow.engine.drafts.model import Draft, ModelProposer
from exl2flow.engine.drafts.mtp import Mtp, MtpProposer
from exl2flow.engine.drafts.ngram import NgramDraft, NgramProposer
from exl2flow.engine.drafts.proposer import DraftRequest, Proposal, SharedSlots
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.model import Decoder, ModelSpec, Placement

LONG = 8  # tokens that occurred before, after which a copy is likelier than what a model guesses


@dataclass(frozen=True, slots=True)
class HybridDraft:
    """Proposes a copy behind a long match, and what a draft model says elsewhere."""

    other: Draft | Mtp
    copies: NgramDraft = field(default_factory=NgramDraft)

    @property
    def tokens(self) -> int:
        """The most draft tokens per step."""
        return max(self.other.tokens, self.copies.tokens)

    @property
    def model(self) -> LoadedModel | None:
        """The draft model, if there is one."""
        return self.other.model

    @property
    def reads_states(self) -> bool:
        """Whether the other kind reads the model's states."""
        return self.other.reads_states

    def beside(self, model: LoadedModel) -> list[tuple[ModelSpec, Placement]]:
        """Return what the other kind keeps beside the model."""
        return self.other.beside(model)

    def start(self, model: LoadedModel, slots: SharedSlots) -> "HybridProposer":
        """Reserve what both need; see `Draft.start`."""
        return HybridProposer(self.copies.start(), self.other.start(model, slots))


class HybridProposer:
    """Asks the draft model only while a text does not copy."""

    reads_ids = True

    def __init__(self, copies: NgramProposer, other: ModelProposer | MtpProposer) -> None:
        self._copies, self._other = copies, other

    @property
    def drafted(self) -> torch.Tensor | None:
        return self._other.drafted

    @property
    def decoder(self) -> Decoder | None:
        return self._other.decoder

    @property
    def stored(self) -> list[torch.Tensor]:
        return self._other.stored

    def read(self, tokens: torch.Tensor, segments: Sequence[Segment], states: torch.Tensor) -> None:
        self._other.read(tokens, segments, states)

    def copy(self, pages: torch.Tensor) -> None:
        self._other.copy(pages)

    def warm_up(self, batches: Sequence[int]) -> None:
        self._other.warm_up(batches)

    def wants(self, request: DraftRequest) -> bool:
        return self._copies.wants(request) or self._other.wants(request)

    def run_ahead(self, slots: int, drafts: int) -> None:
        self._other.run_ahead(slots, drafts)

    def forget(self) -> None:
        self._other.forget()

    def follow(self, requests: Mapping[int, DraftRequest]) -> None:
        self._other.follow(requests)

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        """Return a copy or the model's tokens for each slot."""
        matches = {slot: self._copies.match(request) for slot, request in requests.items()}
        found = {
            slot: self._copies.continued(request, matches[slot])
            for slot, request in requests.items()
            if matches[slot].length >= LONG
        }
        if len(found) == len(requests):
            self._other.follow(requests)
            return found
        others = {
            slot: request._replace(limit=0) if slot in found else request
            for slot, request in requests.items()
        }
        return self._other.propose(others) | found
