"""Mistral's `tekken.json` as a byte-level BPE tokenizer.

Special tokens have the first ids; an entry of the vocabulary has its rank behind them. Text merges
into the entry of the lowest rank first, as in tiktoken.
"""

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from exl2flow.core import words
from exl2flow.core.errors import SourceModelError
from exl2flow.model.config.fields import Fields
from exl2flow.model.text.pieces import BYTES

MOST_TOKENS = 1 << 24
LONGEST_TOKEN = 4096  # bytes; splitting is quadratic
CHARACTERS = {byte: character for character, byte in BYTES.items()}


def load_tekken(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer that a `tekken.json` describes.

    Raises:
        SourceModelError: the file cannot be read, is not such a vocabulary, or lists no special
            tokens, as those of 2024 do.
    """
    fields = Fields.load(path)
    config = fields.inner("config")
    count = config.integer("default_num_special_tokens", least=1, most=MOST_TOKENS)
    size = config.integer("default_vocab_size", least=count + len(BYTES), most=MOST_TOKENS)
    if fields.values.get("special_tokens") is None:
        raise SourceModelError(
            f"`{path}` lists no special tokens, and their names differ between models; add a "
            "`tokenizer.json`"
        )
    try:
        special = _special_tokens(fields.values["special_tokens"], count)
        ranks = _ranks(fields.values.get("vocab"), size - count)
        vocab = {_spelled(token): count + rank for token, rank in ranks.items()}
        if not vocab.keys().isdisjoint(special):
            raise ValueError("a special token is an entry of the vocabulary, too")
    except (KeyError, TypeError, ValueError) as error:
        raise SourceModelError(
            f"`{path}` is not a tekken vocabulary ({words.cause(error)}); fetch it again"
        ) from error
    merges = [(_spelled(left), _spelled(right)) for left, right in _merges(ranks)]
    ids = {token: place for place, token in enumerate(special)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids | vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_pattern(config), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return backend


def _pattern(config: Fields) -> Regex:
    text = config.text("pattern")
    try:
        return Regex(text)
    except Exception as error:  # the library raises `Exception` itself
        raise SourceModelError(
            f"`config.pattern` in `{config.path}` is not a regular expression ({error}); fetch it "
            "again"
        ) from error


def _special_tokens(listed: object, count: int) -> list[str]:
    """Return the special tokens by id; ids without a name get one."""
    if not isinstance(listed, list):
        raise TypeError("`special_tokens` is not a list")
    by_id = {entry["rank"]: str(entry["token_str"]) for entry in listed}
    if sorted(by_id) != [*range(len(listed))] or len(listed) > count:
        raise ValueError(f"ranks of special tokens are not 0 to at most {count - 1}")
    tokens = [by_id.get(place, f"<SPECIAL_{place}>") for place in range(count)]
    if len({*tokens}) != count:
        raise ValueError("two special tokens are the same")
    return tokens


def _ranks(listed: object, count: int) -> dict[bytes, int]:
    """Return token → rank of the first `count` entries."""
    if not isinstance(listed, list) or len(listed) < count:
        raise TypeError(f"`vocab` is not a list of at least {count} entries")
    ranks: dict[bytes, int] = {}
    for place, entry in enumerate(listed[:count]):
        if entry["rank"] != place:
            raise ValueError(f"entry {place} has rank {entry['rank']}")
        token = b64decode(entry["token_bytes"], validate=True)
        if not 0 < len(token) <= LONGEST_TOKEN:
            raise ValueError(f"entry {place} has {len(token)} bytes")
        ranks[token] = place
    if len(ranks) != count or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError("an entry occurs twice, or a byte is missing")
    return ranks


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all splits of each token, tokens of lower rank first."""
    for token in ranks:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _spelled(token: bytes) -> str:
    return "".join(map(CHARACTERS.__getitem__, token))
