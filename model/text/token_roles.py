"""Which token ids a model's files give a role: BOS, EOS, padding, and what texts begin with.

That a BOS token exists does not mean that texts begin with it: Qwen2.5 has one and uses none.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import tokenizers

from exl2flow.core.errors import SourceModelError
from exl2flow.core.store.model_files import CONFIG_FILE, TOKENIZER_FILE
from exl2flow.model.config.fields import Fields

Role = Literal["bos", "eos", "pad"]
SETTINGS_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
PROBE = "a"  # any text

log = logging.getLogger(__name__)


def token_ids(model_dir: Path, backend: tokenizers.Tokenizer, role: Role) -> Iterator[int]:
    """Yield the ids that the folder's files give a role, those of `config.json` first."""
    for name in (CONFIG_FILE, SETTINGS_FILE, GENERATION_FILE):
        fields = _fields(model_dir / name)
        yield from fields.token_ids(f"{role}_token_id")
        yield from fields.inner("text_config").token_ids(f"{role}_token_id")  # of a wrapper
        value = fields.values.get(f"{role}_token")  # the token's text, plain or in an object
        text = value.get("content") if isinstance(value, dict) else value
        token_id = backend.token_to_id(text) if isinstance(text, str) else None
        if token_id is not None:
            yield token_id


def opening_of(
    model_dir: Path, backend: tokenizers.Tokenizer, bos_token_id: int | None
) -> tuple[int, ...]:
    """Return the ids that transformers puts before a text, usually BOS or nothing.

    The post-processor of a `tokenizer.json` decides, whatever `add_bos_token` says. Other files
    have none: there texts begin with BOS unless `add_bos_token` is false.
    """
    if (model_dir / TOKENIZER_FILE).exists():
        backend.no_truncation()
        plain, whole = (
            backend.encode(PROBE, add_special_tokens=added).ids for added in (False, True)
        )
        starts = range(len(whole) - len(plain) + 1)
        first = next((i for i in starts if whole[i : i + len(plain)] == plain), 0)
        return tuple(whole[:first])
    is_off = _fields(model_dir / SETTINGS_FILE).values.get("add_bos_token") is False
    return () if is_off or bos_token_id is None else (bos_token_id,)


def _fields(path: Path) -> Fields:
    """Return a file's entries; none if it is absent, or if it is damaged but optional."""
    if not path.exists():
        return Fields(path=path, values={})
    try:
        return Fields.load(path)
    except SourceModelError as error:
        if path.name != GENERATION_FILE:
            raise
        log.warning("%s; the file is ignored", error)
        return Fields(path=path, values={})
