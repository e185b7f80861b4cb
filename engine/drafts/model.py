"""Draft tokens from a smaller model with the same vocabulary.

Its cache has as many pages as the generator's and uses them alike, so tables, lengths, copies and
shared beginnings are those of the generator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from operator import ne
from weakref import WeakKeyDictionary

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.paged import reserve
from exl2flow.engine.cache.views import PromptView, Segment, StepView
from exl2flow.engine.drafts.acceptance_rate import DraftKind
from exl2flow.engine.drafts.proposer import (
    MOST_DRAFTED,
    DraftRequest,
    Proposal,
    SharedSlots,
    check,
)
from exl2flow.engine.loading.load import LoadedModel, check_loaded
from exl2flow.kernels import on_device
from exl2flow.kernels.cuda.graphs import bucket
from exl2flow.model import ModelSpec, Placement, RopeTables, Tokenizer

SPARE_IDS = 128  # that one vocabulary may have more than the other
SHOWN = 20  # characters of a piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Proposes the likeliest tokens of a draft model.

    tokens: the most draft tokens per step; least: a token of less probability ends the draft.
    Raises `ConfigError` for a number out of range.
    """

    model: LoadedModel
    tokens: int = 4
    least: float = 0.25
    reads_states = False

    def __post_init__(self) -> None:
        check_loaded("model", self.model)
        check("tokens", self.tokens, 1, MOST_DRAFTED)
        check("least", self.least, 0, 1)

    def beside(self, _: LoadedModel) -> list[tuple[ModelSpec, Placement]]:
        """Return the draft's model."""
        return [(self.model.spec, self.model.decoder.placement)]

    def start(self, model: LoadedModel, slots: SharedSlots) -> "ModelProposer":
        """Reserve a cache.

        Raises:
            ConfigError: vocabularies or devices differ, or the draft's model has a state.
        """
        if self.model.spec.deltas:
            raise ConfigError(
                f"`{self.model.spec.source_dir}` has layers with a state, which cannot be taken "
                "back: it drafts nothing; use n-grams (`--ngram`)"
            )
        check_vocabularies(self.model.tokenizer, model.tokenizer)
        return ModelProposer(self, slots)


