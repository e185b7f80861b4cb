"""`tekken.json` gives the ids that its ranks imply, found by merging bytes one pair at a time."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tekken_files import PATTERN, SPECIAL, TOKENS, write
from tiny import TEXT

from exl2flow.core.errors import SourceModelError
from exl2flow.core.store.source import SourceFingerprint
from exl2flow.model import Tokenizer

PROBES = (
    "",
    " ",
    *TEXT,
    "aaaaaaaaabab ababababa the thethe",
    "naïve café, Привет, мир! 你好 🙂👩‍👩‍👧 \U0001f9ff \u200b",
    "<s> </s> [INST]lines\r\n\n  and\ttabs  [/INST]",
    "def f(x):\n    return x ** 2  # square\n",
)


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merge the neighbours of the lowest rank, the first ones among equals, until none is left."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("text", PROBES)
def test_text_becomes_the_ids_that_its_ranks_imply(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    ranks = {token: rank for rank, token in enumerate(TOKENS[:360])}

    ids = tokenizer.encode(text)

    pieces = re.findall(PATTERN, text)
    assert "".join(pieces) == text
    assert ids == [SPECIAL + rank for piece in pieces for rank in merged(piece.encode(), ranks)]
    assert tokenizer.decode(ids) == text


def test_converted_tekken_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    backend = Tokenizer.load(write(tmp_path)).backend
    other = MistralConverter(str(tmp_path / "tekken.json")).converted()

    assert backend.get_vocab() == other.get_vocab()
    for text in PROBES:
        expected = other.encode(text, add_special_tokens=False).ids
        assert backend.encode(text, add_special_tokens=False).ids == expected


def test_special_tokens_have_the_first_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))

    assert tokenizer.encode("</s>[INST]<SPECIAL_7>", special=True) == [2, 3, 7]
    assert min(tokenizer.encode("</s>[INST]<SPECIAL_7>")) >= SPECIAL
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == {*range(SPECIAL)}
    assert tokenizer.vocab_size == SPECIAL + 360


def test_the_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (tmp_path / "tekken.json").unlink()

    again = Tokenizer.load(tmp_path)

    for text in PROBES:
        assert again.encode(text, special=True) == tokenizer.encode(text, special=True)


def test_another_tekken_file_is_another_source(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "other").mkdir()
    found = []
    for edit in (lambda content: None, lambda content: content["special_tokens"].pop()):
        write(tmp_path, edit)
        found.append(SourceFingerprint.of(tmp_path, memory=tmp_path / "memory").fingerprint)
    (tmp_path / "tokenizer.json").write_text("{}")
    beside = SourceFingerprint.of(tmp_path, memory=tmp_path / "memory").fingerprint
    (tmp_path / "tekken.json").unlink()

    assert found[0] != found[1]
    assert beside == SourceFingerprint.of(tmp_path, memory=tmp_path / "memory").fingerprint


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("special_tokens"), "lists no special tokens"),
        (lambda c: c["special_tokens"].pop(1), "ranks of special tokens are not 0 to at most 7"),
        (lambda c: c["special_tokens"][1].update(token_str="<unk>"), "two special tokens are the"),
        (lambda c: c["special_tokens"][1].update(token_str="e"), "an entry of the vocabulary, too"),
        (lambda c: c.update(special_tokens=7), "`special_tokens` is not a list"),
        (lambda c: c["vocab"].pop(300), "entry 300 has rank 301"),
        (lambda c: c["vocab"][300].update(token_bytes="!"), "is not a tekken vocabulary"),
        (lambda c: c["vocab"][300].update(token_bytes=""), "entry 300 has 0 bytes"),
        (lambda c: c["vocab"][3].update(token_bytes="YWI="), "occurs twice, or a byte is missing"),
        (lambda c: c["vocab"][300].pop("token_bytes"), "is not a tekken vocabulary"),
        (lambda c: c.update(vocab=None), "`vocab` is not a list of at least 360"),
        (lambda c: c["config"].update(default_vocab_size=999), "not a list of at least 991"),
        (lambda c: c["config"].update(default_num_special_tokens=0), "default_num_special_tokens"),
        (lambda c: c["config"].update(pattern="("), "`config.pattern` in .* is not a regular"),
        (lambda c: c["config"].pop("pattern"), "pattern"),
        (lambda c: c.pop("config"), "config"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    write(tmp_path, edit)
    with pytest.raises(SourceModelError, match=message):
        Tokenizer.load(tmp_path)
