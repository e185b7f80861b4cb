"""Draft tokens from n-grams: the tokens after an earlier occurrence of the end of a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from exl2flow.engine.drafts.acceptance_rate import DraftKind
from exl2flow.engine.drafts.proposer import (
    MOST_DRAFTED,
    DraftRequest,
    HostProposer,
    Proposal,
    check,
)
from exl2flow.engine.drafts.suffixes import Match, SuffixAutomaton
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.model import ModelSpec, Placement

SHORTEST = 2  # tokens that must have occurred; one alone is a bad guide
COPIED = 20  # tokens after which a text copies: as many as may be are proposed at once
READ = 1024  # tokens of a text that are looked at before a step, so that long prompts hold none up


@dataclass(frozen=True, slots=True)
class NgramDraft:
    """Proposes what followed the latest occurrence of the longest end of a text that has one.

    tokens: the most draft tokens per step. Raises `ConfigError` for a number out of range.
    """

    tokens: int = MOST_DRAFTED
    model = None
    reads_states = False

    def __post_init__(self) -> None:
        check("tokens", self.tokens, 1, MOST_DRAFTED)

    def beside(self, _: LoadedModel) -> list[tuple[ModelSpec, Placement]]:
        return []

    def start(self, *_: object) -> "NgramProposer":
        return NgramProposer(self.tokens)


class NgramProposer(HostProposer):
    """Keeps a suffix automaton of each text."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._texts = WeakKeyDictionary[object, SuffixAutomaton]()

    def wants(self, request: DraftRequest) -> bool:
        return self._count(request, self.match(request)) > 0

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        return {
            slot: self.continued(request, self.match(request)) for slot, request in requests.items()
        }

    def match(self, request: DraftRequest) -> Match:
        """Return the longest end of a text that occurred before; none while it is being read."""
        text = self._texts.get(request.owner)
        if text is None:
            text = self._texts[request.owner] = SuffixAutomaton()
        is_read = text.follow(request.ids, most=READ)
        return text.match if is_read else Match(0, 0)

    def continued(self, request: DraftRequest, match: Match) -> Proposal:
        """Return what followed; it may repeat itself."""
        most = self._count(request, match)
        period = request.ids[match.end : match.end + most]
        return Proposal([period[i % len(period)] for i in range(most)], DraftKind.NGRAM)

    def _count(self, request: DraftRequest, match: Match) -> int:
        if match.length < SHORTEST:
            return 0
        is_copy = match.length >= COPIED
        return min(request.limit if is_copy else request.most(DraftKind.NGRAM), self._tokens)
