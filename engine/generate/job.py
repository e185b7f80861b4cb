"""`Job`: a request while it is generated, with its sequences, output and draws."""

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from exl2flow.core.requests.request import Request
from exl2flow.engine.adapters import Used, salt_of
from exl2flow.engine.cache.prefix_tree import SequencePages
from exl2flow.engine.drafts import Acceptance
from exl2flow.engine.filters import Combined
from exl2flow.engine.generate.event import Event, Statistics, Token
from exl2flow.engine.generate.failures import ENDS_PROGRAM, as_text_error
from exl2flow.engine.generate.output import NONE, Output
from exl2flow.engine.generate.prompt import Prompt
from exl2flow.engine.generate.prompt_scorer import PromptScorer
from exl2flow.model.tensor_parallel.ranks import Ranks

log = logging.getLogger(__name__)
Mask = tuple[tuple[int, ...] | None, frozenset[int]]  # the only ids allowed (None: all), ids not
FREE: Mask = (None, NONE)
DRAW_BITS = 64  # of a generator's output, which one draw takes
DRAWS = 1 << 14  # skipped at a time


@dataclass(slots=True, weakref_slot=True, eq=False)
class Sequence:
    """Tokens of a job that the model reads; all but the last are to be in the cache.

    slot: its place in the steps, -1 while it waits; scorer: of its prompt, if it is to be scored.
    """

    ids: list[int]
    held: SequencePages
    slot: int = -1
    scorer: PromptScorer | None = None

    @property
    def unread(self) -> int:
        """Tokens that must be read before the next one can be sampled."""
        return len(self.ids) - 1 - self.held.filled

    @property
    def is_scoring(self) -> bool:
        """Whether tokens of the prompt must be read for their scores, even if pages hold them."""
        return self.scorer is not None and not self.scorer.is_complete

    @property
    def reusable(self) -> list[int]:
        """The ids of which all but the last may be taken from the prefix cache."""
        if self.scorer is None or self.scorer.is_complete:
            return self.ids
        return self.ids[: self.scorer.known + 1]


