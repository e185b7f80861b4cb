"""A filter by a JSON schema, a regular expression or a grammar; llguidance does the work."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.inference.filters.constraint import Allowed
from exl2flow.inference.sampling.bits import WORD, words_of
from exl2flow.model import Tokenizer

GUIDANCE = "x-guidance"  # llguidance's options, within a schema
_VOCABULARY = Lock()  # several requests may need the first one at the same time
WHITE_SPACE = r"\n?[ \t]{0,16}"  # between the parts of JSON


@dataclass(frozen=True, kw_only=True)
class GrammarFilter:
    """Texts of a JSON schema (a mapping or JSON text), a regular expression, or a Lark grammar.

    Between the parts of JSON there is at most one line break and 16 spaces or tabs, unless the
    schema's `x-guidance` says otherwise.

    inner: what `@inner` stands for in `lark`.

    Raises `ConfigError` if it is broken, with llguidance's words, or llguidance is not installed.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None
    inner: "GrammarFilter | None" = None

    def __post_init__(self) -> None:
        values = vars(self).items()
        given = [kind for kind, value in values if value is not None and kind != "inner"]
        if len(given) != 1:
            raise ConfigError("`GrammarFilter` takes one of `json_schema`, `regex` and `lark`")
        try:
            if (schema := self.json_schema) is not None:
                schema = json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
                object.__setattr__(self, "json_schema", schema)
            wrong = _llguidance().LLMatcher.validate_grammar(self.rules(""))
        except (TypeError, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise ConfigError(f"the `{given[0]}` of a filter is broken: {' '.join(wrong.split())}")

    def start(self, tokenizer: Tokenizer, width: int, prefix: str = "") -> "_GrammarState":
        """See `Filter.start`; a vocabulary of 152k takes 0.6 s the first time."""
        return _GrammarState(self, tokenizer, width, prefix)

    def rules(self, prefix: str) -> str:
        begin = {"lark_grammar": f"start: {json.dumps(prefix, ensure_ascii=False)} @text"}
        grammars = [*([begin] if prefix else []), self._named("text")]
        if self.inner is not None:
            grammars.append(self.inner._named("inner"))
        return json.dumps({"grammars": grammars})

    def _named(self, name: str) -> dict[str, Any]:
        if self.json_schema is not None:
            return {"name": name, "json_schema": bounded(json.loads(str(self.json_schema)))}
        if self.regex is not None:
            rule = f"start: /{_llguidance().regex_to_lark(self.regex, '')}/"
            return {"name": name, "lark_grammar": rule}
        return {"name": name, "lark_grammar": self.lark}


def bounded(schema: Any) -> Any:
    """Return a schema with bounded white space, unless it has options for that."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get(GUIDANCE, {})
    if not isinstance(options, dict) or "whitespace_flexible" in options:
        return schema
    return {**schema, GUIDANCE: {"whitespace_pattern": WHITE_SPACE, **options}}


class _GrammarState:
    """words: the mask, once computed. lost: tokens since the first that was not allowed."""

    def __init__(self, given: GrammarFilter, tokenizer: Tokenizer, width: int, prefix: str) -> None:
        self.ids, self._width = max(width, tokenizer.vocab_size), width
        self.matcher = _matcher(given, tokenizer, self.ids, prefix).deep_copy()
        self._eos = frozenset(_tokenizer(tokenizer, self.ids).eos_tokens)
        self.words: torch.Tensor | None = None
        self.lost = 0

    def allowed(self) -> Allowed:
        prepare([self])
        if self.matcher.is_error():
            raise InferenceError(f"a grammar gave up: {self.matcher.get_error().splitlines()[0]}")
        may_end = not self.lost and self.matcher.is_accepting()
        ends = self._eos if may_end else frozenset()
        if self.words is None:  # stopped, or lost
            return Allowed(words_of(ends, self._width), ends, may_end, may_end)
        words = self.words[: -(-self._width // WORD)]
        return Allowed(words, ends, may_end, is_named=True)

    def accept(self, token: int) -> None:
        self.words = None
        self.lost += self.lost > 0 or not self.matcher.try_consume_tokens([token])

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
        rows = [(text.matcher, row) for row, text in enumerate(texts)]
        _executor().unsafe_compute_mask_ptr(rows, masks.data_ptr(), masks[0].nbytes, len(texts))
        for text, words in zip(texts, masks, strict=True):
            text.words = words


@lru_cache(32)
def _matcher(given: GrammarFilter, tokenizer: Tokenizer, ids: int, prefix: str) -> Any:
    with _VOCABULARY:
        known = _tokenizer(tokenizer, ids)
    matcher = _llguidance().LLMatcher(known, given.rules(prefix), log_level=0)
    if matcher.is_error():
        raise ConfigError(f"cannot start {given}: {matcher.get_error()}")
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
    _llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # its own kinds
        raise ConfigError(f"the `grammar` is neither Lark nor GBNF: {error}") from error


_executor = cache(lambda: _llguidance().LLExecutor())
KEPT = (_matcher, marks_of, _tokenizer)  # by tokenizer


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("a grammar needs llguidance: `pip install exl2flow[grammar]`") from error
    return llguidance
