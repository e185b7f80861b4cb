"""`ExLlamaV2BaseGenerator`: texts for one or several prompts, all at once."""

import re
import threading
from itertools import zip_longest
from typing import Any

import torch

from exl2flow.compat.exllamav2.cache import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator.filters import ExLlamaV2Filter as ExLlamaV2Filter
from exl2flow.compat.exllamav2.generator.job import ExLlamaV2MMEmbedding, Settings, request_of
from exl2flow.compat.exllamav2.model import ExLlamaV2, adapters
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2flow.core.request import EMBEDDING, FIRST_EMBEDDING
from exl2flow.inference import Event, Generator, Job


class ExLlamaV2BaseGenerator:
    def __init__(
        self, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
    ) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.abort_event: threading.Event | None = None
        self._jobs: list[Job] = []

    def warmup(self) -> None:
        self.model.forward(torch.zeros(1, 2, dtype=torch.long), preprocess_only=True)

    @property
    def reach(self) -> int:
        """Tokens of the longest text."""
        return min(int(self.model.config.max_seq_len), self.cache.max_seq_len)

    def full(self) -> bool:
        return self.sequence_ids is not None and self.sequence_ids.shape[1] >= self.reach

    @property
    def sequence_ids(self) -> torch.Tensor | None:
        """Ids (b, n) of the last prompts and their texts, padded."""
        pad = self.tokenizer.pad_token_id
        pairs = [(ids, job.output.ids) for job in self._jobs for ids in job.prompt.sequences]
        sizes = [max(map(len, column)) for column in zip(*pairs, strict=True)]
        rows = [
            [pad] * (sizes[0] - len(ids)) + [*ids, *made] + [pad] * (sizes[1] - len(made))
            for ids, made in pairs
        ]
        ids = torch.tensor(rows)
        return torch.where(ids < FIRST_EMBEDDING, ids, pad) if rows else None

    def native(self, rows: int, draft: Any = None) -> Generator:
        config = self.model.config
        return self.cache.generator(
            slots=rows, chunk=config.max_input_len, context=config.max_seq_len, draft=draft
        )

    def generate_simple(
        self, prompt: str | list[str], gen_settings: Settings, num_tokens: int,
        seed: int | None = None, token_healing: bool = False, encode_special_tokens: bool = False,
        decode_special_tokens: bool = False, loras: Any = None, stop_token: int | None = -1,
        add_bos: bool = False, abort_event: threading.Event | None = None,
        input_embeddings: torch.Tensor | None = None, completion_only: bool = False,
        filters: Any = None, filter_prefer_eos: bool = False,
    ) -> Any:  # fmt: skip
        """Return the text of a prompt, or those of a list of prompts."""
        if abort_event is not None:
            abort_event.clear()
        texts, most = [prompt] if isinstance(prompt, str) else prompt, self.reach - num_tokens
        tensors = [] if input_embeddings is None else [*input_embeddings]
        each = [[ExLlamaV2MMEmbedding(self.model, x, EMBEDDING)] for x in tensors]
        rows = list[Any]()
        for text, alias in zip_longest(texts, each, fillvalue=()):
            text = re.sub(rf"[ \t]*{re.escape(EMBEDDING)}[ \t]*", EMBEDDING, str(text))
            [ids] = self.tokenizer.encode(text, add_bos, False, encode_special_tokens, False, alias)
            rows.append(ids[max(0, len(ids) - most) :].tolist())
        is_pair = gen_settings.cfg_scale is not None
        groups = [rows] if is_pair else [[row] for row in rows]
        engine, found = self.native(len(rows)), [list[Event]() for _ in groups]
        self._jobs = []
        try:
            for index, group in enumerate(groups):
                request = request_of(
                    group, gen_settings, self.tokenizer.native, max_new_tokens=num_tokens,
                    seed=None if seed is None else seed + index, heal=token_healing,
                    stops={None: (), -1: None}.get(stop_token, (stop_token,)), filters=filters,
                    prefer_end=filter_prefer_eos, decode_special=decode_special_tokens,
                    embeddings=each[index] if each else (), adapters=adapters(loras),
                )  # fmt: skip
                self._jobs.append(engine.submit(request, deliver=found[index].append))
            while not all(job.is_done for job in self._jobs):
                if abort_event is not None and abort_event.is_set():
                    break
                engine.step()
        finally:
            for job in self._jobs:
                job.cancel()
            engine.step()
        for event in (event for events in found for event in events):
            if event.error is not None:
                raise event.error
        done = ["".join(event.text for event in events) for events in found]
        if abort_event is not None and not any(job.output.ids for job in self._jobs):
            rows, done = [[]] * len(rows), [""] * len(done)
        done = done * len(rows) if is_pair else done
        if not completion_only:
            decode, special = self.tokenizer.decode, decode_special_tokens
            starts = [decode(torch.tensor(row, dtype=torch.long), special) for row in rows]
            done = [start + text for start, text in zip(starts, done, strict=True)]
        return done if isinstance(prompt, list) else done[0]
