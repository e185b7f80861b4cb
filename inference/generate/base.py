"""The simplest generator: one prompt, one sequence, one token per forward pass."""

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from exl2flow.core.errors import ContextOverflow, InferenceError
from exl2flow.inference.cache.contiguous import ContiguousCache
from exl2flow.inference.cache.paged import PagedCache, cache_format
from exl2flow.inference.generate.lane import Lane
from exl2flow.inference.load import LoadedModel
from exl2flow.inference.sampling import SamplingSettings
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import TextStream, check_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """prompt and text as strings; ids: the generated tokens, without the stop token."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    reason: str


class BaseGenerator:
    """Generates from a loaded model, one sequence at a time.

    A call reuses the cache of the previous one, and on a GPU its recorded steps.
    """

    def __init__(self, model: LoadedModel, *, cache: str | None = None) -> None:
        """Take a model and a cache format's name.

        None stores keys and values as computed: on a GPU as fp16, in pages.

        Raises:
            ConfigError: there is no format of that name.
        """
        self.model = model
        is_on_gpu = model.decoder.embedding.weight.is_cuda
        name = cache or ("fp16" if is_on_gpu else None)
        self.form = None if name is None else cache_format(name)
        self._lane: Lane | None = None

    @torch.inference_mode()
    def stream(
        self,
        ids: list[int],
        *,
        max_new_tokens: int,
        settings: SamplingSettings,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield token ids one by one, stop tokens included.

        The cache is kept for the next call, which may start before this one ends.

        Raises:
            InferenceError: the prompt is empty, or the logits are not finite.
            SourceModelError: a token is not in the model's vocabulary.
            ContextOverflow: prompt and new tokens exceed the model's positions.
        """
        spec = self.model.spec
        total = len(ids) + max_new_tokens
        if not ids:
            raise InferenceError("the prompt has no tokens; give at least one")
        check_ids(ids, spec)
        if total > spec.max_positions:
            raise ContextOverflow(
                f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed the model's "
                f"{spec.max_positions} positions; shorten the prompt or request fewer tokens"
            )
        device, generator = self.model.decoder.embedding.weight.device, random.Random(seed)
        draws = [[generator.random()] for _ in range(max_new_tokens)]
        lane = self._taken_lane(total)
        try:
            for (token,) in lane.run(
                torch.tensor([ids], device=device),
                [settings],
                torch.tensor(draws, dtype=torch.float64, device=device),
            ):
                yield token
        finally:
            self._lane = lane

    def _taken_lane(self, tokens: int) -> Lane:
        """Return the last call's lane if it is free and has room, or a new one."""
        lane, self._lane = self._lane, None
        if lane is not None and lane.cache.max_tokens >= tokens:
            return lane
        lane = None  # so that two never take memory at once
        return Lane(self.model.decoder, self._cache(-(-tokens // PAGE_TOKENS) * PAGE_TOKENS))

    def _cache(self, max_tokens: int) -> PagedCache | ContiguousCache:
        spec, embedding = self.model.spec, self.model.decoder.embedding.weight
        if self.form is not None:
            return PagedCache(
                spec, batch=1, max_tokens=max_tokens, form=self.form, device=embedding.device
            )
        return ContiguousCache(
            spec, batch=1, max_tokens=max_tokens, dtype=embedding.dtype, device=embedding.device
        )

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        settings: SamplingSettings | None = None,
        seed: int | None = None,
        add_bos: bool = True,
        stop_tokens: Collection[int] | None = None,
        show: Callable[[str], None] | None = None,
    ) -> Generation:
        """Complete a prompt.

        Args:
            prompt: text; special strings in it are ordinary text.
            max_new_tokens: tokens at most.
            settings: sampling settings; defaults when None.
            seed: of the draws; None draws differently every time.
            add_bos: put the model's BOS token first when it has one.
            stop_tokens: ids that end the text; the model's EOS ids when None, none when empty.
            show: receives the text in pieces, as soon as their characters are complete.
        """
        tokenizer = self.model.tokenizer
        stops = tokenizer.eos_token_ids if stop_tokens is None else stop_tokens
        ids = tokenizer.encode(prompt, add_bos=add_bos)
        made: list[int] = []
        reason = "max_new_tokens"
        pieces = TextStream(tokenizer, ids)
        for token in self.stream(
            ids,
            max_new_tokens=max_new_tokens,
            settings=settings or SamplingSettings(),
            seed=seed,
        ):
            if token in stops:
                reason = "stop_token"
                break
            made.append(token)
            if show is not None:
                show(pieces.push(token))
        if show is not None:
            show(pieces.flush())
        before = tokenizer.decode(ids)  # decoded together, for spaces at the seam
        text = tokenizer.decode([*ids, *made]).removeprefix(before)
        return Generation(prompt=prompt, text=text, ids=tuple(made), reason=reason)
