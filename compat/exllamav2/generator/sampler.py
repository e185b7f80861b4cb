"""`ExLlamaV2Sampler`: mutable settings with exllamav2's names and defaults, and one sample."""

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import fields
from random import Random
from types import SimpleNamespace
from typing import Any, Self

import torch

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.request import Sampled
from exl2flow.engine.filters import Combined, ForeignFilter
from exl2flow.engine.sampling import choose
from exl2flow.engine.sampling.bits import words_of
from exl2flow.model import Tokenizer

OURS = {each.name for each in fields(SamplingSettings)}
RENAMED = {"dry_sequence_breakers": "dry_breakers", "xtc_ignore_tokens": "xtc_ignored"}
SHARES = ("top_p", "min_p", "tfs", "typical")  # off outside of 0 to 1


class ExLlamaV2Sampler:
    class Settings(SimpleNamespace):
        def __init__(
            self,
            temperature: float = 0.8,
            temperature_last: bool = False,
            smoothing_factor: float = 0.0,
            min_temp: float = 0.0,
            max_temp: float = 0.0,
            temp_exponent: float = 1.0,
            top_k: int = 50,
            top_p: float = 0.8,
            top_a: float = 0.0,
            min_p: float = 0.0,
            tfs: float = 0.0,
            typical: float = 0.0,
            skew: float = 0.0,
            token_repetition_penalty: float = 1.025,
            token_repetition_range: int = -1,
            token_repetition_decay: int = 0,
            token_frequency_penalty: float = 0.0,
            token_presence_penalty: float = 0.0,
            mirostat: bool = False,
            mirostat_tau: float = 1.5,
            mirostat_eta: float = 0.1,
            mirostat_mu: float | None = None,
            token_bias: torch.Tensor | None = None,
            cfg_scale: float | None = None,
            post_sampling_hooks: Iterable[Any] = (),
            dry_allowed_length: int = 2,
            dry_base: float = 1.75,
            dry_multiplier: float = 0.0,
            dry_sequence_breakers: Iterable[int] | None = None,
            dry_range: int = 0,
            dry_max_ngram: int = 20,
            xtc_probability: float = 0.0,
            xtc_threshold: float = 0.1,
            xtc_ignore_tokens: Iterable[int] | None = None,
        ) -> None:
            values = locals()
            super().__init__(**{k: v for k, v in values.items() if k not in ("self", "__class__")})
            self.post_sampling_hooks = list(post_sampling_hooks)

        @classmethod
        def greedy(cls, **kwargs: Any) -> Self:
            given = {"temperature": 1.0, "token_repetition_penalty": 1.0, "top_k": 1, "top_p": 0.0}
            return cls(**(given | kwargs))

        def clone(self) -> Self:
            """Return a copy whose collections and tensors are its own."""
            other = copy(self)
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    setattr(other, name, value.clone())
                elif isinstance(value, list | set | dict):
                    setattr(other, name, copy(value))
            return other

        def greedy_clone(self) -> Self:
            return type(self)(**(vars(self) | {"top_k": 1, "top_p": 0.0, "token_bias": None}))

        def disallow_tokens(self, tokenizer: Any, tokens: Iterable[int]) -> None:
            if vars(self)["token_bias"] is None:
                self.token_bias = torch.zeros(-(-tokenizer.get_vocab_size() // 32) * 32)
            self.token_bias[list(tokens)] = -math.inf

        def allow_tokens(self, tokenizer: Any, tokens: Iterable[int | str]) -> None:
            self.token_bias = torch.full((-(-tokenizer.get_vocab_size() // 32) * 32,), -math.inf)
            ids = [tokenizer.single_id(t) if isinstance(t, str) else t for t in tokens]
            if None in ids:
                raise ConfigError(f"`tokens` has texts that are no single token: {[*tokens]}")
            self.token_bias[ids] = 0.0

        def values(self) -> dict[str, Any]:
            """Return copies of all values, to compare with later ones."""
            return {name: _copied(value) for name, value in vars(self).items()}

        def native(self, tokenizer: Tokenizer) -> tuple[SamplingSettings, frozenset[int]]:
            """Return our settings, and the ids that they exclude."""
            values = {RENAMED.get(k, k.removeprefix("token_")): v for k, v in vars(self).items()}
            values["top_k"] = max(self.top_k, 0)
            values |= {k: values[k] if 0 < values[k] < 1 else 0.0 for k in SHARES}
            for name in RENAMED.values():
                values[name] = None if values[name] is None else tuple(sorted(values[name]))
            bias = [] if values["bias"] is None else values["bias"].flatten().tolist()
            bias = [(i, b) for i, b in enumerate(bias[: tokenizer.vocab_size]) if b]
            values["token_bias"] = tuple((i, b) for i, b in bias if b > -math.inf)
            settings = SamplingSettings(**{k: v for k, v in values.items() if k in OURS})
            return settings, frozenset(i for i, b in bias if b == -math.inf)

    @staticmethod
    def sample(
        logits: torch.Tensor,
        settings: Settings,
        sequence_ids: torch.Tensor,
        random: float,
        tokenizer: Any,
        prefix_token: torch.Tensor | None = None,
        return_top_tokens: int = 0,
        blocked_tokens: Iterable[int] | None = None,
        filters: Iterable[Any] | None = None,
        filter_prefer_eos: bool = False,
    ) -> tuple[Any, ...]:
        """Return sampled tokens (b, 1) that follow ids (b, n), and their probabilities.

        The others are top tokens and their probabilities (b, 1, k), the tokens' own (b, 1), and
        whether a filter ends the text. The caller feeds filters. A guided pair has one token.
        """
        native, rows = tokenizer.native, logits.flatten(0, -2).float().contiguous()
        ours, excluded = settings.native(native)
        given = [ForeignFilter(one, is_fed=True) for one in filters or ()]
        healed = None if prefix_token is None else native.healing(int(prefix_token))
        text = Combined(given, native, rows.shape[1], prefer_end=filter_prefer_eos)
        allowed = text.allowed(healed, excluded.union(blocked_tokens or ()))
        words = words_of(native.eos_token_ids, rows.shape[1]) if allowed.must_end else allowed.words
        more, count = Random(random), len(rows) if ours.cfg_scale is None else 1
        draws, top = [random, *(more.random() for _ in rows[1:])], return_top_tokens
        sampled, mu = choose(
            rows,
            ours,
            sequence_ids.tolist(),
            draws,
            native,
            allowed=words,
            mu=settings.mirostat_mu,
            top=max(top, 1),
        )
        if min(sampled.ids.tolist()) < 0:
            raise InferenceError("`logits` are not finite; check the files of the model")
        settings.mirostat_mu = mu if settings.mirostat else None
        tensors = (sampled.ids, sampled.top_ids, sampled.top_probabilities, sampled.probabilities)
        tokens, top_ids, top_probs, probs = (
            x[:count, None].cpu() for x in tensors if x is not None
        )
        ends = tokens[0, 0].item() in allowed.ends
        return tokens, top_ids[..., :top], top_probs[..., :top].float(), probs.float(), ends


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(value) if isinstance(value, Iterable) else value


class ExLlamaV2PostSamplingResult(SimpleNamespace):
    """Argument of a hook: tensors (1, 1), of candidates (1, 1, n), and logits (1, 1, v)."""


def call_hook(hook: Callable[[ExLlamaV2PostSamplingResult], object], seen: Sampled) -> None:
    """Call an exllamav2 hook with the sample that our hooks get."""
    result = ExLlamaV2PostSamplingResult(
        sampled_token=torch.tensor([[seen.sampled_token]]),
        feed_filters=True,
        sampled_prob=torch.tensor([[seen.sampled_prob]]),
        candidate_tokens=torch.tensor([[seen.candidate_tokens]]),
        candidate_probs=torch.tensor([[seen.candidate_probs]]),
        logits=torch.as_tensor(seen.logits)[None, None],
    )
    hook(result)
    seen.sampled_token, seen.feed_filters = int(result.sampled_token), result.feed_filters
