"""One KV cache and the steps that fill it, reused across prompts."""

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.sampling import Drawn, Kind, SamplerSlots, SamplingSettings
from exl2flow.inference.step import Cache, LaunchedStep, RecordedStep, can_be_recorded
from exl2flow.model import Decoder

log = logging.getLogger(__name__)


class Lane:
    """A cache whose steps are recorded, if possible, from the second token on."""

    def __init__(self, decoder: Decoder, cache: Cache, batch: int = 1) -> None:
        self.cache = cache
        spec = decoder.spec
        self._slots = SamplerSlots(
            slots=batch,
            max_tokens=cache.max_tokens,
            vocab_size=spec.vocab_size,
            width=spec.vocab_size,
            device=decoder.embedding.weight.device,
        )
        self._launched = LaunchedStep(decoder, cache, self._slots)
        self._recorded: RecordedStep | None = None
        if isinstance(cache, PagedCache) and can_be_recorded(decoder, cache):
            self._recorded = RecordedStep(decoder, cache, self._slots)

    def run(
        self, ids: torch.Tensor, settings: Sequence[SamplingSettings], draws: torch.Tensor
    ) -> Iterator[list[int]]:
        """Yield the ids that follow the prompts, one per sequence at a time.

        Args:
            ids: int64 (b, t), the prompts; earlier cache contents are dropped.
            settings: of each sequence.
            draws: fp64 (n, b), for n ids per sequence.

        Raises:
            InferenceError: the logits of one sequence are not finite.
            ContextOverflow: the cache has no room for t + n - 1 tokens.
        """
        self.cache.truncate(0)
        kind = Kind.of(settings)
        for slot, (each, prompt) in enumerate(zip(settings, ids.tolist(), strict=True)):
            self._slots.enter(slot, each, prompt)
        step: LaunchedStep | RecordedStep = self._launched
        step.begin(ids, kind)
        waiting = deque[Drawn]()
        for made, draw in enumerate(draws):
            if made == 1:  # the prompts are in the cache
                step = self._step(kind)
            waiting.append(Drawn(step(draw)))
            if len(waiting) > step.ahead:
                yield waiting.popleft().read()
        for drawn in waiting:
            yield drawn.read()

    def _step(self, kind: Kind) -> LaunchedStep | RecordedStep:
        """Return the step that continues from the launched one."""
        if self._recorded is None:
            return self._launched
        try:
            self._recorded.begin(self._launched.ids, kind)
        except RuntimeError as error:  # not retried with this cache
            log.info("step=launched reason=%s", error)
            self._recorded = None
        return self._recorded or self._launched
