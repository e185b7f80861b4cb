"""Events of a running request: new text, progress, why it ended, statistics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from exl2flow.core.requests.request import Request

Stage = Literal["started", "prompt", "text"]
Reason = Literal[
    "stop_token", "stop_string", "max_new_tokens", "end_filter", "loop", "cancelled", "error"
]


class Token(NamedTuple):
    """A sampled token with the extras that its request wants.

    probability: in the distribution it was drawn from; top_ids: the likeliest ids of that
    distribution; logits: the model's row, in any form; fed: whether filters see the token; own: the
    probability in the model's own distribution, its likeliest ids, and their probabilities, which
    take the place of the others with `Request.raw`, once hooks have seen the token.
    """

    id: int
    probability: float | None = None
    top_ids: tuple[int, ...] = ()
    top_probabilities: tuple[float, ...] = ()
    logits: object = None
    fed: bool = True
    own: tuple[float, tuple[int, ...], tuple[float, ...]] | None = None

    def raw(self) -> "Token":
        """Return the token with the model's own probabilities, if it has them."""
        if self.own is None:
            return self
        probability, ids, probabilities = self.own
        return self._replace(
            probability=probability, top_ids=ids, top_probabilities=probabilities, own=None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """Text and its ids; probabilities, top tokens and logits have one entry per id, if wanted."""

    text: str = ""
    ids: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_probabilities: tuple[tuple[float, ...], ...] = ()
    logits: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Tokens and pages, summed over sequences, and times.

    hits: the cached tokens by tier: "gpu" is the cache itself, then "ram" and "disk"; new_tokens:
    includes the stop token, not the healed one; drafts: kind of draft → tokens that it proposed,
    and those of them that the model chose, too; steps: that made the tokens; waiting: until the
    first pass over the prompt; prompt: from then to the first token; text: from the first token to
    the last.
    """

    prompt_tokens: int
    cached_tokens: int
    cached_pages: int
    new_tokens: int
    waiting_seconds: float
    prompt_seconds: float
    text_seconds: float
    steps: int = 0
    drafts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)

    @property
    def drafted_tokens(self) -> int:
        """Draft tokens of all kinds."""
        return sum(drafted for drafted, _ in self.drafts.values())

    @property
    def accepted_tokens(self) -> int:
        """Those of them that the model chose, too."""
        return sum(accepted for _, accepted in self.drafts.values())

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a step on average, 0 without steps."""
        return self.new_tokens / self.steps if self.steps else 0.0


def summed(counts: Iterable[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return the sums of several texts' `drafts`."""
    total = dict[str, tuple[int, int]]()
    for kind, (drafted, accepted) in chain.from_iterable(one.items() for one in counts):
        before = total.get(kind, (0, 0))
        total[kind] = before[0] + drafted, before[1] + accepted
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """The model's expectation at each place of a prompt: an entry per token.

    logs: natural logarithms of the probability of each token, given those before it; None for the
    first one, before which there is nothing. top_ids, top_logs: the likeliest ids in its place, if
    wanted, and theirs; empty for the first one.
    """

    ids: tuple[int, ...]
    logs: tuple[float | None, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(TextPiece):
    """One step of a request; only the last event has a `reason`.

    The texts of all events join to the completion. After a stop string, `ids` includes its tokens,
    which are in `held` as well.

    read, total: prompt tokens in the cache, and how many must be there.
    scores: of the whole prompt, in one event of stage "prompt", if wanted.
    trigger: the id or string that stopped the text.
    suppressed_text, suppressed_ids: cut because of a banned string, and never shown.
    held: what an ended text does not show: a stop token, or a stop string and the text behind it.
    """

    stage: Stage
    tag: object = None
    read: int = 0
    total: int = 0
    scores: PromptScores | None = None
    suppressed_text: str = ""
    suppressed_ids: tuple[int, ...] = ()
    reason: Reason | None = None
    trigger: int | str | None = None
    held: TextPiece | None = None
    error: Exception | None = None
    statistics: Statistics | None = None


def columns(request: Request, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the fields of a `TextPiece` that have one entry per token."""
    fields: dict[str, Any] = {"ids": tuple([token.id for token in tokens])}
    if request.probabilities:
        fields["probabilities"] = tuple(token.probability for token in tokens)
    if request.top_tokens:
        fields["top_ids"] = tuple(token.top_ids for token in tokens)
        fields["top_probabilities"] = tuple(token.top_probabilities for token in tokens)
    if request.logits:
        fields["logits"] = tuple(token.logits for token in tokens)
    return fields
