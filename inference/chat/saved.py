"""Conversations to files and back; the answers of another model come back as text."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exl2flow.core.conversation import (
    Conversation,
    SavedAnswer,
    SavedFormat,
    SavedMessage,
)
from exl2flow.core.errors import ConfigError
from exl2flow.core.files import write_json
from exl2flow.core.sampling import SamplingSettings
from exl2flow.inference.chat.formats import (
    PromptFormat,
    Thinking,
    all_formats,
    choose_format,
)
from exl2flow.inference.chat.history import Answer, Turn
from exl2flow.inference.generate import Generator

ROWS = 8  # of the embedding, in the fingerprint of a model


def fingerprint(generator: Generator) -> str:
    """Return a digest of the model's tokenizer and of the beginning of its embedding."""
    model = generator.model
    sha = hashlib.sha256(model.tokenizer.backend.to_str().encode())
    rows = model.decoder.embedding.weight[:ROWS].detach().half().cpu()
    sha.update(repr((tuple(rows.shape), model.spec.num_layers, model.spec.vocab_size)).encode())
    sha.update(rows.contiguous().numpy().tobytes())
    return sha.hexdigest()


def model_name(generator: Generator) -> str:
    """Return the name of the model's folder."""
    return generator.model.spec.source_dir.resolve().name


def saved_format(fmt: PromptFormat) -> SavedFormat:
    """Return what a file says of a format."""
    if all_formats().get(fmt.name) == fmt:
        return SavedFormat(name=fmt.name)
    marks = fmt.thinking
    return SavedFormat(
        name=fmt.name, template=fmt.source, tokens=None if fmt.tokens is None else dict(fmt.tokens),
        stop_tokens=fmt.stop_tokens, stop_strings=fmt.stop_strings, system=fmt.system,
        thinking=None if marks is None else (marks.open, marks.close, marks.answer),
        special=fmt.special, ending=fmt.ending,
    )  # fmt: skip


def saved_messages(system: str, turns: list[Turn]) -> list[SavedMessage]:
    """Return the messages of a file, the system prompt first."""
    found = [SavedMessage(role="system", content=system)] if system else []
    for turn in turns:
        others = [_saved(answer) for answer in turn.alternatives]
        found.append(
            SavedMessage(role="user", content=turn.user, dropped=turn.dropped, cut=turn.cut)
        )
        fields = _saved(turn.current).model_dump()
        found.append(
            SavedMessage(role="assistant", dropped=turn.dropped, alternatives=others, **fields)
        )
    return found


def _saved(answer: Answer) -> SavedAnswer:
    return SavedAnswer(
        content=answer.text, thinking=answer.thinking, ids=answer.ids, first=answer.first,
        seed=answer.seed, drawn=answer.drawn, ended=answer.ended,
    )  # fmt: skip


def write(path: Path, conversation: Conversation) -> None:
    """Write a file, whole or not at all; what messages have by default is left out."""
    values = conversation.model_dump(mode="json")
    values["messages"] = [
        message.model_dump(mode="json", exclude_defaults=True) for message in conversation.messages
    ]
    write_json(path, values)


def saved_settings(settings: SamplingSettings) -> dict[str, Any]:
    """Return settings as JSON has them, which knows no infinity."""
    values = asdict(settings)
    bias = [(i, "-inf" if b == -math.inf else b) for i, b in settings.token_bias]
    return {**values, "token_bias": bias}


def settings_of(values: dict[str, Any], path: Path) -> SamplingSettings:
    """Return the settings of a file.

    Raises:
        ConfigError: a value is unknown or out of range.
    """
    made = dict(values)
    try:
        for name in ("dry_breakers", "xtc_ignored"):
            if made.get(name) is not None:
                made[name] = tuple(int(token) for token in made[name])
        bias = made.pop("token_bias", ())
        return SamplingSettings(**made, token_bias=tuple((int(i), float(b)) for i, b in bias))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`settings` in `{path}` are damaged: {error}") from error


def format_of(
    saved: SavedFormat, path: Path, generator: Generator, *, is_same: bool
) -> PromptFormat:
    """Return the format of a file, or for another model the one that fits it."""
    if not is_same:
        model = generator.model
        return choose_format(model.spec.source_dir, model.tokenizer)[0]
    if saved.template is None:
        return choose_format(
            generator.model.spec.source_dir, generator.model.tokenizer, saved.name
        )[0]
    return PromptFormat(
        name=saved.name, file=path, text=saved.template, tokens=saved.tokens,
        stop_tokens=saved.stop_tokens, stop_strings=saved.stop_strings, system=saved.system,
        thinking=None if saved.thinking is None else Thinking(*saved.thinking),
        special=saved.special, ending=saved.ending,
    )  # fmt: skip


def turns_of(
    found: Conversation, path: Path, *, vocab_size: int, encode: Callable[[str], list[int]] | None
) -> list[Turn]:
    """Return the turns of a file; `encode` makes ids of the answers' text, None: ids are kept.

    Raises:
        ConfigError: an id is not in the vocabulary.
    """

    def answer(saved: SavedAnswer) -> Answer:
        ids = saved.ids if encode is None else encode(saved.content)
        if any(not 0 <= token < vocab_size for token in ids) or saved.first > len(saved.ids):
            raise ConfigError(f"an answer in `{path}` has ids that the model does not have")
        first, drawn = (saved.first, saved.drawn) if encode is None else (0, 0)
        return Answer(
            list(ids), saved.content, saved.thinking, first, saved.seed, drawn, saved.ended
        )

    pairs = [message for message in found.messages if message.role != "system"]
    return [
        Turn(
            user.content, answer(reply), [answer(other) for other in reply.alternatives],
            user.dropped, min(user.cut, len(user.content)) if encode is None else 0,
        )
        for user, reply in zip(pairs[::2], pairs[1::2], strict=True)
    ]  # fmt: skip
