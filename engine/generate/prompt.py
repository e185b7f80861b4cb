"""A request's prompt as token ids, and the check that model and cache have room for it."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice

import torch

from exl2flow.core.errors import CacheFull, ConfigError, ContextOverflow, InferenceError
from exl2flow.core.requests.images import images_refused
from exl2flow.core.requests.request import EMBEDDING, FIRST_EMBEDDING, Request, Text
from exl2flow.engine.cache.paged import pages_of
from exl2flow.model import Decoder, Tokenizer

BLANKS = " \t"
ID_BYTES = 7  # of the hash in the id of a row, which is stored in 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one sequence, or of two for guidance; without the token that is healed.

    embeddings: rows (hidden,) by id, of ids from `FIRST_EMBEDDING` on.
    """

    sequences: tuple[tuple[int, ...], ...]
    healed: int | None = None
    embeddings: Mapping[int, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def tokens(self) -> int:
        """Length of the longest sequence, including the healed token."""
        return max(map(len, self.sequences)) + (self.healed is not None)

    def pages(self, new_tokens: int, page_tokens: int) -> int:
        """Return how many pages all sequences need; the last new token is never stored."""
        extra = new_tokens - 1 + (self.healed is not None)
        return sum(pages_of(len(ids) + extra, page_tokens) for ids in self.sequences)


def encoded(request: Request, tokenizer: Tokenizer) -> Prompt:
    """Return the ids of a request's prompt.

    Healing removes the last token if others begin with its text, if both sequences of a pair end in
    it, and if another token comes before it.

    Raises:
        InferenceError: a sequence is empty, or ends in an embedding.
    """
    sequences = tuple(_ids(part, request, tokenizer) for part in request.prompts)
    if not all(sequences):
        raise InferenceError("the prompt has no tokens; give at least one")
    last = sequences[0][-1]
    if request.embeddings and any(ids[-1] >= FIRST_EMBEDDING for ids in sequences):
        raise InferenceError("the prompt ends in an embedding; put a token behind it")
    can_heal = request.heal and all(
        ids[-1] == last and len(ids) > 1 and ids[-2] < FIRST_EMBEDDING for ids in sequences
    )
    if can_heal and len(tokenizer.healing(last)) > 1:
        return Prompt(tuple(ids[:-1] for ids in sequences), healed=last)
    return Prompt(sequences)


def _ids(part: Text, request: Request, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a text, whose embeddings are numbered from `FIRST_EMBEDDING` on."""
    if not isinstance(part, str):
        return tuple(part)
    first, *others = part.split(EMBEDDING) if request.embeddings else [part]
    ids, numbers = list[int](), count(FIRST_EMBEDDING)
    for index, text in enumerate((first, *others)):
        if index:
            ids += islice(numbers, len(request.embeddings[index - 1]))
        text = text.lstrip(BLANKS) if index else text
        text = text.rstrip(BLANKS) if index < len(others) else text
        bos = request.add_bos and not index
        ids += tokenizer.encode(text, add_bos=bos, special=request.encode_special)
    return tuple(ids)


def embedded(prompt: Prompt, tensors: Sequence[torch.Tensor], decoder: Decoder) -> Prompt:
    """Return the prompt with the rows of its tensors; their ids become hashes of their values.

    Prompts therefore share the pages of equal rows, and of equal text before different rows.

    Raises:
        ConfigError: the model cannot read a tensor.
    """
    if not tensors:
        return prompt
    dtype, width = decoder.embedding.weight.dtype, decoder.spec.hidden_size
    for one in tensors:
        if one.shape[1] != width:
            raise ConfigError(
                f"`embeddings` contains a tensor of width {one.shape[1]}, the hidden size of the "
                f"model is {width}; use ones that were made for it"
            )
    rows = torch.cat([one.detach().to("cpu", dtype) for one in tensors])
    if not rows.isfinite().all():
        raise ConfigError(f"`embeddings` contains values that are not finite in {dtype}")
    ids = [
        FIRST_EMBEDDING + int.from_bytes(blake2b(row, digest_size=ID_BYTES).digest(), "little")
        for row in rows.view(torch.uint8).numpy()
    ]
    sequences = tuple(
        tuple(ids[i - FIRST_EMBEDDING] if i >= FIRST_EMBEDDING else i for i in sequence)
        for sequence in prompt.sequences
    )
    return Prompt(sequences, prompt.healed, dict(zip(ids, rows, strict=True)))


def check(
    request: Request,
    prompt: Prompt,
    *,
    vocab_size: int,
    context: int,
    pages: int,
    page_tokens: int,
    slots: int,
    images: Collection[int] = (),
) -> int:
    """Return the most tokens that a request with an encoded prompt may generate.

    The model has `vocab_size` ids, of which `images` stand for images, and `context` positions per
    sequence; the generator has `pages` of `page_tokens` and `slots` for all sequences together.

    Raises:
        ConfigError: the model or the generator cannot do what an option says, or read an image.
        InferenceError: an id is not in the vocabulary.
        ContextOverflow: prompt and new tokens exceed the model's positions.
        CacheFull: prompt and new tokens exceed the empty cache.
    """
    _check_ids(request, prompt, vocab_size)
    if any(not set(images).isdisjoint(ids) for ids in prompt.sequences):
        raise images_refused("the prompt")
    if len(prompt.sequences) > slots:
        raise ConfigError(f"`prompt` is a pair, which needs 2 slots; the generator has {slots}")
    wanted = request.max_new_tokens
    if wanted is None:
        wanted = max(request.min_new_tokens, 1)
    if prompt.tokens + wanted > context:
        raise ContextOverflow(
            f"{prompt.tokens} prompt tokens and {wanted} new ones exceed the model's {context} "
            "positions; shorten the prompt or request fewer tokens"
        )
    if (needed := prompt.pages(wanted, page_tokens)) > pages:
        raise CacheFull(
            f"{sum(map(len, prompt.sequences))} prompt tokens and {wanted} new ones need "
            f"{needed} pages of {page_tokens} tokens, the cache has {pages}; "
            "shorten the prompt, request fewer tokens or give the generator more `tokens`"
        )
    if request.max_new_tokens is not None:
        return request.max_new_tokens
    counts = range(1, context - prompt.tokens + 1)
    return bisect_right(counts, pages, key=lambda count: prompt.pages(count, page_tokens))


def _check_ids(request: Request, prompt: Prompt, vocab_size: int) -> None:
    tokens = prompt.sequences
    if prompt.embeddings:
        tokens = tuple(tuple(i for i in ids if i not in prompt.embeddings) for ids in tokens)
    ids = [i for sequence in tokens for i in (min(sequence), max(sequence))]
    ids += [] if prompt.healed is None else [prompt.healed]
    stops = [stop for stop in request.stops or () if isinstance(stop, int)]
    for where, token_id in (*(("the prompt", i) for i in ids), *(("`stops`", i) for i in stops)):
        if not 0 <= token_id < vocab_size:
            raise InferenceError(
                f"id {token_id} in {where} is not in the vocabulary of {vocab_size}; use the "
                "model's own tokenizer"
            )
    for name, most in (("top_tokens", request.top_tokens), ("scores", request.scores or 0)):
        if most > vocab_size:
            raise ConfigError(f"`{name}` is {most}, the vocabulary has only {vocab_size}")
