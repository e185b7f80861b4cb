"""Text to token ids and back, from `tokenizer.json`, `tokenizer.model` or `tekken.json`.

A SentencePiece model is converted on load. The conversion is compared with the `sentencepiece`
library on probe texts, so that a difference is an error and not bad calibration.

Any thread may encode at any time. Long texts are encoded without the GIL, so that other threads
keep running meanwhile.
"""

import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path

import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from exl2flow.core.errors import ContextOverflow, SourceModelError
from exl2flow.core.store.model_files import TEKKEN_FILE, TOKENIZER_FILE
from exl2flow.model.config.fields import Fields
from exl2flow.model.config.foreign import is_lfs_pointer, pointer_advice
from exl2flow.model.text.pieces import Pieces, is_whole
from exl2flow.model.text.sentencepiece_model import (
    ModelType,
    PieceType,
    SentencePieceModel,
    check_charsmap,
)
from exl2flow.model.text.tekken import load_tekken
from exl2flow.model.text.token_roles import opening_of, token_ids
from exl2flow.model.text.tokenizer_trial import try_tokenizer

SPACE_MARK = "▁"  # how SentencePiece writes a space
CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([A-Za-z0-9+/=]*)"')  # in tokenizer.json
UNREACHABLE = 1000.0  # how far below all others pieces score that text must not produce
LONG_TEXT = 8192  # characters; shorter ones take about 3 ms, less than the GIL's switch interval
PROBES = (
    "",
    " ",
    "Hello world",
    "  two  spaces,\ttabs\nand\r\nlines  ",
    "It's 3.14159 (about $22/7), isn't it? 100% #1!",
    "def f(x):\n    return x ** 2  # square\n",
    "naïve café, Ünïcödé, ﬁne print, ½ — “quoted” … ①",
    "Привет, мир! 你好，世界。 こんにちは 안녕하세요 مرحبا",
    "emoji 🙂👩‍👩‍👧 and \U0001f9ff, rare 𐍈 and \u200b zero width",
    "<s> </s> <unk> <0x0A> <|im_start|> [INST]",
    "aaaaaaa ababababa the the the thethethe",
)


