"""Let a model write many texts side by side, each with draws of its own."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch.nn.utils.rnn import pad_sequence

from exl2flow.core.errors import InferenceError
from exl2flow.engine.cache.paged import PagedCache, cache_format, pages_of
from exl2flow.engine.generate.passes import Passes, Sequences, SpanPlace
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import RopeTables
from exl2flow.model.memory.footprint import exact_format

NOTHING = -1  # behind an opening's last token
LOOK_EVERY = 64  # tokens between two calls of `look`
Look = Callable[[int], None]


class TextWriter:
    """A model, the cache of `texts` texts of `span` tokens, and all that a step changes.

    A step is one recording: the pass over the last tokens, the draws, and the choice of the next.
    """

    def __init__(self, model: LoadedModel, *, texts: int, span: int) -> None:
        """Take the memory of the cache."""
        self._model, self._span = model, span
        decoder = model.decoder
        device = decoder.placement.head
        pages, form = texts * pages_of(span), cache_format(exact_format(device), device)
        self._cache = PagedCache(
            decoder.spec,
            pages=pages,
            form=form,
            device=device,
            layers=decoder.placement.layers,
            slots=texts,
        )
        self._read = Sequences(
            torch.arange(pages, dtype=torch.int32, device=device).view(texts, -1),
            torch.zeros(texts, dtype=torch.int32, device=device),
            torch.zeros(texts, 1, dtype=torch.int64, device=device),
        )
        self._ids = torch.zeros((texts, span), dtype=torch.int64, device=device)
        self._draws = torch.zeros((texts, span), dtype=torch.float64, device=device)
        self._turn = torch.zeros(texts, dtype=torch.int64, device=device)  # of the openings
        self._place = torch.zeros(texts, dtype=torch.int64, device=device)  # in an opening
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        ends = list(model.tokenizer.eos_token_ids)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._table = torch.zeros(0)  # of openings
        self._known = min(model.spec.vocab_size, model.tokenizer.vocab_size)
        self._records = device.type == "cuda" and not decoder.waits_for_routes

    @torch.inference_mode()
    def write(
        self, openings: Sequence[Sequence[list[int]]], seeds: Sequence[str], look: Look
    ) -> torch.Tensor:
        """Write one text per seed, drawn at temperature 1.

        Each text has its own draws, so batching changes nothing beyond the rounding of sums. After
        an end token that the model drew, the text goes on with the next of its openings.

        Args:
            openings: of each text, the same number.
            seeds: of each text's draws.
            look: called with the position every few tokens; may raise to stop.

        Returns:
            int64 (texts, span) on the CPU.

        Raises:
            InferenceError: the logits are not finite.
        """
        batch = len(seeds)
        self._table = _table(openings).to(self._ids.device)
        sources = map(random.Random, seeds)
        drawn = [[source.random() for _ in range(self._span)] for source in sources]
        self._draws[:batch] = torch.tensor(drawn, dtype=torch.float64)
        passes = self._passes()
        self._begin()
        passes.make((batch,), batch, 1)
        self._begin()  # a recording does steps
        for position in range(self._span - 1):
            passes.run((batch,), batch, 1)
            if position % LOOK_EVERY == 0:
                look(position)
        if not self._finite:
            raise InferenceError(
                f"the logits of `{self._model.spec.source_dir}` are not finite while it writes "
                "calibration rows; check its files, or use `--calibration standard`"
            )
        return self._ids[:batch].cpu()

    def _passes(self) -> Passes:
        """Return the steps of a batch, none of which is recorded yet."""
        places = []
        for part in self._model.decoder.spans:
            graphs = GraphPool(nullcontext, records=self._records, device=part.device)
            angles = RopeTables.of(self._model.spec, self._span, part.device)
            places.append(SpanPlace(part, self._cache.at(part.device), angles, graphs))
        return Passes(
            places,
            self._read,
            decoder=lambda batch: self._model.decoder,
            end=lambda decoder, hidden: self._go_on(decoder.head(hidden)[:, 0, : self._known]),
        )

    def _begin(self) -> None:
        """Begin all texts with the first token of their first openings."""
        for tensor in (self._read.lengths, self._turn, self._place):
            tensor.zero_()
        self._finite.fill_(True)
        if self._cache.states is not None:
            self._cache.states.clear()
        firsts = self._table[:, 0, :1]
        self._read.ids[: len(firsts)] = self._ids[: len(firsts), :1] = firsts

    def _go_on(self, logits: torch.Tensor) -> None:
        """Choose and store the next tokens, from logits (b, v)."""
        batch = len(logits)
        rows = torch.arange(batch, device=logits.device)
        token, turn, place = self._read.ids[:batch, 0], self._turn[:batch], self._place[:batch]
        lengths = self._read.lengths[:batch]
        was_drawn = self._table[rows, turn, place] == NOTHING
        has_ended = torch.isin(token, self._ends) & was_drawn
        turn.add_(has_ended).remainder_(self._table.shape[1])
        place.add_(1).clamp_(max=self._table.shape[2] - 1).masked_fill_(has_ended, 0)
        given = self._table[rows, turn, place]
        drawn = draw_tokens(logits, self._draws[rows, lengths.long()])
        lengths.add_(1)
        token.copy_(torch.where(given == NOTHING, drawn, given))
        self._ids[rows, lengths.long()] = token
        self._finite &= logits.isfinite().all()


def draw_tokens(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw a token per row from softmax(logits), by inverse transform sampling.

    Args:
        logits: (b, v).
        draws: fp64 (b,), uniform in [0, 1).

    Returns:
        int64 (b,).
    """
    sums = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    tokens = torch.searchsorted(sums, (draws * sums[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)


def _table(openings: Sequence[Sequence[list[int]]]) -> torch.Tensor:
    """Return openings int64 (texts, in turn, tokens), `NOTHING` behind each of them."""
    flat = [torch.tensor([*ids, NOTHING]) for text in openings for ids in text]
    padded = pad_sequence(flat, batch_first=True, padding_value=NOTHING)
    return padded.view(len(openings), -1, padded.shape[1])
