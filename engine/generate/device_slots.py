"""The device side of a generator: prefill passes, and decode steps of its slots.

A decode step is two CUDA graphs: forward (ids → logits) for a batch size, and sampling (logits →
ids) for a batch size and a `Kind`. Both advance the state of their slots by themselves, so the host
may replay the next step before it has read the ids of the last one. With drafts, forward takes
several tokens per slot, and sampling is replayed per position while draft tokens are accepted.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from weakref import WeakKeyDictionary, finalize

import torch

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.adapters import AdapterSlots, Used
from exl2flow.engine.cache.page_pool import Copy
from exl2flow.engine.cache.paged import PagedCache, pages_of
from exl2flow.engine.cache.views import Segment
from exl2flow.engine.drafts import ON_DEVICE, Drafter, SharedSlots
from exl2flow.engine.drafts.costs import COUNTS, DRAFTED_ROWS, step_tokens
from exl2flow.engine.generate.draft_positions import DraftPositions
from exl2flow.engine.generate.runner import Runner
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.engine.sampling import (
    Kind,
    OwnProbabilities,
    SampledTokens,
    SamplerSlots,
    completed,
    own_probabilities,
    sample,
)
from exl2flow.kernels import STEP_TOKENS, on_device
from exl2flow.kernels.cuda.graphs import GraphPool, bucket
from exl2flow.model import Decoder, check_ids

HEAD_ROWS = 256  # whose logits exist at a time when a prompt is scored
# by slots, of recorded steps with drafts
_MOST_TOKENS = {b: max(c for c in COUNTS if b * c <= DRAFTED_ROWS) for b in range(1, DRAFTED_ROWS)}
# kernels keep sums and counters beside the weights; a stream of each device
_STREAMS = WeakKeyDictionary[Decoder, tuple[int, ...]]()


class DeviceSlots:
    """State of a generator's slots on the device, and the passes that advance it.

    tables: int32 (slots, pages); lengths: int32 (slots,), tokens whose keys and values are stored;
    ids: int64 (slots, 1 + drafts), the token after those, then draft tokens; logits: fp32
    (slots, v), from which was sampled last; begins: int32 (slots,), lengths before the last pass.
    Idle slots write to the cache's spare page. drafts: the most per slot; proposer: makes them.
    failure: after which the device may be in any state.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedCache,
        *,
        slots: int,
        max_tokens: int,
        draft: Drafter | None = None,
    ) -> None:
        """Take a cache that nothing else changes; `max_tokens` is the longest sequence."""
        self._decoder, self.cache, device = model.decoder, cache, cache.device
        width = model.spec.head.out_features
        self.drafts = drafts = 0 if draft is None else draft.tokens
        shape = (slots, pages_of(max_tokens + drafts, cache.page_tokens))
        self.tables = torch.full(shape, cache.spare, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self.begins = torch.zeros(slots, dtype=torch.int32, device=device)
        self.ids = torch.zeros(slots, 1 + drafts, dtype=torch.int64, device=device)
        self.positions = DraftPositions(slots, width, drafts, device)
        self._tokenizer = model.tokenizer
        known = min(model.tokenizer.vocab_size, model.spec.vocab_size)
        self.sampler = SamplerSlots(
            slots=slots, max_tokens=max_tokens, vocab_size=known, width=width, device=device
        )
        is_resident = isinstance(model.decoder.sublayers, list)
        is_shared = model.ranks is not None and not model.ranks.is_recordable
        records = device.type == "cuda" and is_resident and not is_shared
        records = records and not model.decoder.waits_for_routes
        idle = partial(self.positions.idle, self.sampler.active)
        self.graphs = GraphPool(idle, records=records, device=device)
        self.failure: Exception | None = None
        self._reads = 0
        self._ranks = model.ranks
        self._adapters = AdapterSlots(model.decoder, slots, self.graphs.forget)
        self._hidden: torch.Tensor | None = None
        if draft is not None and draft.reads_states:
            weight = model.decoder.embedding.weight
            room = slots, 1 + drafts, weight.shape[1]
            self._hidden = torch.zeros(room, dtype=weight.dtype, device=device)
        shared = self._shared()
        self.runner = Runner(
            model,
            shared,
            self.ids,
            self.positions,
            self._adapters,
            idle=idle,
            max_tokens=max_tokens + max(drafts, STEP_TOKENS),
        )
        if model.team is not None:
            sizes = cache.pages, cache.page_tokens, slots, max_tokens, drafts
            self.runner.counterpart = counterpart = model.team.mirror(cache.form, *sizes)
            finalize(self, model.team.drop, counterpart.key)
        self.proposer = None if draft is None else draft.start(model, shared)
        self.no_hidden = model.decoder.embedding.weight[:0].to(device)  # of no tokens
        self.check_stream()

    def _shared(self) -> SharedSlots:
        return SharedSlots(
            cache=self.cache,
            tables=self.tables,
            lengths=self.lengths,
            graphs=self.graphs,
            active=self.sampler.active,
            history=self.sampler.history,
            begins=self.begins,
            hidden=self._hidden,
        )

    @property
    def logits(self) -> torch.Tensor:
        """The logits fp32 (slots, v) from which was sampled last."""
        return self.positions.logits

    @property
    def stored(self) -> list[torch.Tensor]:
        """The tensors of all caches: what a page holds."""
        return [*self.cache.tensors, *(() if self.proposer is None else self.proposer.stored)]

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device runs a step while the host reads the last one."""
        return self.cache.device.type == "cuda"

    def check_works(self) -> None:
        """Raise `InferenceError` after a failure."""
        if self.failure is not None:
            reason = str(self.failure).partition("\n")[0] or type(self.failure).__name__
            raise InferenceError(
                f"the generator has failed: {reason}; make a new one"
            ) from self.failure

    def check_ranks(self) -> None:
        """Raise `InferenceError` if another rank is lost."""
        if self.runner.counterpart is not None:
            self.runner.counterpart.team.check()
        if self._ranks is not None:
            self._ranks.check()

    def check_stream(self) -> None:
        """Raise `ConfigError` unless streams are those on which the models are always used."""
        if self.cache.device.type != "cuda":
            return
        drafting = self.proposer.decoder if self.proposer is not None else None
        for decoder in (self._decoder, drafting):
            if decoder is None:
                continue
            devices = decoder.placement.devices
            streams = tuple(torch.cuda.current_stream(device).cuda_stream for device in devices)
            if _STREAMS.setdefault(decoder, streams) != streams:
                raise ConfigError(
                    "the model is in use on another CUDA stream; make its generators and call them "
                    "on that one, or load the model once more"
                )

    @property
    def work(self) -> int:
        """A number that other work than decode steps changes: prompts that are read, recordings."""
        return self._reads + self.graphs.recorded

    def enter(
        self,
        slot: int,
        pages: Sequence[int],
        ids: Sequence[int],
        settings: SamplingSettings,
        mu: float | None,
        adapters: Used = (),
    ) -> None:
        """Give a slot to a sequence whose tokens but the last are in the cache."""
        self._adapters.enter(slot, adapters)
        if self.cache.states is not None and len(ids) == 1:  # nothing of it was read
            self.cache.states.clear(slot)
        self.set_pages(slot, pages)
        self.sampler.enter(slot, completed(settings, self._tokenizer), ids, mu=mu)
        self.stand_at(slot, ids)

    def stand_at(self, slot: int, ids: Sequence[int]) -> None:
        """Set the tokens of a slot's sequence; the last one is read next."""
        self._forget()
        self.lengths[slot].fill_(len(ids) - 1)  # an assignment would wait for the device
        self.begins[slot].fill_(len(ids) - 2)
        self.ids[slot, 0].fill_(ids[-1])

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Set the pages of a slot's sequence."""
        self._forget()
        self.tables[slot] = self.cache.spare
        indexes = on_device(torch.tensor(pages, dtype=torch.int32), self.cache.device)
        self.tables[slot, : len(pages)] = indexes
        self.runner.tables_changed()

    def replace(self, slot: int, position: int, token: int) -> None:
        """Replace the id that was sampled last, at this position of its sequence.

        Raises:
            SourceModelError: the vocabulary does not have it.
        """
        check_ids([token], self._decoder.spec)
        self._forget()
        self.ids[slot, 0].fill_(token)
        self.sampler.history[slot, position].fill_(token)

    def leave(self, slot: int) -> None:
        """Free a slot."""
        self._forget()
        self.tables[slot] = self.cache.spare
        self.runner.tables_changed()
        self.lengths[slot].fill_(0)
        self._adapters.enter(slot)
        self.sampler.leave(slot)

    def move(self, source: int, target: int) -> None:
        """Move a sequence to a free slot."""
        own = () if self._hidden is None else (self._hidden,)
        for tensor in (self.tables, self.lengths, self.begins, self.ids, *own):
            tensor[target] = tensor[source]
        if self.cache.states is not None:
            self.cache.states.move(source, target)
        self.sampler.move(source, target)
        self._adapters.move(source, target)
        self.leave(source)

    def read(
        self,
        ids: Sequence[int],
        segments: Sequence[Segment],
        embeddings: Sequence[torch.Tensor] = (),
        adapters: Sequence[Used] = (),
        *,
        states: bool = False,
    ) -> torch.Tensor:
        """Store keys and values of the segments' tokens; return their hidden states (t, hidden).

        ids: of one segment after another; embeddings: (hidden,) for each id from `FIRST_EMBEDDING`
        on, in order; adapters: of each segment; states: return them, else none.
        """
        self._reads += 1
        self._forget()
        states = states or self._hidden is not None
        found = self.runner.read(ids, segments, embeddings, adapters, states=states)
        hidden = self.no_hidden if found is None else found
        if self.proposer is not None:
            tokens = on_device(torch.tensor([ids]), self.cache.device)
            self.proposer.read(tokens, segments, hidden)
        return hidden

    def copy(self, copy: Copy | None) -> None:
        """Copy a page."""
        if copy is None:
            return
        self._forget()
        self.runner.copy(copy.source, copy.target)
        if self.proposer is not None:
            pages = torch.tensor([[copy.source], [copy.target]])
            self.proposer.copy(on_device(pages, self.cache.device))

    def forward(self, slots: int, drafts: Mapping[int, Sequence[int]] | None = None) -> None:
        """Compute the logits after the last token of each of the first slots, and after its draft.

        drafts: draft tokens by slot; `ON_DEVICE` for each token that is in `Proposer.drafted` only.
        """
        drafts = drafts or {}
        count = step_tokens(max(map(len, drafts.values()), default=0), self.drafts)
        if count > 1:
            self._put(slots, {slot: ids for slot, ids in drafts.items() if ids}, count - 1)
        self.runner.forward(self._batch_size(slots), count)

    def _put(self, slots: int, drafts: Mapping[int, Sequence[int]], most: int) -> None:
        """Write draft tokens behind the last token of each slot."""
        known = {slot: ids for slot, ids in drafts.items() if ids[0] != ON_DEVICE}
        if len(known) < len(drafts):
            assert self.proposer is not None
            assert self.proposer.drafted is not None
            own = self.proposer.drafted[:slots, :most]
            self.ids[:slots, 1 : 1 + own.shape[1]] = own
        if known:
            padded = torch.tensor([[*ids, *[0] * (most - len(ids))] for ids in known.values()])
            rows, padded = (
                on_device(x, self.cache.device) for x in (torch.tensor([*known]), padded)
            )
            self.ids[:, 1 : 1 + most].index_copy_(0, rows, padded)

    def sample(self, slots: int, kind: Kind, *, after_draft: bool = False) -> SampledTokens:
        """Sample a token for each of the first slots; the next call overwrites the result.

        after_draft: at the next position, for the slots whose last sample was their draft token.
        """
        key = self._batch_size(slots), kind, after_draft
        return self.graphs.replay(key, partial(self._sample, *key))

    def own(self, slots: Sequence[int], sampled: SampledTokens, top: int) -> OwnProbabilities:
        """Return the model's own probabilities of what some slots have sampled last.

        Those of a sample without an id have no meaning.
        """
        rows = on_device(torch.tensor(slots), self.cache.device)
        ids, logits = sampled.ids[rows], self.logits[rows]
        return own_probabilities(logits, ids, top=top, vocab_size=self.sampler.vocab_size)

    def scores(self, states: torch.Tensor, ids: Sequence[int], top: int) -> OwnProbabilities:
        """Return the log probabilities of ids after hidden states (t, hidden), one after each."""
        next_ids = on_device(torch.tensor(ids), self.cache.device)
        parts, known = list[OwnProbabilities](), self.sampler.vocab_size
        for begin in range(0, len(ids), HEAD_ROWS):
            span = slice(begin, begin + HEAD_ROWS)
            logits = self.runner.head(states[None, span])[0]
            parts.append(own_probabilities(logits, next_ids[span], top=top, vocab_size=known))
        return OwnProbabilities.joined(parts)

    def finish_copies(self) -> None:
        """Wait until all that was launched has been computed and copied to the host."""
        if self.is_asynchronous:
            torch.cuda.current_stream(self.cache.device).synchronize()
        self.check_ranks()

    def draft_ahead(self, slots: int, drafts: int) -> None:
        """Draft behind a step that runs, while the host waits for its tokens."""
        if self.proposer is not None:
            self.proposer.run_ahead(slots, drafts)

    def _forget(self) -> None:
        if self.proposer is not None:
            self.proposer.forget()

    def max_drafts(self, slots: int) -> int:
        """Return the most draft tokens per slot that a step has rows for."""
        batch = self._batch_size(slots)
        return min(self.drafts, _MOST_TOKENS.get(batch, 1) - 1)

    def warm_up(self, kinds: Sequence[Kind]) -> None:
        """Record the steps of all batch sizes, and sampling of these kinds."""
        batches = sorted({self._batch_size(slots) for slots in range(1, len(self.ids) + 1)})
        counts = sorted({min(count, 1 + self.drafts) for count in COUNTS})
        steps = product(batches, counts)
        self.runner.warm_up([(b, n) for b, n in steps if n == 1 or b * n <= DRAFTED_ROWS])
        if self.proposer is not None:
            self.proposer.warm_up(batches)
        for key in product(batches, kinds, {False, self.drafts > 0}):
            self.graphs.make(key, partial(self._sample, *key))

    def _batch_size(self, slots: int) -> int:
        return min(bucket(slots), len(self.ids))

    def _sample(self, batch: int, kind: Kind, after_draft: bool) -> SampledTokens:
        active, ids = self.sampler.active[:batch], self.ids[:batch, 0]
        if after_draft:
            self.positions.advance(ids, active)
        else:
            self.positions.begin()
        draws = self.positions.draws(batch)
        sampled = sample(self.logits[:batch], self.sampler, draws, kind)
        self.lengths[:batch] += active
        ids.copy_(torch.where(active > 0, sampled.ids.clamp(min=0), ids))
        return sampled
