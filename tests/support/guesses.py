"""What proposers of draft tokens share that know the text, and need no cache of their own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

from exl2flow.engine.drafts import DraftKind, DraftRequest, Proposal
from exl2flow.engine.drafts.proposer import HostProposer


class Guesses(HostProposer, ABC):
    """Options and proposer in one."""

    model, reads_states = None, False

    def beside(self, *_: object) -> list[Any]:
        return []

    def start(self, *_: object) -> Self:
        return self

    def wants(self, request: DraftRequest) -> bool:
        return request.most(DraftKind.MODEL) > 0

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        return {slot: Proposal(self.guess(one), DraftKind.MODEL) for slot, one in requests.items()}

    @abstractmethod
    def guess(self, request: DraftRequest) -> Sequence[int]:
        """Return draft tokens for a text."""
