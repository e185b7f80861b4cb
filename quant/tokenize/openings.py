"""Openings: the first tokens of texts with which a model then goes on by itself.

A text begins with BOS alone, with a piece of the built-in set, or, if the model has a chat
template, with a request as the template writes it: `docs/concepts/quality.md` says what each of
them is worth. When a text has ended, another one of its kind begins.
"""

import random
from collections.abc import Callable
from pathlib import Path

from exl2flow.calibration_data import chat, standard
from exl2flow.core.errors import ChatTemplateError
from exl2flow.core.store.files import digest, digest_of
from exl2flow.model import ChatTemplate, Tokenizer
from exl2flow.quant.tokenize.dialogues import NOW, alternated, asked_for, written_dialogues
from exl2flow.quant.tokenize.parquet import records

Opening = list[int]
Draw = Callable[[random.Random], Opening]

PIECE_TOKENS = 32  # of the built-in set, which a text continues
PIECE_LETTERS = 12 * PIECE_TOKENS  # enough for as many tokens
REQUESTS = 256  # that are tokenized
REQUEST_TOKENS = 192  # of one at most
IN_TURN = 8  # openings of a text


class Openings:
    """The openings of texts by number: those of text 0 are of the first kind, and so on in turn."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, seed: int) -> None:
        """Read what openings are made of; `folder` is the model's."""
        self._seed = seed
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        firsts = [bos] if bos else [[token] for token in plausible_firsts(tokenizer)]
        pieces = [text for (text,) in records(standard(), ["text"])]
        self._draws: dict[str, Draw] = {
            "alone": lambda source: source.choice(firsts),
            "continued": lambda source: bos + _piece(source.choice(pieces), source, tokenizer),
        }
        if requests := _requests(folder, tokenizer):
            self._draws["answers"] = lambda source: source.choice(requests)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds, in turn."""
        return tuple(self._draws)

    def of(self, text: int) -> list[Opening]:
        """Return the openings of a text, drawn from its number and the seed."""
        draw = self._draws[self.kinds[text % len(self.kinds)]]
        source = random.Random(f"{self._seed}/{text}/opening")
        return [draw(source) for _ in range(IN_TURN)]


def origin(folder: Path, tokenizer: Tokenizer) -> str:
    """Return a digest of all that openings are made of but the seed."""
    template = _template(folder, tokenizer)
    if template is None:
        return digest(standard())
    return digest_of([digest(standard()), digest(chat()), template.text, template.special_tokens])


def plausible_firsts(tokenizer: Tokenizer) -> list[int]:
    """Return tokens that may begin a text: capitalized words, or all tokens if there are none."""
    texts = ((token, tokenizer.decode([token])) for token in range(tokenizer.vocab_size))
    firsts = [token for token, text in texts if len(text) > 1 and text.isalpha() and text.istitle()]
    return firsts or list(range(tokenizer.vocab_size))


def _piece(text: str, source: random.Random, tokenizer: Tokenizer) -> Opening:
    """Return tokens from anywhere in a text, from the beginning of a word if there are spaces."""
    begin = source.randrange(max(1, len(text) - PIECE_LETTERS))
    begin = max(begin, text.find(" ", begin, begin + PIECE_LETTERS // 4))
    return tokenizer.encode(text[begin : begin + PIECE_LETTERS])[:PIECE_TOKENS]


def _requests(folder: Path, tokenizer: Tokenizer) -> list[Opening]:
    """Return first turns as the model's template writes them; none if it refuses them."""
    template = _template(folder, tokenizer)
    if template is None:
        return []
    dialogues = alternated([list(written_dialogues()), *asked_for().values()])
    try:
        asked = [
            template.render(
                [next(turn for turn in dialogue if turn.role == "user")],
                add_generation_prompt=True,
                now=NOW,
            )
            for dialogue in dialogues[:: max(1, len(dialogues) // REQUESTS)]
        ]
    except ChatTemplateError:
        return []
    encoded = [tokenizer.encode(text, special=True) for text in asked]
    return [ids for ids in encoded if len(ids) <= REQUEST_TOKENS]


def _template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(folder, tokenizer)
    except ChatTemplateError:
        return None