class ModelProposer:
    """A draft model and its cache, in the slots of a generator.

    ids: int64 (slots, 2 + tokens), the last two of each text, then draft tokens; proposed: fp64
    (slots, tokens, 2), draft tokens and their probabilities.
    """

    drafted, reads_ids = None, True

    def __init__(self, draft: Draft, slots: SharedSlots) -> None:
        self.decoder, self._slots, self._least = draft.model.decoder, slots, draft.least
        device, size, spec = slots.tables.device, len(slots.lengths), draft.model.spec
        placement = self.decoder.placement
        if placement.is_split or placement.head != device:
            raise ConfigError(f"the draft's model is not on {device}; load all of it there")
        pages, form, page_tokens = slots.cache.pages, slots.cache.form, slots.cache.page_tokens
        self.cache = reserve(
            spec, pages=pages, form=form, placement=placement, page_tokens=page_tokens
        )
        self._angles = RopeTables.of(spec, slots.tables.shape[1] * page_tokens, device)
        self._read = WeakKeyDictionary[object, int]()  # tokens of each text that are stored
        self._ids = torch.zeros(size, 2 + draft.tokens, dtype=torch.int64, device=device)
        self._proposed = torch.zeros(size, draft.tokens, 2, dtype=torch.float64, device=device)

    @property
    def stored(self) -> list[torch.Tensor]:
        return self.cache.tensors

    def read(
        self,
        tokens: torch.Tensor,
        segments: Sequence[Segment],
        states: torch.Tensor | None = None,
    ) -> None:
        view = PromptView(self.cache, segments)
        self.decoder.fill(tokens, view, self._angles.at(view.positions))

    def copy(self, pages: torch.Tensor) -> None:
        self.cache.copy(pages)

    def warm_up(self, batches: Sequence[int]) -> None:
        for batch, position in product(batches, range(self._proposed.shape[1])):
            work = partial(self._propose, batch, position)
            self._slots.graphs.make(("draft", batch, position), work)

    def wants(self, request: DraftRequest) -> bool:
        return request.most(DraftKind.MODEL) > 0

    def run_ahead(self, *_: object) -> None: ...
    def forget(self) -> None: ...

    def follow(self, requests: Mapping[int, DraftRequest]) -> None:
        """Note texts that go on without this model; what they add is read when it is asked."""
        for request in requests.values():
            read = self._read.get(request.owner, len(request.ids) - 1)
            self._read[request.owner] = min(read, len(request.ids))

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        """Return the likeliest tokens of each slot, fewer where the model is unsure.

        The first pass takes the last two tokens of each text: if all draft tokens were accepted,
        the keys of the last one are still missing. Texts without draft tokens follow it, too.
        """
        self._catch_up(requests)
        slots = max(requests) + 1
        most = {slot: self._most(request) for slot, request in requests.items()}
        last = [requests[slot].ids[-2:] if slot in requests else (0,) for slot in range(slots)]
        pairs = torch.tensor([(ids[0], ids[-1]) for ids in last])
        self._ids[:slots, :2] = on_device(pairs, self._ids.device)
        drafts = {slot: list[int]() for slot in most}
        going, position = {slot for slot in most if most[slot]}, 0
        self._pass(slots, position)
        while going:
            found = self._proposed[:slots, position].tolist()
            going = {slot for slot in going if found[slot][1] >= self._least}
            for slot in going:
                drafts[slot].append(int(found[slot][0]))
            position += 1
            going = {slot for slot in going if position < most[slot]}
            if going:
                self._pass(slots, position)
        return {slot: Proposal(ids, DraftKind.MODEL) for slot, ids in drafts.items()}

    def _most(self, request: DraftRequest) -> int:
        return min(request.most(DraftKind.MODEL), self._proposed.shape[1])

    def _catch_up(self, requests: Mapping[int, DraftRequest]) -> None:
        """Read the tokens of texts that grew without this model, all but the last two."""
        self.follow(requests)
        ids, segments = list[int](), list[Segment]()
        for request in requests.values():
            begin, end = self._read[request.owner], len(request.ids) - 2
            if begin < end:
                ids += request.ids[begin:end]
                segments.append(Segment(pages=tuple(request.pages), begin=begin, end=end))
            self._read[request.owner] = len(request.ids)
        if segments:
            self.read(on_device(torch.tensor([ids]), self._ids.device), segments)

    def _pass(self, slots: int, position: int) -> None:
        batch = min(bucket(slots), len(self._ids))
        work = partial(self._propose, batch, position)
        self._slots.graphs.replay(("draft", batch, position), work)

    def _propose(self, batch: int, position: int) -> None:
        """Append the likeliest token to the draft tokens; repeating it changes nothing."""
        new, ids = 1 if position else 2, self._ids[:batch]
        lengths = (self._slots.lengths[:batch] + (position or -1)).clamp(min=0)
        view = StepView(self.cache, self._slots.tables[:batch], lengths, count=new)
        tokens = ids[:, position + 2 - new : position + 2]
        logits = self.decoder.forward(tokens, view, self._angles.at(view.positions))[:, -1]
        greatest, best = logits.max(dim=-1)
        probability = torch.exp(greatest - logits.logsumexp(-1))
        self._proposed[:batch, position] = torch.stack((best, probability), dim=-1)
        ids[:, position + 2] = best


def check_vocabularies(draft: Tokenizer, model: Tokenizer) -> None:
    """Raise `ConfigError` unless ids stand for the same pieces, but for a few at the end."""
    theirs, ours, problem = draft.pieces, model.pieces, ""
    if abs(len(theirs) - len(ours)) > SPARE_IDS:
        problem = f"the draft's vocabulary has {len(theirs)} ids, the model's {len(ours)}"
    elif any(map(ne, theirs, ours)):
        i, one, other = next(x for x in zip(count(), theirs, ours, strict=False) if x[1] != x[2])
        problem = f"id {i} is {one[:SHOWN]!r} for the draft and {other[:SHOWN]!r} for the model"
    if problem:
        raise ConfigError(f"{problem}; take a draft of the same model family")
