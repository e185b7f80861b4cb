"""Draft tokens from the model's own block for them (multi-token prediction).

The block reads a token and the model's state before it. Those states are left by the model's last
pass, so what the block stores for accepted tokens comes from the model; behind them it goes on from
states of its own. A pair of token p and state p - 1 is stored at place p - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.paged import reserve
from exl2flow.engine.cache.views import PromptView, Segment, StepView
from exl2flow.engine.drafts.chain import chained, likeliest
from exl2flow.engine.drafts.proposer import (
    MOST_DRAFTED,
    DraftKind,
    DraftRequest,
    Proposal,
    SharedSlots,
    check,
)
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.kernels import on_device
from exl2flow.kernels.cuda.graphs import bucket
from exl2flow.model import CanonicalTensors, RopeTables
from exl2flow.model.config.mtp import MtpSpec, mtp_of
from exl2flow.model.layers.mtp import build_mtp, is_complete
from exl2flow.model.layers.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """Proposes what the model's own MTP block expects.

    tokens: the most draft tokens per step; least: a token of less probability ends the draft.
    Raises `ConfigError` for a number out of range.
    """

    tokens: int = 3
    least: float = 0.0
    model = None
    reads_states = True

    def __post_init__(self) -> None:
        check("tokens", self.tokens, 1, MOST_DRAFTED)
        check("least", self.least, 0, 1)

    def start(self, model: LoadedModel, slots: SharedSlots) -> "MtpProposer":
        """Load the block and reserve a cache for it.

        Raises:
            ConfigError: the model has no such block, or is split.
        """
        return MtpProposer(self, model, slots)


class MtpProposer:
    """The block and its cache, in the slots of a generator.

    new: int64 (slots, 1 + drafts), tokens that the block has not read behind a state of the model;
    starts: int32 (slots,), their first place; ends: int64 (slots,), the index of the last one;
    state: (slots, 1, hidden), what the block made last; ids: int64 (slots, drafts), draft tokens;
    proposed: fp64 (slots, drafts, 2), these and their probabilities.
    """

    decoder = None

    def __init__(self, draft: Mtp, model: LoadedModel, slots: SharedSlots) -> None:
        found, decoder, device = block_of(model), model.decoder, slots.tables.device
        assert slots.hidden is not None
        self._slots, self._least, self._hidden = slots, draft.least, slots.hidden
        self._block = build_mtp(
            found,
            CanonicalTensors(found.layer),
            embedding=decoder.embedding,
            head=decoder.head,
            dtype=decoder.embedding.weight.dtype,
            device=device,
        )
        self._normed = decoder.head.normed if found.reads_normed else lambda hidden: hidden
        cache, (size, rows, width) = slots.cache, slots.hidden.shape
        self.cache = reserve(
            found.layer,
            pages=cache.pages,
            form=cache.form,
            placement=Placement.on(device, 1),
            page_tokens=cache.page_tokens,
        )
        places = slots.tables.shape[1] * cache.page_tokens
        self._angles = RopeTables.of(found.layer, places, device)
        self._lengths = WeakKeyDictionary[object, int]()  # of texts at the model's last pass
        self._new = torch.zeros(size, rows, dtype=torch.int64, device=device)
        self._starts = torch.zeros(size, dtype=torch.int32, device=device)
        self._ends = torch.zeros(size, dtype=torch.int64, device=device)
        self._state = torch.zeros(size, 1, width, dtype=slots.hidden.dtype, device=device)
        self._ids = torch.zeros(size, draft.tokens, dtype=torch.int64, device=device)
        self._proposed = torch.zeros(size, draft.tokens, 2, dtype=torch.float64, device=device)

    @property
    def stored(self) -> list[torch.Tensor]:
        return self.cache.tensors

    def copy(self, pages: torch.Tensor) -> None:
        self.cache.copy(pages)

    def read(self, tokens: torch.Tensor, segments: Sequence[Segment], states: torch.Tensor) -> None:
        """Follow a pass over prompts, whose states (t, hidden) are given."""
        ids, hidden, moved, begin = list[torch.Tensor](), list[torch.Tensor](), list[Segment](), 0
        for segment in segments:
            end = begin + segment.count
            own, first = states[begin:end], max(segment.begin, 1)
            before = self._hidden[segment.slot, :1] if segment.begin else own[:0]
            ids.append(tokens[0, end - (segment.end - first) : end])
            hidden.append(torch.cat([before, own[:-1]]))
            if segment.end > first:
                moved.append(replace(segment, begin=first - 1, end=segment.end - 1))
            self._hidden[segment.slot, 0] = own[-1]
            begin = end
        if moved:
            view = PromptView(self.cache, moved)
            joined = self._normed(torch.cat(hidden)[None])
            self._block.states(torch.cat(ids)[None], joined, view, self._angles.at(view.positions))

    def see(self, requests: Mapping[int, DraftRequest]) -> None:
        """Follow texts for which nothing is to be proposed now."""
        self.propose({slot: request._replace(limit=0) for slot, request in requests.items()})

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        """Return the likeliest tokens of each slot, fewer where the block is unsure."""
        slots = max(requests) + 1
        new = {slot: self._unread(request) for slot, request in requests.items()}
        count = bucket(max(map(len, new.values())))
        count = min(count, self._new.shape[1])
        padded = [[*new.get(slot, ()), *[0] * count][:count] for slot in range(slots)]
        starts = [len(requests[s].ids) - 1 - len(new[s]) if s in new else 0 for s in range(slots)]
        ends = [len(new[slot]) - 1 if slot in new else 0 for slot in range(slots)]
        for target, values in ((self._new, padded), (self._starts, starts), (self._ends, ends)):
            tensor = on_device(torch.tensor(values, dtype=target.dtype), target.device)
            (target[:slots, :count] if target.dim() > 1 else target[:slots]).copy_(tensor)
        most = {slot: self._most(request) for slot, request in requests.items()}
        run = partial(self._pass, slots, count)
        drafts = chained(most, self._proposed, least=self._least, run=run)
        return {slot: Proposal(ids, DraftKind.MTP) for slot, ids in drafts.items()}

    def _unread(self, request: DraftRequest) -> Sequence[int]:
        """Return the tokens behind states that the model's last pass has left."""
        length = len(request.ids)
        count = length - self._lengths.get(request.owner, length - 1)
        self._lengths[request.owner] = length
        if not 1 <= count <= self._new.shape[1]:  # the text was cut back, or has waited
            count = 1
        return request.ids[-min(count, length - 1) :] if length > 1 else request.ids

    def _most(self, request: DraftRequest) -> int:
        return min(request.most(DraftKind.MTP), self._ids.shape[1]) if len(request.ids) > 1 else 0

    def _pass(self, slots: int, count: int, position: int) -> None:
        batch, count = min(bucket(slots), len(self._ids)), 1 if position else count
        work = partial(self._propose, batch, count, position)
        self._slots.graphs.replay(("mtp", batch, count, position), work)

    def _propose(self, batch: int, count: int, position: int) -> None:
        """Append the likeliest token to the draft tokens; repeating it changes nothing."""
        starts, ends = self._starts[:batch], self._ends[:batch]
        if position:
            starts = starts + ends.int() + position
            tokens, hidden = self._ids[:batch, position - 1 : position], self._state[:batch]
        else:
            tokens, hidden = self._new[:batch, :count], self._normed(self._hidden[:batch, :count])
        view = StepView(self.cache, self._slots.tables[:batch], starts.clamp(min=0), count=count)
        states = self._block.states(tokens, hidden, view, self._angles.at(view.positions))
        if not position:
            rows = ends[:, None, None].expand(-1, 1, states.shape[-1])
            states = states.gather(1, rows)
        self._state[:batch] = states
        logits = self._block.head.logits(states)[:, -1]
        self._proposed[:batch, position] = proposed = likeliest(logits)
        self._ids[:batch, position] = proposed[:, 0].long()


def block_of(model: LoadedModel) -> MtpSpec:
    """Return the block of a model that lies whole on one device.

    Raises:
        ConfigError: it has none, or is divided.
    """
    found, placement = mtp_of(model.spec), model.decoder.placement
    if found is None or not is_complete(found, CanonicalTensors(found.layer)):
        raise ConfigError(
            f"`{model.spec.source_dir}` has no block that drafts tokens (MTP); use n-grams, or a "
            "smaller model"
        )
    if placement.is_split or model.ranks is not None or model.team is not None:
        raise ConfigError("an MTP block runs on one GPU; load the whole model there")
    return found
