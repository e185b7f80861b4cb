"""Texts sampled at random under filters, for tests of them."""

from collections.abc import Sequence
from random import Random

import torch

from exl2flow.engine.filters import Combined, Constraint
from exl2flow.kernels.reference.logits import contains
from exl2flow.model import Tokenizer


def ids_of(words: torch.Tensor | None, width: int) -> list[int]:
    """Return the ids of a mask; all of them without one."""
    ids = torch.arange(width)
    return (ids if words is None else ids[contains(words[None], ids[None])[0]]).tolist()


def walk(
    state: Constraint, tokenizer: Tokenizer, *, seed: int, width: int | None = None, most: int = 200
) -> list[int] | None:
    """Accept allowed ids at random; return them without EOS; None if the text does not end.

    White space is sampled rarely, since grammars allow any amount of it.
    """
    random, ids = Random(seed), list[int]()
    for _ in range(most):
        allowed = state.allowed()
        if allowed.must_end:
            return ids
        choices = ids_of(allowed.words, tokenizer.vocab_size if width is None else width)
        dense = [token for token in choices if tokenizer.pieces[token].strip()]
        token = random.choice(dense if dense and random.random() < 0.9 else choices)
        if token in tokenizer.special_ids and token in allowed.ends:
            return ids
        state.accept(token)
        ids.append(token)
        if token in allowed.ends:
            return ids
    return None


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text that ids add within a text."""
    return tokenizer.decode(tokenizer.encode("a") + list(ids))[1:]


def same(one: Combined, other: Combined) -> bool:
    """Return whether two texts may go on alike."""
    first, second = one.allowed(), other.allowed()
    words = (first.words, second.words)
    alike = words[0] is words[1] if None in words else torch.equal(*words)
    facts = [(a.ends, a.may_end, a.must_end) for a in (first, second)]
    return bool(alike and facts[0] == facts[1])