class Job:
    """A prepared request; `Generator` changes it once it is added.

    launched: samples that were begun and not read yet; is_decoding: whether its prompt is read, and
    its sequences take part in decode steps; skips: how often another job overtook it in the queue;
    constraint: of its filters; slot_mask: the mask that its slot has; acceptance: how many draft
    tokens are worth proposing; error: what its callback raised; is_stale: whether the samples that
    were begun are to be discarded; is_stepwise: whether the next sample begins only with the next
    call of `Generator.step`.
    """

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        output: Output,
        *,
        constraint: Combined | None,
        adapters: Used,
        deliver: Callable[[Event], None],
        on_cancel: Callable[["Job"], None],
    ) -> None:
        """Take a checked request; `deliver` gets its events, from `self.deliver`."""
        self.request, self.prompt, self.output, self.adapters = request, prompt, output, adapters
        self.sequences = [Sequence(list(ids), self.new_pages()) for ids in prompt.sequences]
        if request.scores is not None:
            self.lead.scorer = PromptScorer(self.lead.ids, request.scores)
        self.random = random.Random(Ranks.new_seed() if request.seed is None else request.seed)
        skip_draws(self.random, request.drawn)
        self.error: Exception | None = None
        self.launched = self.skips = self.steps = 0
        self.is_decoding = self.is_done = self.is_stale = self.is_stepwise = False
        self.slot_mask, self.constraint = FREE, constraint
        self.acceptance = Acceptance()
        self.draws = deque[float]()  # of samples that were not read yet
        self.mu: float | None = None
        self._times = [time.monotonic()]  # queued, started, first token, last token
        self._deliver, self._on_cancel = deliver, on_cancel
        self._cached, self._hits = [0, 0], Counter[str]()  # tokens, pages, tiers of the first start

    def new_pages(self) -> SequencePages:
        """Return an empty sequence in the cache, sharing pages under equal adapters and salts."""
        salt = self.request.salt and b"salt" + self.request.salt  # no digests of adapters
        return SequencePages(salt_of(self.adapters) + salt)

    def cancel(self) -> None:
        """End the job; its last event comes with the next step. Any thread may call it."""
        self._on_cancel(self)

    def deliver(self, event: Event) -> None:
        """Hand out an event; a callback that raises ends the job and gets only its last event."""
        if self.error is not None and event.reason is None:
            return
        try:
            self._deliver(event)
        except ENDS_PROGRAM:
            raise
        except BaseException as error:
            log.exception("the callback of a request failed, which ends the request")
            self.error = as_text_error(error)
            self.cancel()

    def change(self, request: Request) -> None:
        """Continue with the settings, stops, hooks and exclusions of another request."""
        self.request = request
        self.output.follow(request)
        if self.constraint is not None:
            self.constraint.follow(request.stops)
        self.is_stale = self.launched > 0

    def exclude(self, ids: frozenset[int]) -> None:
        """Exclude these ids and no others from the next sample on.

        They may differ for every sample: the job no longer runs ahead, nor uses drafts.
        """
        self.output.excluded = ids
        self.is_stepwise, self.is_stale = True, self.launched > 0

    @property
    def lead(self) -> Sequence:
        """The sequence whose slot samples."""
        return self.sequences[0]

    @property
    def may_be_overtaken(self) -> bool:
        """Whether another job may start before this one, which waits."""
        most = self.request.max_skips
        return most is None or self.skips < most

    @property
    def wants_more(self) -> bool:
        """Whether another sample may be launched."""
        if self.launched and self.output.waits:
            return False
        return self.output.new_tokens + self.launched < self.output.max_new_tokens

    def max_drafts(self, limit: int) -> int:
        """Return how many draft tokens the next step may verify, at most `limit`."""
        waits = self.request.hooks or (self.output.waits and self.request.settings.mirostat)
        if waits or self.is_stepwise or self.output.healing is not None:
            return 0  # a sample, or what Mirostat learned from it, may be taken back
        left = self.output.max_new_tokens - self.output.new_tokens - self.launched - 1
        return max(0, min(limit, left))

    @property
    def reads_drafts(self) -> bool:
        """Whether the host must know draft tokens before they are verified."""
        return self.constraint is not None or self.output.has_cut or len(self.sequences) > 1

    def draw(self, position: int) -> float:
        """Return the draw for a draft position of the step that was launched last."""
        index = self.launched - 1 + position
        while len(self.draws) <= index:
            self.draws.append(self.random.random())
        return self.draws[index]

    def mask(self, drafted: list[int]) -> Mask:
        """Return the mask of the sample after these draft tokens, if they are accepted."""
        offset = self.launched - 1 + len(drafted)
        return None if offset else self.output.healing, self.output.blocked(offset, drafted)

    def follows(self, token: Token, cut: int, ends: frozenset[int]) -> bool:
        """Advance the constraint by a token, or roll it back; False: the token ends the text."""
        if self.constraint is None:
            return True
        if cut:
            self.constraint.rollback(cut - 1)  # the last one was not accepted
            return True
        self.constraint.accept(token.id, fed=token.fed)
        return not token.fed or token.id not in ends

    def queued(self) -> None:
        """Note that the job waits from now on."""
        self._times = [time.monotonic()]

    def started(self) -> None:
        """Note that the prompt is read from now on."""
        if len(self._times) == 1:
            self._times.append(time.monotonic())
            self.deliver(Event(stage="started", tag=self.request.tag))

    def sampled(self) -> None:
        """Note that a token arrived."""
        if len(self._times) == 2:
            held = [s.held for s in self.sequences]
            self._cached = [sum(h.cached for h in held), sum(h.cached_pages for h in held)]
            self._hits = sum((h.loaded for h in held), Counter[str]())
            self._times.append(time.monotonic())
        self._times[3:] = [time.monotonic()]

    def statistics(self) -> Statistics:
        """Return the counts and times so far."""
        now = [time.monotonic()] * 4
        queued, started, first, last = [*self._times, *now][:4]
        loaded = {tier: self._hits[tier] for tier in ("ram", "disk")}
        return Statistics(
            prompt_tokens=sum(map(len, self.prompt.sequences)),
            cached_tokens=self._cached[0],
            cached_pages=self._cached[1],
            new_tokens=max(self.output.new_tokens, 0),
            drafts=self.acceptance.counts,
            steps=self.steps,
            waiting_seconds=started - queued,
            prompt_seconds=first - started,
            text_seconds=last - first,
            hits={"gpu": self._cached[0] - loaded["ram"] - loaded["disk"], **loaded},
        )


def skip_draws(generator: random.Random, draws: int) -> None:
    """Skip `draws` calls of a generator's `random`, in a seventh of their time."""
    while draws > 0:
        generator.getrandbits(DRAW_BITS * min(draws, DRAWS))
        draws -= DRAWS