class Tokenizer:
    """A model's tokenizer; `backend` can be saved as `tokenizer.json`, and is not to be changed.

    most: ids of a text, which hold the interpreter while they are listed; None: any number.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        pad_token_id: int | None = None,
        opening: Sequence[int] | None = None,
        prefix: str = "",
        source: Path = Path("tokenizer.json"),
    ) -> None:
        """Take over `backend` from a file; its truncation and padding settings are dropped.

        `pad_token_id` defaults to the id of `<pad>`, then to EOS if that differs from BOS;
        `opening`, the ids that the model's texts begin with, to BOS. `prefix` is put before every
        text that is not empty.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False  # it reads them, `_plain` does not
        self.backend = backend
        self.bos_token_id = bos_token_id
        bos = () if bos_token_id is None else (bos_token_id,)
        self.opening = bos if opening is None else tuple(opening)
        self.prefix = prefix
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = backend.token_to_id("<pad>") if pad_token_id is None else pad_token_id
        if self.pad_token_id is None and self.eos_token_id != bos_token_id:
            self.pad_token_id = self.eos_token_id
        added = backend.get_added_tokens_decoder().items()
        named = {*self.eos_token_ids, *bos}
        self.special_ids = frozenset(
            {token_id for token_id, token in added if token.special} | named
        )
        self.source = source
        self.most: int | None = None
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Load the tokenizer of a model folder.

        Raises:
            SourceModelError: no tokenizer file, a damaged one, or one that does not convert.
        """
        backend, prefix = _load_backend(model_dir)
        bos_token_id = next(token_ids(model_dir, backend, "bos"), None)
        with _failures_are_named(model_dir):
            opening = opening_of(model_dir, backend, bos_token_id)
        return cls(
            backend,
            bos_token_id=bos_token_id,
            eos_token_ids=tuple(dict.fromkeys(token_ids(model_dir, backend, "eos"))),
            pad_token_id=next(token_ids(model_dir, backend, "pad"), None),
            opening=opening,
            prefix=prefix,
            source=model_dir,
        )

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-sequence id, if the model has one."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(
        self, text: str, *, add_bos: bool = False, add_eos: bool = False, special: bool = False
    ) -> list[int]:
        """Return the token ids of a text; the post-processor of the file is not applied.

        Args:
            text: any text.
            add_bos: begin as the model's texts do, with `opening`: BOS, or nothing.
            add_eos: end with the end-of-sequence id, if the model has one.
            special: read special tokens spelled in the text as such, not as plain text.

        Raises:
            ContextOverflow: there are more than `most`.
        """
        text = self.prefix + text if text else ""
        with _failures_are_named(self.source):
            backend = self.backend if special else self._plain
            if len(text) < LONG_TEXT:
                encoding = backend.encode(text, add_special_tokens=False)
            else:  # unlike `encode`, this releases the GIL
                [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
        if self.most is not None and len(encoding) > self.most:
            raise ContextOverflow(f"a text has {len(encoding)} tokens; it may have {self.most}")
        ids = encoding.ids
        begin = [*self.opening] if add_bos else []
        end = [self.eos_token_id] if add_eos and self.eos_token_id is not None else []
        return begin + ids + end

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids; special tokens are spelled out only on request."""
        if not special and not self.special_ids.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        with _failures_are_named(self.source):
            return self.backend.decode(list(ids), skip_special_tokens=not special)

    @property
    def pieces(self) -> list[str]:
        """The text that each id adds within a text; empty for special ids.

        Incomplete characters are U+FFFD. The first use decodes all pieces.
        """
        return self._pieces.texts

    def healing(self, token_id: int) -> tuple[int, ...]:
        """Return the ids, ascending, whose pieces start with the piece of `token_id`.

        Special tokens and incomplete characters return only themselves.
        """
        piece = self.pieces[token_id] if token_id < self.vocab_size else ""
        return self._pieces.beginning_with(piece) if is_whole(piece) else (token_id,)

    def single_id(self, text: str) -> int | None:
        """Return the id of a token by its exact text, special tokens included."""
        token_id = self.backend.token_to_id(text)
        return token_id if token_id in self.special_ids else self._pieces.single_id(text)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second backend, which reads special tokens spelled in a text as plain text.

        The option belongs to a backend and must not change while another thread encodes. The model
        is shared, so this takes no memory; the tokens added in order of their ids get them again.
        """
        plain = tokenizers.Tokenizer(self.backend.model)
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (part := getattr(self.backend, name)) is not None:
                setattr(plain, name, part)
        added = self.backend.get_added_tokens_decoder()
        plain.add_tokens([added[token_id] for token_id in sorted(added)])
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _pieces(self) -> Pieces:
        with _failures_are_named(self.source):
            return Pieces(self.backend, self.vocab_size, self.special_ids)


def _load_backend(model_dir: Path) -> tuple[tokenizers.Tokenizer, str]:
    """Return the backend of a folder, and what it needs before every text."""
    json_path, model_path, tekken_path = (
        model_dir / name for name in (TOKENIZER_FILE, "tokenizer.model", TEKKEN_FILE)
    )
    if json_path.exists():
        return _from_json(json_path), ""
    if model_path.exists():
        model = SentencePieceModel.load(model_path)
        with _failures_are_named(model_path):
            backend = convert(model, source=model_path)
            _check_conversion(backend, model, source=model_path)
        _add_tokens(backend, model_dir)
        return backend, prefix_of(model)
    if tekken_path.exists():
        with _failures_are_named(tekken_path):
            return load_tekken(tekken_path), ""
    raise SourceModelError(
        f"`{model_dir}` holds neither `tokenizer.json` nor `tokenizer.model` nor `tekken.json`; "
        "fetch one of them from the model's repository"
    )


def _from_json(path: Path) -> tokenizers.Tokenizer:
    try:
        data = path.read_bytes()
        if is_lfs_pointer(data):
            raise SourceModelError(pointer_advice(path))
        for encoded in CHARSMAP.findall(data):
            check_charsmap(b64decode(encoded))
        try_tokenizer(data, path)
        with _failures_are_named(path):
            return tokenizers.Tokenizer.from_buffer(data)
    except SourceModelError:
        raise
    except Exception as error:  # the library raises `Exception` itself
        raise SourceModelError(f"cannot read `{path}`: {error}; fetch it again") from error


@contextmanager
def _failures_are_named(source: Path) -> Iterator[None]:
    """Turn errors and panics of the Rust library into `SourceModelError`.

    Raises:
        SourceModelError: the library failed.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise SourceModelError(
            f"the library `tokenizers` fails on `{source}`: {error}; fetch it again"
        ) from error


def convert(model: SentencePieceModel, *, source: Path) -> tokenizers.Tokenizer:
    """Return a tokenizer that is equivalent to a SentencePiece model, behind `prefix_of` it.

    Args:
        model: the model.
        source: its file, for messages.

    Raises:
        SourceModelError: a model type or option without a counterpart.
    """
    if not model.escape_whitespace or model.whitespace_suffix:
        raise SourceModelError(
            f"`{source}` treats white space in a way that is not supported; add a `tokenizer.json`"
        )
    match model.type:
        case ModelType.BPE:
            backend = tokenizers.Tokenizer(_bpe(model))
        case ModelType.UNIGRAM:
            backend = tokenizers.Tokenizer(_unigram(model))
        case _:
            raise SourceModelError(
                f"`{source}` is a {model.type.name} model; supported are BPE and UNIGRAM: add a "
                "`tokenizer.json`"
            )
    backend.normalizer = _normalizer(model)
    backend.decoder = _decoder(model)
    backend.add_tokens(list(_added_tokens(model)))
    return backend


