"""The simplest generator: one prompt, one sequence, one token per forward pass."""

import random
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from exl2flow.core.errors import ContextOverflow, InferenceError
from exl2flow.inference.cache.contiguous import ContiguousCache
from exl2flow.inference.cache.paged import PagedCache, cache_format
from exl2flow.inference.load import LoadedModel
from exl2flow.inference.sampling import SamplingSettings, sample
from exl2flow.inference.step import RecordedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """prompt and text as strings; ids: of the generated tokens, the stop token not among them."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    reason: str


class BaseGenerator:
    """Generates from a loaded model, one sequence at a time."""

    def __init__(self, model: LoadedModel, *, cache: str | None = None) -> None:
        """Take a model and the name of a cache format.

        None holds keys and values as computed: on a GPU as fp16, in pages.

        Raises:
            ConfigError: there is no such format.
        """
        self.model = model
        is_on_gpu = model.decoder.embedding.weight.is_cuda
        name = cache or ("fp16" if is_on_gpu else None)
        self.form = None if name is None else cache_format(name)

    def _cache(self, max_tokens: int) -> PagedCache | ContiguousCache:
        spec, embedding = self.model.spec, self.model.decoder.embedding.weight
        if self.form is not None:
            return PagedCache(
                spec, batch=1, max_tokens=max_tokens, form=self.form, device=embedding.device
            )
        return ContiguousCache(
            spec, batch=1, max_tokens=max_tokens, dtype=embedding.dtype, device=embedding.device
        )

    def _recorded(self, cache: PagedCache | ContiguousCache) -> RecordedStep | None:
        """Return a recording of a step where there can be one."""
        decoder = self.model.decoder
        is_resident = isinstance(decoder.sublayers, list)
        if isinstance(cache, PagedCache) and cache.places.lengths.is_cuda and is_resident:
            with suppress(RuntimeError):  # what cannot be recorded is launched again and again
                return RecordedStep(decoder, cache)
        return None

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

        Raises:
            InferenceError: the prompt is empty.
            ContextOverflow: prompt and new tokens exceed the model's positions.
        """
        spec = self.model.spec
        total = len(ids) + max_new_tokens
        if not ids:
            raise InferenceError("the prompt has no tokens; give at least one")
        if total > spec.max_positions:
            raise ContextOverflow(
                f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed the model's "
                f"{spec.max_positions} positions; shorten the prompt or ask for fewer tokens"
            )
        generator = random.Random(seed)
        decoder = self.model.decoder
        cache, device = self._cache(total), decoder.embedding.weight.device

        def launched(ids: torch.Tensor) -> torch.Tensor:
            return decoder.head(decoder.hidden(ids, cache)[:, -1:])

        pending, step = torch.tensor([ids], device=device), launched
        for made in range(max_new_tokens):
            if made == 1:  # the prompt is in the cache
                step = self._recorded(cache) or launched
            token = sample(step(pending)[0, 0], settings, generator.random())
            yield token
            pending = torch.tensor([[token]], device=device)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        settings: SamplingSettings | None = None,
        seed: int | None = None,
        add_bos: bool = True,
        stop_tokens: Collection[int] | None = None,
    ) -> Generation:
        """Complete a prompt.

        Args:
            prompt: text; special strings in it are ordinary text.
            max_new_tokens: tokens at most.
            settings: sampling settings; defaults when None.
            seed: of the draws; None draws differently every time.
            add_bos: put the model's BOS token first when it has one.
            stop_tokens: ids that end the text; the model's EOS ids when None, none when empty.
        """
        tokenizer = self.model.tokenizer
        stops = tokenizer.eos_token_ids if stop_tokens is None else stop_tokens
        ids = tokenizer.encode(prompt, add_bos=add_bos)
        made: list[int] = []
        reason = "max_new_tokens"
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
        before = tokenizer.decode(ids)  # decoded together, for spaces at the seam
        text = tokenizer.decode([*ids, *made]).removeprefix(before)
        return Generation(prompt=prompt, text=text, ids=tuple(made), reason=reason)
