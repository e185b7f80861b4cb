"""A filter by a JSON schema, a regular expression or a grammar; llguidance does the work."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch

from exl2flow.core.errors import ConfigError, TextStuck
from exl2flow.engine.filters.constraint import Allowed
from exl2flow.engine.sampling.bits import WORD, words_of
from exl2flow.model import Tokenizer

GUIDANCE = "x-guidance"  # llguidance's options, within a schema
KINDS = ("json_schema", "regex", "lark", "gbnf")
INSTALL = "a grammar needs llguidance: `pip install 'llguidance>=1.9.1,<2'`"
SLOW = 0.01  # seconds of one mask
MOST_SLOW = 0.5  # seconds of slow masks of one text, all texts wait meanwhile
MOST_SHOWN = 500  # characters of a filter, or of what is wrong with it, in an error
_VOCABULARY = Lock()  # several requests may need the first one at the same time
WHITE_SPACE = r"\n?[ \t]{0,16}"  # between the parts of JSON
Alternatives = tuple[tuple[str, str], ...]  # schemas as JSON, with a warning


@dataclass(frozen=True, kw_only=True)
class GrammarFilter:
    """Texts of a JSON schema (a mapping or JSON text), a regular expression, or a grammar.

    Between the parts of JSON there is at most one line break and 16 spaces or tabs, unless the
    schema's `x-guidance` says otherwise.

    lark, gbnf: a Lark grammar; llama.cpp's, or Lark.
    inner: what `@inner` stands for in `lark`.
    schemas: what the number N between two zero characters stands for in `lark`: `%json` and the
        first of these schemas that llguidance can do; a zero character in its warning stands for
        the reason against the one before.
    check: look for mistakes now, in this process. A stranger's grammar must not be looked at in a
        server, whose stack it may overflow: `Trial.check` does it elsewhere.

    Raises `ConfigError` if it is broken, with llguidance's words, or llguidance is not installed.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None
    gbnf: str | None = None
    inner: "GrammarFilter | None" = None
    schemas: tuple[Alternatives, ...] = field(default=(), repr=False)
    check: bool = field(default=True, compare=False, repr=False)
    _settled: tuple[str, tuple[str, ...]] | None = field(
        default=None, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            kinds = "`json_schema`, `regex`, `lark` and `gbnf`"
            raise ConfigError(f"`GrammarFilter` takes one of {kinds}")
        try:
            if (schema := self.json_schema) is not None:
                schema = json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
                object.__setattr__(self, "json_schema", schema)
            elif not isinstance(getattr(self, given[0]), str):
                raise TypeError("it is not text")
            wrong = self._mistake() if self.check else ""
        except RecursionError:
            wrong = "it is nested too deeply"
        except (TypeError, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise ConfigError(f"the `{given[0]}` of a filter is broken: {brief(wrong)}")

    def _mistake(self) -> str:
        program = _program()
        grammars, warnings = program.settled(self.source())
        self.settle(grammars, warnings)
        return str(program.wrong_with(grammars))

    def settle(self, grammars: Sequence[Mapping[str, Any]], warnings: Sequence[str]) -> None:
        """Take what `trial_program.settled` has found, here or in another process."""
        object.__setattr__(self, "_settled", (json.dumps(grammars), tuple(warnings)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about `schemas` that are not held to in full, once they are known."""
        return () if self._settled is None else self._settled[1]

    def start(self, tokenizer: Tokenizer, width: int, prefix: str = "") -> "_GrammarState":
        """See `Filter.start`; a vocabulary of 152k takes 0.6 s the first time."""
        return _GrammarState(self, tokenizer, width, prefix)

    def rules(self, prefix: str) -> str:
        """Return what llguidance compiles."""
        if self._settled is None:
            self.settle(*_program().settled(self.source()))
        assert self._settled is not None
        begin = {"lark_grammar": f"start: {json.dumps(prefix, ensure_ascii=False)} @text"}
        grammars = [*([begin] if prefix else []), *json.loads(self._settled[0])]
        return json.dumps({"grammars": grammars})

    def source(self) -> dict[str, Any]:
        """Return the filter as `trial_program` reads it."""
        kind = next(kind for kind in KINDS if getattr(self, kind) is not None)
        text = getattr(self, kind)
        if kind == "json_schema":
            text = json.dumps(bounded(json.loads(text)))
        inner = None if self.inner is None else self.inner.source()
        return {"kind": kind, "text": text, "schemas": self.schemas, "inner": inner}


def brief(reason: str) -> str:
    """Return llguidance's words in one line, without most of the grammar that may be in them."""
    return f"{' '.join(reason.split()):.{MOST_SHOWN}}"


def bounded(schema: Any) -> Any:
    """Return a schema with bounded white space, unless it has options for that."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get(GUIDANCE, {})
    if not isinstance(options, dict) or "whitespace_flexible" in options:
        return schema
    return {**schema, GUIDANCE: {"whitespace_pattern": WHITE_SPACE, **options}}


class _GrammarState:
    """words: the mask, once computed. lost: tokens since the first that was not allowed.

    is_slow: its last mask took long, or that of a text beside it; slow: seconds of such masks.
    """

    def __init__(self, given: GrammarFilter, tokenizer: Tokenizer, width: int, prefix: str) -> None:
        self.ids, self._width = max(width, tokenizer.vocab_size), width
        self.matcher = _matcher(given, tokenizer, self.ids, prefix).deep_copy()
        self._eos = frozenset(_tokenizer(tokenizer, self.ids).eos_tokens)
        self.words: torch.Tensor | None = None
        self.lost, self.is_slow, self.slow = 0, False, 0.0

    def allowed(self) -> Allowed:
        prepare([self])
        if self.matcher.is_error():
            raise TextStuck(f"a grammar gave up: {self.matcher.get_error().splitlines()[0]}")
        if self.slow > MOST_SLOW:
            why = "its masks take too long; ambiguous rules do, such as `e: e e`"
            raise TextStuck(f"a grammar gave up: {why}")
        may_end = not self.lost and self.matcher.is_accepting()
        ends = self._eos if may_end else frozenset()
        if self.words is None:  # stopped, or lost
            return Allowed(words_of(ends, self._width), ends, may_end, may_end)
        words = self.words[: -(-self._width // WORD)]
        return Allowed(words, ends, may_end, is_named=True)

    def accept(self, token: int) -> None:
        self.words = None
        self.lost += self.lost > 0 or not self.matcher.try_consume_tokens([token])

    def fill_alone(self, words: torch.Tensor) -> None:
        """Compute the mask, and note what processor time it takes if that is long."""
        began = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        took = time.thread_time() - began
        self.words, self.is_slow = words, took > SLOW
        self.slow += took * self.is_slow

    def rollback(self, count: int) -> None:
        self.words, lost = None, min(count, self.lost)
        self.lost -= lost
        self.matcher.rollback(count - lost)


def prepare(constraints: Iterable[object]) -> None:
    """Compute the masks of all grammars among the constraints at once, without the GIL."""
    given = [getattr(one, "answer", one) for one in constraints]  # within `Phases`
    texts = [text for text in given if isinstance(text, _GrammarState) and text.words is None]
    texts = [text for text in texts if not text.lost and not text.matcher.is_stopped()]
    if texts:
        masks = torch.empty(len(texts), -(-texts[0].ids // WORD), dtype=torch.int32)
        for text, words in zip(texts, masks, strict=True):
            if text.is_slow:
                text.fill_alone(words)
        rows = [(one.matcher, row) for row, one in enumerate(texts) if one.words is None]
        began = time.monotonic()
        if rows:
            _executor().unsafe_compute_mask_ptr(rows, masks.data_ptr(), masks[0].nbytes, len(texts))
        is_slow = time.monotonic() - began > SLOW
        for text, words in zip(texts, masks, strict=True):
            if text.words is None:
                text.words, text.is_slow = words, is_slow


@lru_cache(32)
def _matcher(given: GrammarFilter, tokenizer: Tokenizer, ids: int, prefix: str) -> Any:
    with _VOCABULARY:
        known = _tokenizer(tokenizer, ids)
    matcher = _program().matcher(known, given.rules(prefix))
    if matcher.is_error():
        raise ConfigError(f"cannot start {given!r:.{MOST_SHOWN}}: {matcher.get_error()}")
    return matcher


@lru_cache(4)
def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return name → id of the tokens that a grammar must name, for they never match as text.

    Besides special tokens these are added ones that look like them, such as `<tool_call>`.
    """
    with _VOCABULARY:
        known = _tokenizer(tokenizer, tokenizer.vocab_size)
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if known.is_special_token(i)}


@lru_cache(4)
def _tokenizer(tokenizer: Tokenizer, ids: int) -> Any:
    eos = list(tokenizer.eos_token_ids) or None  # llguidance's guess
    try:
        return _llguidance().LLTokenizer(tokenizer.backend.to_str(), n_vocab=ids, eos_token=eos)
    except ValueError as error:
        raise ConfigError(f"llguidance cannot read `{tokenizer.source}`: {error}") from error


def lark_of(text: str) -> str:
    """Return a grammar in Lark, which may be given in llama.cpp's GBNF as well.

    Raises:
        ConfigError: it is neither.
    """
    try:
        grammars, _ = _program().settled({"kind": "gbnf", "text": text})
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return str(grammars[0]["lark_grammar"])


_executor = cache(lambda: _llguidance().LLExecutor())
KEPT = (_matcher, marks_of, _tokenizer)  # by tokenizer


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    return llguidance


def _program() -> Any:
    _llguidance()
    from exl2flow.engine.filters import trial_program

    return trial_program
