"""Drafts by a smaller model of the same vocabulary.

Its cache has as many pages as the generator's and uses them alike, so tables, lengths, copies and
shared beginnings are those of the generator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.inference.cache.paged import PromptView, Segment, StepView, reserve
from exl2flow.inference.cache.pages import Copy
from exl2flow.inference.drafts.guesses import Slots, Wanted, check_tokens
from exl2flow.inference.load import LoadedModel
from exl2flow.kernels import PAGE_TOKENS, on_device
from exl2flow.kernels.recording import bucket
from exl2flow.model import Tokenizer, step_table

SPARE_IDS = 128  # that one vocabulary may have more than the other
SHOWN = 20  # characters of a piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Guesses the likeliest tokens of another model.

    tokens: at most so many are guessed at once; least: a guess of less probability is dropped, and
    what would follow it.

    Raises:
        ConfigError: a number is out of range.
    """

    model: LoadedModel
    tokens: int = 4
    least: float = 0.25

    def __post_init__(self) -> None:
        check_tokens(self.tokens)
        if not 0 <= self.least < 1:
            raise ConfigError(f"`least` of a draft is {self.least}; it must be in [0, 1)")

    def start(self, model: LoadedModel, slots: Slots) -> "ModelGuesses":
        """Reserve a cache.

        Raises:
            ConfigError: the vocabularies differ, or the devices do.
            OutOfDeviceMemory: the cache does not fit.
        """
        check_vocabularies(self.model.tokenizer, model.tokenizer)
        return ModelGuesses(self, slots)


class ModelGuesses:
    """A model and its cache behind the slots of a generator.

    ids: int64 (slots, 2 + tokens), the last two of each text, then guesses; shares: fp32
    (slots, tokens), probabilities of the guesses.
    """

    def __init__(self, draft: Draft, slots: Slots) -> None:
        self._decoder, self._slots, self._least = draft.model.decoder, slots, draft.least
        device, spec = slots.tables.device, draft.model.spec
        if self._decoder.embedding.weight.device != device:
            raise ConfigError(f"the draft's model is not on {device}; load both there")
        self.cache = reserve(spec, pages=slots.cache.pages, form=slots.cache.form, device=device)
        self._angles = step_table(spec.rope, slots.tables.shape[1] * PAGE_TOKENS, device)
        rows = len(slots.lengths)
        self._ids = torch.zeros(rows, 2 + draft.tokens, dtype=torch.int64, device=device)
        self._shares = torch.zeros(rows, draft.tokens, device=device)

    def read(self, tokens: torch.Tensor, segments: Sequence[Segment]) -> None:
        view = PromptView(self.cache, segments)
        self._decoder.hidden(tokens, view, self._angles.along(view.positions))

    def copy(self, copy: Copy | None) -> None:
        self.cache.copy(copy)

    def guess(self, wanted: Mapping[int, Wanted]) -> dict[int, list[int]]:
        """Return the likeliest tokens.

        The first pass takes the last two tokens of each text: if all guesses were right, the keys
        of the last one are still missing. Texts that want no guesses follow it, too.
        """
        slots, found = max(wanted) + 1, {slot: list[int]() for slot in wanted}
        last = [wanted[slot].ids[-2:] if slot in wanted else (0,) for slot in range(slots)]
        pairs = torch.tensor([(ids[0], ids[-1]) for ids in last])
        self._ids[:slots, :2] = on_device(pairs, self._ids.device)
        going, place = {slot for slot, one in wanted.items() if one.most}, 0
        self._pass(slots, place)
        while going:
            ids, shares = (
                self._ids[:slots, 2 + place].tolist(),
                self._shares[:slots, place].tolist(),
            )
            going = {slot for slot in going if shares[slot] >= self._least}
            for slot in going:
                found[slot].append(ids[slot])
            place += 1
            going = {slot for slot in going if place < wanted[slot].most}
            if going:
                self._pass(slots, place)
        return found

    def _pass(self, slots: int, place: int) -> None:
        rows = min(bucket(slots), len(self._ids))
        key = ("draft", rows, place)
        self._slots.recordings.replay(key, partial(self._guess, rows, place))

    def _guess(self, rows: int, place: int) -> None:
        """Put the likeliest token behind those guessed so far; to do it again changes nothing."""
        count, ids = 1 if place else 2, self._ids[:rows]
        lengths = (self._slots.lengths[:rows] + (place or -1)).clamp(min=0)
        view = StepView(self.cache, self._slots.tables[:rows], lengths, count=count)
        new = ids[:, place + 2 - count : place + 2]
        logits = self._decoder.forward(new, view, self._angles.at(view.positions))[:, -1]
        greatest, best = logits.max(dim=-1)
        ids[:, place + 2] = best
        self._shares[:rows, place] = torch.exp(greatest - logits.logsumexp(-1))


def check_vocabularies(draft: Tokenizer, model: Tokenizer) -> None:
    """Raise `ConfigError` unless ids stand for the same pieces, but for a few at the end."""
    theirs, ours = draft.pieces, model.pieces
    if abs(len(theirs) - len(ours)) > SPARE_IDS:
        raise ConfigError(
            f"the draft's vocabulary has {len(theirs)} ids, the model's {len(ours)}; take a draft "
            "of the same model family"
        )
    for i, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        if one != other:
            raise ConfigError(
                f"id {i} is {one[:SHOWN]!r} for the draft and {other[:SHOWN]!r} for the model; "
                "take a draft of the same model family"
            )
