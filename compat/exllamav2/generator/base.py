"""`ExLlamaV2BaseGenerator`: texts for one or several prompts, all at once."""

import re
import threading
from itertools import chain, zip_longest
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from exl2flow.compat.exllamav2.cache import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator.dynamic import ExLlamaV2DynamicJob, Jobs, Settings
from exl2flow.compat.exllamav2.generator.filters import ExLlamaV2Filter as ExLlamaV2Filter
from exl2flow.compat.exllamav2.model import ExLlamaV2
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2MMEmbedding, ExLlamaV2Tokenizer
from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import EMBEDDING, FIRST_EMBEDDING


class ExLlamaV2BaseGenerator:
    def __init__(
        self, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
    ) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.abort_event: threading.Event | None = None
        self._jobs: list[ExLlamaV2DynamicJob] = []

    def warmup(self) -> None:
        self.model.forward(torch.zeros(1, 2, dtype=torch.long), preprocess_only=True)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text."""
        return min(int(self.model.config.max_seq_len), self.cache.max_seq_len)

    def full(self) -> bool:
        return self.sequence_ids is not None and self.sequence_ids.shape[1] >= self.max_tokens

    @property
    def sequence_ids(self) -> torch.Tensor | None:
        """Ids (b, n) of the last prompts and their texts, padded."""
        pairs = [p for job in self._jobs for p in zip(job.prompts, job.token_ids, strict=True)]
        if not pairs:
            return None
        pad, longest = self.tokenizer.pad_token_id, max(len(prompt) for prompt, _ in pairs)
        padded = [torch.tensor([pad] * (longest - len(p)) + ids) for p, ids in pairs]
        ids = pad_sequence(padded, batch_first=True, padding_value=pad)
        return torch.where(ids < FIRST_EMBEDDING, ids, pad)

    def _begin(self, sequences: int, loras: Any, draft: Any = None) -> Jobs:
        """End the text that was begun on the cache: it would take all pages."""
        self.cache.end_stream()
        jobs = Jobs(self.cache, self.tokenizer, loras, min_slots=sequences, draft=draft)
        self.cache.end_stream = jobs.clear_queue
        return jobs

    def generate_simple(
        self,
        prompt: str | list[str],
        gen_settings: Settings,
        num_tokens: int,
        seed: int | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        loras: Any = None,
        stop_token: int | None = -1,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: torch.Tensor | None = None,
        completion_only: bool = False,
        filters: Any = None,
        filter_prefer_eos: bool = False,
    ) -> Any:
        """Return the text of a prompt, or those of a list of prompts."""
        self.abort_event = abort_event
        if abort_event is not None:
            abort_event.clear()
        texts, limit = [prompt] if isinstance(prompt, str) else prompt, self.max_tokens - num_tokens
        if limit < 1:
            raise ConfigError(
                f"`num_tokens` is {num_tokens}; of the {self.max_tokens} tokens of a text one at "
                f"least is the prompt's, so give at most {self.max_tokens - 1}"
            )
        embeddings = self._embeddings(input_embeddings, len(texts))
        prompts = list[torch.Tensor]()
        for text, alias in zip_longest(texts, embeddings, fillvalue=()):
            text = re.sub(rf"[ \t]*{re.escape(EMBEDDING)}[ \t]*", EMBEDDING, str(text))
            [ids] = self.tokenizer.encode(text, add_bos, False, encode_special_tokens, False, alias)
            prompts.append(ids[None, max(0, len(ids) - limit) :])
        stops: Any = {None: (), -1: self.tokenizer.native.eos_token_ids}
        is_pair = gen_settings.cfg_scale is not None
        pairs = [*zip_longest(prompts, embeddings)]
        groups = [(prompts, [*chain(*embeddings)])] if is_pair else pairs
        self._jobs = [
            ExLlamaV2DynamicJob(
                ids,
                num_tokens,
                gen_settings=gen_settings,
                token_healing=token_healing,
                seed=None if seed is None else seed + index,
                stop_conditions=stops.get(stop_token, (stop_token,)),
                decode_special_tokens=decode_special_tokens,
                filters=filters,
                filter_prefer_eos=filter_prefer_eos,
                embeddings=its_embeddings,
            )
            for index, (ids, its_embeddings) in enumerate(groups)
        ]
        self._begin(len(prompts), loras).run(self._jobs, abort_event)
        texts = [job.full_completion for job in self._jobs] * (len(prompts) if is_pair else 1)
        is_early = abort_event is not None and abort_event.is_set() and not any(texts)
        if not (completion_only or is_early):
            starts = [self.tokenizer.decode(ids[0], decode_special_tokens) for ids in prompts]
            texts = [start + text for start, text in zip(starts, texts, strict=True)]
        return texts if isinstance(prompt, list) else texts[0]

    def _embeddings(self, tensor: torch.Tensor | None, prompts: int) -> list[list[Any]]:
        """Return the embedding of each prompt from a tensor (prompts or 1, n, hidden)."""
        tensors = [] if tensor is None else [*tensor]
        if len(tensors) not in (0, 1, prompts):
            given = f"`input_embeddings` is for {len(tensors)} prompts, and there are {prompts}"
            raise ConfigError(f"{given}; give a tensor (prompts, n, hidden), or (1, n, hidden)")
        tensors = tensors * prompts if len(tensors) == 1 else tensors
        return [[ExLlamaV2MMEmbedding(self.model, x, EMBEDDING)] for x in tensors]
