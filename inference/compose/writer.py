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
    """A model, the cache of `texts` texts of up to `span` tokens, and passes over them."""

    def __init__(self, model: LoadedModel, *, texts: int, span: int) -> None:
        """Take the memory of the cache."""
        self._model, self._span = model, span
        decoder = model.decoder
        self._device = device = decoder.placement.head
        pages, form = texts * pages_of(span), cache_format(exact_format(device), device)
        self._cache = cache = PagedCache(
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
        records = device.type == "cuda" and not decoder.waits_for_routes
        places = []
        for part in decoder.spans:
            graphs = GraphPool(nullcontext, records=records, device=part.device)
            angles = RopeTables.of(decoder.spec, span, part.device)
            places.append(SpanPlace(part, cache.at(part.device), angles, graphs))
        self._passes = Passes(
            places,
            self._read,
            decoder=lambda batch: decoder,
            end=lambda decoder, hidden: decoder.head(hidden),
        )

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
        device, batch = self._device, len(seeds)
        table, draws, ends = _table(openings).to(device), self._draws(seeds), self._ends()
        rows = torch.arange(batch, device=device)
        turn, place = torch.zeros_like(rows), torch.zeros_like(rows)
        drawn = torch.full_like(rows, NOTHING)
        ids = torch.empty((batch, self._span), dtype=torch.int64, device=device)
        finite = torch.ones((), dtype=torch.bool, device=device)  # read once: reading waits
        self._begin()
        self._passes.make((batch,), batch, 1)
        self._begin()  # a recording advances states
        for position in range(self._span):
            given = table[rows, turn, place]
            token = torch.where(given == NOTHING, drawn, given)
            ids[:, position] = token
            self._read.ids[:batch, 0] = token
            has_ended = torch.isin(token, ends) & (given == NOTHING)
            turn = (turn + has_ended) % table.shape[1]
            place = torch.where(has_ended, 0, (place + 1).clamp(max=table.shape[2] - 1))
            logits = self._passes.run((batch,), batch, 1)[:, 0, : self._known]
            self._read.lengths.add_(1)
            finite &= logits.isfinite().all()
            drawn = draw_tokens(logits, draws[:, position])
            if position % LOOK_EVERY == 0:
                look(position)
        if not finite:
            raise InferenceError(
                f"the logits of `{self._model.spec.source_dir}` are not finite while it writes "
                "calibration rows; check its files, or use `--calibration standard`"
            )
        return ids.cpu()

    @property
    def _known(self) -> int:
        """The tokens that may be drawn: those that the tokenizer knows."""
        return min(self._model.spec.vocab_size, self._model.tokenizer.vocab_size)

    def _begin(self) -> None:
        """Forget the texts before."""
        self._read.lengths.zero_()
        if self._cache.states is not None:
            self._cache.states.clear()

    def _draws(self, seeds: Sequence[str]) -> torch.Tensor:
        """Return draws from [0, 1), fp64 (texts, span)."""
        sources = map(random.Random, seeds)
        draws = [[source.random() for _ in range(self._span)] for source in sources]
        return torch.tensor(draws, dtype=torch.float64, device=self._device)

    def _ends(self) -> torch.Tensor:
        ends = list(self._model.tokenizer.eos_token_ids)
        return torch.tensor(ends, dtype=torch.int64, device=self._device)


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
