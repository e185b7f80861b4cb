"""Choose the prompt format of a model; `ChatTemplate` renders all of them.

To add one, write its Jinja file and its row in `rows.toml`.
"""

import difflib
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import ConfigError, UnknownPromptFormat
from exl2flow.core.requests.conversation import PromptFormat, Thinking
from exl2flow.model import Tokenizer
from exl2flow.model.text.chat_template import find_template, special_tokens

FOLDER = Path(__file__).parent
OWN = "own"  # name of the format that a model's own template makes
FALLBACK = "raw"
THINKING = Thinking("<think>", "</think>")  # of templates about which nothing else is known


@cache
def _rows() -> tuple[PromptFormat, ...]:
    rows = tomllib.loads(_read(FOLDER / "rows.toml"))
    return tuple(_row(name, **fields) for name, fields in rows.items())


def _row(name: str, *, template: str = "", thinking: Any = None, **fields: Any) -> PromptFormat:
    file = FOLDER / f"{template or name}.jinja"
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    marks = None if thinking is None else Thinking(*thinking)
    return PromptFormat(name=name, template=_read(file), file=file, thinking=marks, **fields)


def all_formats() -> dict[str, PromptFormat]:
    """Return all formats by name."""
    return {row.name: row for row in _rows()}


def choose_format(
    model_dir: Path | str, tokenizer: Tokenizer, name: str | None = None
) -> tuple[PromptFormat, str]:
    """Return the format for a model, and a sentence that says which it is and why.

    Args:
        model_dir: the model's folder.
        tokenizer: its tokenizer.
        name: of a format, or a file with a Jinja template; None: the model's own template, else
            the format whose tokens its vocabulary has, else `raw`.

    Raises:
        UnknownPromptFormat: there is neither such a format nor such a file.
        ConfigError, ChatTemplateError: a file cannot be read.
    """
    if name is not None:
        return _named(name, tokenizer)
    folder, row = Path(model_dir), _recognized(tokenizer)
    if (template := find_template(folder)) is not None:
        file, text = template
        tokens = special_tokens(folder, tokenizer)
        fmt = replace(_around(text, file, tokenizer), name=OWN, tokens=tokens)
        return fmt, f"the model's own template, in `{file.name}`"
    if row is not None:
        marks = ", ".join(f"`{mark}`" for mark in row.marks)
        return row, f"format `{row.name}`: the vocabulary has {marks}"
    return all_formats()[FALLBACK], (
        f"format `{FALLBACK}`: the model has no template, and its vocabulary no known marks"
    )


def _named(name: str, tokenizer: Tokenizer) -> tuple[PromptFormat, str]:
    rows, path = all_formats(), Path(name)
    if name in rows:
        return rows[name], f"format `{name}`, as requested"
    if path.is_file():
        return _around(_read(path), path, tokenizer), f"template `{name}`, as requested"
    near = difflib.get_close_matches(name.lower(), rows, n=3, cutoff=0.5)
    names = ", ".join(f"`{row}`" for row in near or rows)
    raise UnknownPromptFormat(
        f"`{name}` is neither a prompt format nor a file; {'near' if near else 'there'} are {names}"
    )


def _around(template: str, path: Path, tokenizer: Tokenizer) -> PromptFormat:
    """Return the format of a template: its stops and thoughts are those of the vocabulary's row."""
    row = _recognized(tokenizer)
    fmt = PromptFormat(name=path.name, template=template, file=path, thinking=THINKING)
    if row is None:
        return fmt
    thinking, stops = row.thinking or THINKING, row.stop_tokens
    return replace(fmt, stop_tokens=stops, stop_strings=row.stop_strings, thinking=thinking)


def _recognized(tokenizer: Tokenizer) -> PromptFormat | None:
    """Return the row with the most marks of those whose marks are all tokens."""
    known = tokenizer.backend.token_to_id
    rows = [row for row in _rows() if row.marks and None not in map(known, row.marks)]
    return max(rows, key=lambda row: len(row.marks), default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the template `{path}`: {words.cause(error)}") from error