def prefix_of(model: SentencePieceModel) -> str:
    """Return what a converted tokenizer needs before every text.

    The library splits a text at user-defined pieces and normalizes each stretch, SentencePiece the
    text as a whole, so a blank of the normalizer would stand behind each of these pieces.
    """
    types = {piece.type for piece in model.pieces}
    is_split = PieceType.USER_DEFINED in types and not model.remove_extra_whitespace
    return " " if model.dummy_prefix and is_split else ""


def _bpe(model: SentencePieceModel) -> models.Model:
    """Return BPE whose merges are all splits of each piece, pieces of higher score first."""
    vocab = {piece.text: index for index, piece in enumerate(model.pieces)}
    normal = [piece for piece in model.pieces if piece.type is PieceType.NORMAL]
    known = {piece.text for piece in normal}
    merges = [
        (piece.text[:cut], piece.text[cut:])
        for piece in sorted(normal, key=lambda piece: -piece.score)
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in known and piece.text[cut:] in known
    ]
    unknown = (piece.text for piece in model.pieces if piece.type is PieceType.UNKNOWN)
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=next(unknown, None),
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(model: SentencePieceModel) -> models.Model:
    """Return a unigram model; pieces that text must not produce score below all others."""
    lowest = min(piece.score for piece in model.pieces)
    reachable = (PieceType.NORMAL, PieceType.USER_DEFINED)
    scored = [
        (piece.text, piece.score if piece.type in reachable else lowest - UNREACHABLE)
        for piece in model.pieces
    ]
    types = [piece.type for piece in model.pieces]
    unknown_id = types.index(PieceType.UNKNOWN) if PieceType.UNKNOWN in types else None
    return models.Unigram(scored, unk_id=unknown_id, byte_fallback=model.byte_fallback)


def _normalizer(model: SentencePieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        charsmap = normalizers.Precompiled(model.charsmap)
        # the library maps a grapheme by its first character only, and "\r\n" is one grapheme
        steps.append(normalizers.Replace("\r\n", charsmap.normalize_str("\r") + "\n"))
        steps.append(charsmap)
    if model.remove_extra_whitespace:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.dummy_prefix and not prefix_of(model):
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if model.dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _added_tokens(model: SentencePieceModel) -> Iterator[AddedToken]:
    """Yield the pieces that are whole tokens in text: control (on request) and user-defined."""
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    for piece in model.pieces:
        if piece.type in special or piece.type is PieceType.USER_DEFINED:
            yield AddedToken(piece.text, special=piece.type in special, normalized=False)


def _check_conversion(
    backend: tokenizers.Tokenizer, model: SentencePieceModel, *, source: Path
) -> None:
    """Compare the ids of the probe texts with those of the `sentencepiece` library."""
    try:
        reference = SentencePieceProcessor(model_proto=model.serialized)
    except RuntimeError as error:
        raise SourceModelError(f"cannot use `{source}`: {error}; fetch it again") from error
    named = (piece.text for piece in model.pieces if piece.type is PieceType.USER_DEFINED)
    with_pieces = [
        f"before{text}behind {text} it" for _, text in zip(range(8), named, strict=False)
    ]
    backend.encode_special_tokens = True
    for probe in chain(PROBES, with_pieces):
        text = prefix_of(model) + probe if probe else ""
        ids = backend.encode(text, add_special_tokens=False).ids
        expected = reference.encode(probe)
        if ids != expected:
            raise SourceModelError(
                f"`{source}` does not convert faithfully: {probe!r} becomes {ids[:8]}…, not "
                f"{expected[:8]}…; add a `tokenizer.json`, as transformers writes it with "
                "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`"
            )


def _add_tokens(backend: tokenizers.Tokenizer, model_dir: Path) -> None:
    """Add the tokens of the files beside a SentencePiece model.

    Raises:
        SourceModelError: their ids do not continue those of the model.
    """
    tokens: dict[int, AddedToken] = {}
    path = model_dir / "added_tokens.json"
    if path.exists():
        extra = Fields.load(path)
        for text in extra.values:
            token_id = extra.integer(text, least=0)
            tokens[token_id] = AddedToken(text, special=True, normalized=False)
    path = model_dir / "tokenizer_config.json"
    if path.exists():
        listed = Fields.load(path).inner("added_tokens_decoder")
        for key in listed.values:
            if not key.isdecimal():
                raise SourceModelError(f"`{listed.prefix}{key}` in `{path}` is not a token id")
            entry = listed.inner(key)
            tokens[int(key)] = AddedToken(
                entry.text("content"), special=entry.flag("special", False), normalized=False
            )
    for token_id, token in sorted(tokens.items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise SourceModelError(
                f"added token `{token.content}` of `{model_dir}` has id {token_id}, which does "
                f"not follow the vocabulary; add a `tokenizer.json`"
            )
