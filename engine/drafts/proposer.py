"""Interfaces of speculative decoding: proposers, and the slots that they share."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.paged import PagedCache
from exl2flow.engine.cache.views import Segment
from exl2flow.engine.drafts.acceptance_rate import Acceptance, AcceptanceRate, DraftKind
from exl2flow.engine.drafts.costs import StepCosts
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.kernels import STEP_TOKENS
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import Decoder, ModelSpec, Placement

MOST_DRAFTED = STEP_TOKENS - 1  # tokens of one text that a pass verifies
ON_DEVICE = -1  # stands for a draft token that only the device knows; see `Proposer.drafted`


class SharedSlots(NamedTuple):
    """The slots of a generator as runners and proposers share them; see `DeviceSlots`.

    active: int32 (slots,), 1 where a text takes part; history: int32 (slots, tokens + 1), the ids
    of texts; begins: int32 (slots,), lengths before the last pass; hidden: (slots, 1 + drafts,
    hidden), states that it left, before the final norm, the first one behind the token that was
    read first; None if no draft reads them.
    """

    cache: PagedCache
    tables: torch.Tensor
    lengths: torch.Tensor
    graphs: GraphPool
    active: torch.Tensor
    history: torch.Tensor
    begins: torch.Tensor
    hidden: torch.Tensor | None = None


class DraftRequest(NamedTuple):
    """Asks for draft tokens after a text's ids.

    owner: identifies the text; ids: that are known, if the proposer reads them all; length: of the
    text; pages: of its cache; limit: the most draft tokens that can be
    verified; acceptance: of the text's draft tokens so far; slots: of the step; costs: of steps.
    """

    owner: object
    ids: Sequence[int]
    length: int
    pages: Sequence[int]
    limit: int
    acceptance: Acceptance
    slots: int
    costs: StepCosts

    def most(self, kind: DraftKind) -> int:
        """Return how many draft tokens of a kind are worth proposing, `limit` at most."""
        if not self.limit:
            return 0
        return self.rate(kind).most(
            self.length, lambda rate: self.costs.best(self.slots, kind, rate, self.limit)
        )

    def rate(self, kind: DraftKind) -> AcceptanceRate:
        """Return the acceptance rate of a kind."""
        return self.acceptance.rates[kind]


class Proposal(NamedTuple):
    """Draft tokens, or `ON_DEVICE` for each of them, and what proposed them."""

    ids: Sequence[int]
    kind: DraftKind


class Proposer(Protocol):
    """Proposes draft tokens for the slots of one generator."""

    @property
    def reads_ids(self) -> bool:
        """Whether the host must know all ids of a text before it proposes."""

    @property
    def drafted(self) -> torch.Tensor | None:
        """Draft tokens that the host need not know, int64 (slots, drafts); None: there are none."""

    @property
    def decoder(self) -> Decoder | None:
        """The model that it runs, if any."""

    @property
    def stored(self) -> Sequence[torch.Tensor]:
        """The tensors of its cache, if any, which has the pages of the generator's."""

    def read(self, tokens: torch.Tensor, segments: Sequence[Segment], states: torch.Tensor) -> None:
        """Follow a pass over prompts, int64 (1, t); states: of its tokens, if it reads them."""

    def copy(self, pages: torch.Tensor) -> None:
        """Follow the copy of pages, int64 (2, n): sources and targets."""

    def warm_up(self, batches: Sequence[int]) -> None:
        """Record the passes of these batch sizes."""

    def wants(self, request: DraftRequest) -> bool:
        """Return whether it may propose for a text, whose last token may not be known yet."""

    def follow(self, requests: Mapping[int, DraftRequest]) -> None:
        """Prepare for a step without draft tokens; last tokens may not be known yet."""

    def propose(self, requests: Mapping[int, DraftRequest]) -> Mapping[int, Proposal]:
        """Return draft tokens for each slot."""

    def run_ahead(self, slots: int, drafts: int) -> None:
        """Draft for the first slots behind a step that runs, of so many draft tokens, if it can.

        The next proposal then is there already, unless `forget` is called.
        """

    def forget(self) -> None:
        """Forget what was drafted ahead: slots have changed otherwise than by a step."""


class HostProposer:
    """What a proposer is that reads ids only: nothing of it is on the device."""

    decoder = drafted = None
    reads_ids = True
    stored = ()

    def read(self, *_: object) -> None: ...
    def copy(self, *_: object) -> None: ...
    def follow(self, *_: object) -> None: ...
    def warm_up(self, *_: object) -> None: ...
    def run_ahead(self, *_: object) -> None: ...
    def forget(self) -> None: ...


class Drafter(Protocol):
    """Options of speculative decoding.

    tokens: the most draft tokens per text and step; model: that proposes them, if one does;
    reads_states: whether the proposer needs the model's hidden states.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def model(self) -> LoadedModel | None: ...
    @property
    def reads_states(self) -> bool: ...
    def beside(self, model: LoadedModel) -> list[tuple[ModelSpec, Placement]]:
        """Return what has a cache of as many pages as the model's."""

    def start(self, model: LoadedModel, slots: SharedSlots) -> Proposer: ...


def check(name: str, value: float, least: float, most: float) -> None:
    """Raise `ConfigError` for a field of a draft that is out of range."""
    if not least <= value <= most:
        raise ConfigError(f"`{name}` of a draft is {value}; it must be from {least} to {most}")
