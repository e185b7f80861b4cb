"""What proposers of draft tokens share that know the text, and need no cache of their own."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from exl2flow.engine.drafts import DraftKind, DraftRequest, Proposal


class Guesses:
    """Options and proposer in one: `guess` returns draft tokens for a text."""

    decoder = model = drafted = None
    reads_states, reads_ids = False, True
    stored = ()

    def beside(self, *_: object) -> list[Any]:
        return []

    def start(self, *_: object) -> Self:
        return self

    def read(self, *_: object) -> None: ...
    def copy(self, *_: object) -> None: ...
    def follow(self, *_: object) -> None: ...
    def warm_up(self, *_: object) -> None: ...

    def wants(self, request: DraftRequest) -> bool:
        return request.most(DraftKind.MODEL) > 0

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        return {slot: Proposal(self.guess(one), DraftKind.MODEL) for slot, one in requests.items()}

    def guess(self, request: DraftRequest) -> Sequence[int]:
        raise NotImplementedError
