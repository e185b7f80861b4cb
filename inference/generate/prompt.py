"""A request's prompt as token ids, and the check that model and cache have room for it."""

from bisect import bisect_right
from dataclasses import dataclass

from exl2flow.core.errors import CacheFull, ConfigError, ContextOverflow, InferenceError
from exl2flow.core.request import Request
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one sequence, or of two for guidance; without the token that is healed."""

    sequences: tuple[tuple[int, ...], ...]
    healed: int | None = None

    @property
    def tokens(self) -> int:
        """Length of the longest sequence, including the healed token."""
        return max(map(len, self.sequences)) + (self.healed is not None)

    def pages(self, new_tokens: int) -> int:
        """Return how many pages all sequences need; the last new token is never stored."""
        extra = new_tokens - 1 + (self.healed is not None)
        return sum(-(-(len(ids) + extra) // PAGE_TOKENS) for ids in self.sequences)


def encoded(request: Request, tokenizer: Tokenizer) -> Prompt:
    """Return the ids of a request's prompt.

    Healing removes the last token if others begin with its text, if both sequences of a pair end in
    it, and if it is not the only one.

    Raises:
        InferenceError: a sequence is empty.
    """
    sequences = tuple(
        tuple(tokenizer.encode(part, add_bos=request.add_bos, special=request.encode_special))
        if isinstance(part, str)
        else tuple(part)
        for part in request.prompts
    )
    if not all(sequences):
        raise InferenceError("the prompt has no tokens; give at least one")
    last = sequences[0][-1]
    can_heal = request.heal and all(len(ids) > 1 and ids[-1] == last for ids in sequences)
    if can_heal and len(tokenizer.healing(last)) > 1:
        return Prompt(tuple(ids[:-1] for ids in sequences), healed=last)
    return Prompt(sequences)


def check(
    request: Request, prompt: Prompt, *, vocab_size: int, context: int, pages: int, slots: int
) -> int:
    """Return the most tokens that a request with an encoded prompt may generate.

    The model has `vocab_size` ids and `context` positions per sequence; the generator has `pages`
    and `slots` for all sequences together.

    Raises:
        ConfigError: the model or the generator cannot do what an option says.
        InferenceError: an id is not in the vocabulary.
        ContextOverflow: prompt and new tokens exceed the model's positions.
        CacheFull: prompt and new tokens exceed the empty cache.
    """
    _check_ids(request, prompt, vocab_size)
    if len(prompt.sequences) > slots:
        raise ConfigError(f"`prompt` is a pair, which needs 2 slots; the generator has {slots}")
    wanted = request.max_new_tokens or max(request.min_new_tokens, 1)
    if prompt.tokens + wanted > context:
        raise ContextOverflow(
            f"{prompt.tokens} prompt tokens and {wanted} new ones exceed the model's {context} "
            "positions; shorten the prompt or request fewer tokens"
        )
    if prompt.pages(wanted) > pages:
        raise CacheFull(
            f"{sum(map(len, prompt.sequences))} prompt tokens and {wanted} new ones need "
            f"{prompt.pages(wanted)} pages of {PAGE_TOKENS} tokens, the cache has {pages}; "
            "shorten the prompt, request fewer tokens or give the generator more `tokens`"
        )
    if request.max_new_tokens is not None:
        return request.max_new_tokens
    return bisect_right(range(1, context - prompt.tokens + 1), pages, key=prompt.pages)


def _check_ids(request: Request, prompt: Prompt, vocab_size: int) -> None:
    ids = [i for sequence in prompt.sequences for i in (min(sequence), max(sequence))]
    ids += [] if prompt.healed is None else [prompt.healed]
    stops = [stop for stop in request.stops or () if isinstance(stop, int)]
    for where, token_id in (*(("the prompt", i) for i in ids), *(("`stops`", i) for i in stops)):
        if not 0 <= token_id < vocab_size:
            raise InferenceError(
                f"id {token_id} in {where} is not in the vocabulary of {vocab_size}; use the "
                "model's own tokenizer"
            )
    if request.top_tokens > vocab_size:
        raise ConfigError(
            f"`top_tokens` is {request.top_tokens}, the vocabulary has only {vocab_size}"
        )
