"""Draft tokens from the model's own block for them (multi-token prediction).

The block reads a token and the model's state before it. Those states are left by the model's last
pass, so what the block stores for accepted tokens comes from the model; behind them it goes on from
states of its own. A pair of token p and state p - 1 is stored at place p - 1.

All that it reads is on the device: texts, their lengths and states. So the host need not know a
token before it is drafted from, nor draft tokens before they are verified.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from weakref import WeakKeyDictionary

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.paged import reserve
from exl2flow.engine.cache.views import PromptView, Segment, StepView
from exl2flow.engine.drafts.acceptance_rate import DraftKind
from exl2flow.engine.drafts.costs import COUNTS, DRAFTED_ROWS
from exl2flow.engine.drafts.draft_head import DraftHead
from exl2flow.engine.drafts.proposer import (
    MOST_DRAFTED,
    ON_DEVICE,
    DraftRequest,
    Proposal,
    SharedSlots,
    check,
)
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.kernels.cuda.graphs import bucket
from exl2flow.model import Decoder, ModelSpec, RopeTables
from exl2flow.model.config.mtp import TOKEN_COUNTS, MtpSpec, mtp_of
from exl2flow.model.layers.mtp import block_in, build_mtp, tensors_of
from exl2flow.model.layers.placement import Placement

_HAVE_BLOCKS = WeakKeyDictionary[Decoder, bool]()  # to tell, headers of all files are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """Proposes what the model's own MTP block expects.

    tokens: the most draft tokens per step. Raises `ConfigError` for a number out of range.
    """

    tokens: int = 4
    model = None
    reads_states = True

    def __post_init__(self) -> None:
        check("tokens", self.tokens, 1, MOST_DRAFTED)

    def beside(self, model: LoadedModel) -> list[tuple[ModelSpec, Placement]]:
        """Return the block; raises `ConfigError` as `start` does."""
        return [(block_of(model).layer, Placement.on(model.decoder.placement.head, 1))]

    def start(self, model: LoadedModel, slots: SharedSlots) -> "MtpProposer":
        """Load the block and reserve a cache for it.

        Raises:
            ConfigError: the model has no such block, or is split.
            OutOfDeviceMemory: it does not fit.
        """
        return MtpProposer(self, model, slots)


class MtpProposer:
    """The block and its cache, in the slots of a generator.

    drafted: int64 (slots, drafts), what it proposed last.
    """

    decoder = None
    reads_ids = False

    def __init__(self, draft: Mtp, model: LoadedModel, slots: SharedSlots) -> None:
        found, decoder, device = block_of(model), model.decoder, slots.tables.device
        assert slots.hidden is not None
        self._slots, self._hidden, self._most = slots, slots.hidden, draft.tokens
        tensors = tensors_of(found)
        self._block = build_mtp(
            found,
            tensors,
            embedding=decoder.embedding,
            head=decoder.head,
            dtype=decoder.embedding.weight.dtype,
            device=device,
        )
        head = self._block.head
        counts = tensors.read(TOKEN_COUNTS) if TOKEN_COUNTS in tensors else None
        self._head = DraftHead(head, counts) if DraftHead.is_worth_it(head) else None
        self._normed = decoder.head.normed if found.reads_normed else lambda hidden: hidden
        self._vocabulary = len(decoder.embedding.weight)
        cache, size = slots.cache, len(slots.hidden)
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
        self._known_ids = WeakKeyDictionary[object, int]()  # of texts, in the head
        self.drafted = torch.zeros(size, draft.tokens, dtype=torch.int64, device=device)
        self._ahead: tuple[int, int] | None = None  # slots and tokens that are drafted already

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
            view, known = PromptView(self.cache, moved), self._known(torch.cat(ids)[None])
            joined = self._normed(torch.cat(hidden)[None])
            self._block.fill(known, joined, view, self._angles.at(view.positions))

    def warm_up(self, batches: Sequence[int]) -> None:
        most = self._hidden.shape[1]
        counts = sorted({min(count, most) for count in COUNTS})
        for batch, count in product(batches, counts):
            if count == 1 or batch * count <= DRAFTED_ROWS:
                for drafts in range(1 + min(self._most, DRAFTED_ROWS // batch - 1)):
                    key = batch, count, drafts
                    self._slots.graphs.make(("mtp", *key), partial(self._chain, *key))

    def wants(self, request: DraftRequest) -> bool:
        return self._count(request) > 0

    def follow(self, requests: Mapping[int, DraftRequest]) -> None:
        self._run(requests, 0)

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        """Propose the likeliest tokens of each slot, which stay on the device."""
        counts = {slot: self._count(request) for slot, request in requests.items()}
        self._run(requests, max(counts.values()))
        return {slot: Proposal([ON_DEVICE] * n, DraftKind.MTP) for slot, n in counts.items()}

    def run_ahead(self, slots: int, drafts: int) -> None:
        drafts = min(drafts, self._most)
        self._ahead = self._chained(slots, 1 + drafts, drafts), drafts

    def forget(self) -> None:
        self._ahead = None

    def _count(self, request: DraftRequest) -> int:
        if request.length < 2:  # no token has a state before it
            return 0
        return min(request.most(DraftKind.MTP), self._most)

    def _run(self, requests: Mapping[int, DraftRequest], drafts: int) -> None:
        """Read what texts have got since the model's last pass, and draft behind it."""
        count = max([self._unread(request) for request in requests.values()])
        (batch, known), self._ahead = self._ahead or (0, 0), None
        if drafts > known or max(requests) >= batch:
            self._chained(1 + max(requests), count, drafts)

    def _chained(self, slots: int, count: int, drafts: int) -> int:
        """Launch the chain of the first slots, and of some more; return how many those are."""
        batch = min(bucket(slots), len(self.drafted))
        key = batch, min(bucket(count), self._hidden.shape[1]), drafts
        self._slots.graphs.replay(("mtp", *key), partial(self._chain, *key))
        return batch

    def _unread(self, request: DraftRequest) -> int:
        """Return at least how many tokens are behind states that the last pass has left."""
        before = self._lengths.get(request.owner, request.length)
        self._lengths[request.owner] = request.length
        if self._head is not None:
            self._head.add(request.ids[self._known_ids.get(request.owner, 0) :])
            self._known_ids[request.owner] = len(request.ids)
        return max(1, request.length - before)

    def _chain(self, batch: int, count: int, drafts: int) -> None:
        """Run the block over the last `count` tokens, then over its own; repeating changes nothing.

        Rows behind a text's last token repeat it, at places that are written again later.
        """
        slots = self._slots
        begins, lengths = slots.begins[:batch], slots.lengths[:batch]
        places = begins[:, None] + torch.arange(1, 1 + count, device=begins.device)
        places = places.clamp(min=0).minimum(lengths[:, None]).long()
        tokens = slots.history[:batch].gather(1, places)
        hidden, begins = self._normed(self._hidden[:batch, :count]), begins.clamp(min=0)
        if not drafts:
            self._block.fill(self._known(tokens), hidden, *self._places(begins, count))
            return
        ends = (lengths - 1 - begins).clamp(0, count - 1)
        states = self._states(tokens, hidden, begins)
        states = states.gather(1, ends[:, None, None].expand(-1, 1, states.shape[-1]).long())
        for position in range(drafts):
            if position:
                last = self.drafted[:batch, position - 1 : position]
                states = self._states(last, states, begins + ends + position)
            self.drafted[:batch, position] = self._likeliest(states[:, -1])

    def _likeliest(self, states: torch.Tensor) -> torch.Tensor:
        if self._head is not None:
            return self._head.likeliest(states)
        return self._block.head.logits(states).argmax(dim=-1)

    def _states(
        self, tokens: torch.Tensor, hidden: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        view, table = self._places(starts, tokens.shape[1])
        return self._block.states(self._known(tokens), hidden, view, table)

    def _places(self, starts: torch.Tensor, count: int) -> tuple[StepView, RopeTables]:
        """Return the cache of `count` tokens of each of the first slots, and their rotations."""
        tables = self._slots.tables[: len(starts)]
        view = StepView(self.cache, tables, starts, count=count)
        return view, self._angles.at(view.positions)

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids that the embedding has; those of images are read as any token."""
        return ids.long().clamp(max=self._vocabulary - 1)


def has_block(model: LoadedModel) -> bool:
    """Return whether a model has a block that runs here; see `block_of`."""
    return not _missing(model)


def block_of(model: LoadedModel) -> MtpSpec:
    """Return the block of a model that lies whole on one device.

    Raises:
        ConfigError: it has none, or is divided.
    """
    if why := _missing(model):
        raise ConfigError(why)
    found = mtp_of(model.spec)
    assert found is not None
    return found


def _missing(model: LoadedModel) -> str:
    """Return why a model drafts nothing by itself; empty: it does."""
    if model.decoder not in _HAVE_BLOCKS:
        _HAVE_BLOCKS[model.decoder] = block_in(model.spec) is not None
    if not _HAVE_BLOCKS[model.decoder]:
        return (
            f"`{model.spec.source_dir}` has no block that drafts tokens (MTP); use n-grams, or a "
            "smaller model"
        )
    if model.decoder.placement.is_split or model.ranks is not None or model.team is not None:
        return "an MTP block runs on one GPU; load the whole model there"
    return ""
