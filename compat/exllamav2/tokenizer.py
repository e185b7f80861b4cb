"""`ExLlamaV2Tokenizer`: texts to tensors of ids and back."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from exl2flow.compat.exllamav2.model import ExLlamaV2Config
from exl2flow.core.requests.request import FIRST_EMBEDDING
from exl2flow.model import Tokenizer

NOTHING = "(?!)"  # a pattern that is nowhere


class ExLlamaV2Tokenizer:
    """A model's tokenizer; `native` is ours."""

    def __init__(self, config: ExLlamaV2Config, lazy_init: bool = True) -> None:
        self.config, self.native = config, Tokenizer.load(Path(str(config.model_dir)))
        native, token = self.native, self.native.backend.id_to_token
        # programs pass them on unchecked, so their type is not `int | None`
        self.bos_token_id: Any
        self.eos_token_id: Any
        self.bos_token_id, self.eos_token_id = native.bos_token_id, native.eos_token_id
        self.pad_token_id = -1 if native.pad_token_id is None else native.pad_token_id
        self.unk_token_id = native.backend.token_to_id("<unk>")
        ids = (self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id)
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (
            None if i is None or i < 0 else token(i) for i in ids
        )
        self.actual_vocab_size = native.vocab_size
        self.extended_id_to_piece = {i: token(i) or "" for i in sorted(native.special_ids)}
        self.extended_piece_to_id = {text: i for i, text in self.extended_id_to_piece.items()}
        self.cached_encode_str = lru_cache(100)(self.encode)
        self.single_id, self.get_vocab_size = native.single_id, lambda: native.vocab_size

    @cached_property
    def tokenizer_model(self) -> SimpleNamespace:
        """The names that libraries for grammars use; pieces as `tokenizer.json` spells them."""
        size, piece = self.native.vocab_size, self.native.backend.id_to_token
        vocab = list(map(piece, range(size)))
        return SimpleNamespace(vocab_size=lambda: size, id_to_piece=piece, vocab=vocab)

    tokenizer = property(lambda self: self.tokenizer_model)
    newline_token_id = property(lambda self: self.single_id("\n"))
    space_token_id = property(lambda self: self.single_id(" "))

    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Any = None,
    ) -> Any:
        """Return ids (b, n), padded on the left; with offsets (b, 1), each minus the padding."""
        known = {e.text_alias: range(e.first_index, e.last_index) for e in embeddings or ()}
        aliases, rows = "|".join(map(re.escape, known)) or NOTHING, list[torch.Tensor]()
        for each in [text] if isinstance(text, str) else text:
            row = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
            for part in re.split(f"({aliases})", each):
                row += known.get(part) or self.native.encode(part, special=encode_special_tokens)
            rows.append(
                torch.tensor(row + self.native.encode("", add_eos=add_eos), dtype=torch.long)
            )
        ids = pad_sequence(rows, True, self.pad_token_id, "left")
        offsets = torch.tensor([[len(row) - ids.shape[1]] for row in rows])
        return (ids, offsets) if return_offsets else ids

    def decode(self, ids: torch.Tensor, decode_special_tokens: bool = False) -> Any:
        """Return the text of ids (n,), or a list of texts of ids (b, n)."""
        if ids.dim() > 1:
            return [self.decode(row, decode_special_tokens) for row in ids]
        hidden = () if decode_special_tokens else (self.pad_token_id, self.eos_token_id)
        known = [i for i in ids.tolist() if 0 <= i < self.native.vocab_size and i not in hidden]
        return self.native.decode(known, special=decode_special_tokens)

    def single_token(self, token_id: int) -> torch.Tensor:
        return torch.tensor([[token_id]], dtype=torch.long)

    def num_tokens(self, text: str) -> int:
        return len(self.native.encode(text))

    def padding_mask(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask (b, n) to add to attention scores: -inf at pads, else 0."""
        return torch.zeros(ids.shape).masked_fill(ids == self.pad_token_id, -torch.inf)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Return the text of each id; that of special ones on request."""
        special = self.extended_id_to_piece if include_special_tokens else {}
        return [special.get(i, piece) for i, piece in enumerate(self.native.pieces)]

    def get_piece_to_id_dict(self) -> dict[str, int]:
        return {piece: token for token, piece in enumerate(self.native.pieces) if piece}

    def get_prefix_to_ids_dict(self) -> dict[str, list[int]]:
        """Return the ids whose pieces begin with a piece, for each piece."""
        pieces = self.get_piece_to_id_dict().items()
        return {piece: list(self.native.healing(token)) for piece, token in pieces}

    def get_char_trie(self) -> SimpleNamespace:
        return _trie(self.native.pieces)

    def get_char_trie_ci(self) -> SimpleNamespace:
        return _trie(map(str.lower, self.native.pieces))


def _trie(pieces: Iterable[str]) -> SimpleNamespace:
    """Return a tree of pieces by characters; a node's `leaf` has the ids whose pieces end there."""
    root = SimpleNamespace(children={}, leaf=[])
    for token, piece in enumerate(pieces):
        node = root
        for character in piece:
            node = node.children.setdefault(character, SimpleNamespace(children={}, leaf=[]))
        node.leaf += [token] if piece else []
    return root


class ExLlamaV2MMEmbedding:
    """Embeddings (n, hidden) instead of tokens; `text_alias` stands for them in texts."""

    _first = count(FIRST_EMBEDDING, 1_000_000)  # of the next one

    def __init__(
        self,
        model: Any,
        embeddings: torch.Tensor,
        text_alias: str | None = None,
        thw_grid: Any = None,
        pre_tokens: int = 0,
        post_tokens: int = 0,
    ) -> None:
        self.model, self.embeddings, self.thw_grid = model, embeddings.flatten(0, -2), thw_grid
        self.first_index = next(self._first)
        self.pre_tokens, self.post_tokens = pre_tokens, post_tokens
        self.last_index = self.first_index + len(self.embeddings)
        self.text_alias = text_alias or f"<$EMB_{self.first_index}$>"
