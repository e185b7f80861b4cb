"""Options of `Generator.generate` beside prompts: names and types for editors, and for messages."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.request import AdapterLike, Filter, Hook
from exl2flow.core.words import nearest

MEANT = {  # option of another library → ours
    **dict.fromkeys(
        ("max_tokens", "max_length", "max_completion_tokens", "n_predict", "num_predict"),
        "max_new_tokens",
    ),
    **dict.fromkeys(("min_tokens", "min_length"), "min_new_tokens"),
    **dict.fromkeys(("stop", "stop_conditions", "stop_strings", "stop_token_ids"), "stops"),
    **dict.fromkeys(("gen_settings", "sampling_params", "generation_config"), "settings"),
    **dict.fromkeys(("lora", "loras", "lora_request", "adapter"), "adapters"),
    **dict.fromkeys(("logprobs", "top_logprobs"), "top_tokens"),
    "prompt_logprobs": "scores",
    "token_healing": "heal",
    "identifier": "tag",
}


class TextOptions(TypedDict, total=False):
    """Fields of `Request`, which explains them, that are the same for several prompts."""

    max_new_tokens: int | None
    min_new_tokens: int
    settings: SamplingSettings
    drawn: int
    stops: Sequence[int | str] | None
    excluded: Collection[int]
    banned_strings: Sequence[str]
    heal: bool
    add_bos: bool
    encode_special: bool
    decode_special: bool
    probabilities: bool
    top_tokens: int
    raw: bool
    scores: int | None
    logits: bool
    hooks: Sequence[Hook]
    filters: Sequence[Filter]
    adapters: Sequence[AdapterLike]
    salt: bytes
    prefer_end: bool
    embeddings: Sequence[Any]
    end_loops: bool
    max_skips: int | None


def refuse_unknown(names: Iterable[str], known: Collection[str], call: str) -> None:
    """Raise `ConfigError` for an option that a call does not have, with the one that was meant."""
    for name in names:
        if name not in known:
            raise ConfigError(f"`{name}` is not an option of `{call}`{_hint(name, known)}")


def _hint(name: str, known: Collection[str]) -> str:
    if name in {field.name for field in fields(SamplingSettings)} and "settings" in known:
        return f"; give `settings=SamplingSettings({name}=…)`"
    if MEANT.get(name) in known:
        return f"; give `{MEANT[name]}`"
    return nearest(name, known)
