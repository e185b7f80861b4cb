"""A small `tekken.json`, trained on a few sentences."""

import json
import re
from base64 import b64encode
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tiny import TEXT

NAMES = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
SPECIAL = 8  # three of them without a name
PATTERN = r"[^\r\n\w]?\w+| ?[^\s\w]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # the same for `re`


def trained(text: str, count: int) -> list[bytes]:
    """Return bytes, then the most frequent pairs of neighbours, one after the other."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([b]) for b in piece.encode()] for piece in re.findall(PATTERN, text)]
    while len(tokens) < count:
        counts: dict[bytes, int] = {}
        for word in words:
            for a, b in pairwise(word):
                counts[a + b] = counts.get(a + b, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        tokens.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == best:
                    word[i : i + 2] = [best]
                i += 1
    return tokens


TOKENS = trained(" ".join((*TEXT, "aaaa abab abab the the thethe café 🙂🙂 你好你好")), 380)


def content() -> dict[str, Any]:
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(TOKENS),
            "default_vocab_size": SPECIAL + 360,  # the last twenty are not used
            "default_num_special_tokens": SPECIAL,
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(TOKENS)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(NAMES)
        ],
    }


def write(folder: Path, edit: Callable[[dict[str, Any]], object] = lambda content: None) -> Path:
    written = content()
    edit(written)
    (folder / "tekken.json").write_text(json.dumps(written))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder
