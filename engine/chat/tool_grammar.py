"""Force valid tool calls: a Lark grammar of all calls that a format, functions and a choice allow.

A text under it is free up to the mark of a call; from there on, names and arguments are those of
the functions. Marks that a vocabulary has as tokens are forced as tokens, others as text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exl2flow.core.errors import ConfigError
from exl2flow.engine.chat.tool_events import functions_of
from exl2flow.engine.chat.tool_literals import types_of
from exl2flow.engine.chat.tools import NAME, ToolFormat
from exl2flow.engine.filters import Alternatives, GrammarFilter, bounded, marks_of
from exl2flow.model import Tokenizer

Choice = Literal["auto", "required", "named", "none"]
Schema = Mapping[str, Any]

SPACES = r"SPACE: /\n[ ]{0,4}| /"  # between calls
ANY = r"ANY: /(.|\n)*/"
MOST_COUNTED = 50  # characters of raw text, added up; llguidance may give up from 100 on
MOST_SCHEMAS = 4 << 20  # characters of all schemas
CONSTANTS = '("True" | "False" | "true" | "false")'
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")  # gpt-oss' marks of turns


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """A filter, and sentences about schemas that it does not hold in full."""

    filter: GrammarFilter
    warnings: tuple[str, ...] = ()


def tool_grammar(
    fmt: ToolFormat,
    tools: Iterable[Schema],
    tokenizer: Tokenizer,
    *,
    choice: Choice = "auto",
    name: str = "",
    parallel: bool = True,
    answer: GrammarFilter | None = None,
    check: bool = True,
) -> ToolGrammar:
    """Return the filter that makes a model's calls valid.

    Args:
        fmt: the model's format.
        tools: the functions, as their JSON schemas.
        tokenizer: the model's.
        choice: `auto`: text and any number of calls; `required`: at least one call, from the
            beginning of the text on; `named`: one call of `name`; `none`: no call. A format without
            a mark before calls holds either text or calls, and `auto` takes `{` or `[` at the
            beginning as a call.
        name: the function that `named` takes.
        parallel: allow several calls; otherwise a call ends the text.
        answer: what a text without a call must match, if `auto` leaves the choice.
        check: let llguidance read the schemas now; see `GrammarFilter`. Otherwise warnings about
            schemas that it cannot do are those of the filter, once they are known.

    Raises:
        ConfigError: there are no functions, `name` is not one of them, the schemas are too long,
            or llguidance is missing.
    """
    functions = functions_of(tools)
    if choice == "named" and name not in functions:
        raise ConfigError(f"no function `{name}`; there are {', '.join(functions)}")
    if choice in ("auto", "required") and not functions:
        raise ConfigError(f"`{choice}` needs functions to call; give some, or choose `none`")
    chosen = {name: functions[name]} if choice == "named" else functions
    inner = answer if choice == "auto" else None
    is_single = choice == "named" or not parallel
    writer = _Writer(fmt, tokenizer, is_single=is_single, has_answer=inner is not None)
    lark = "\n".join(writer.lines(chosen, choice))
    schemas = tuple(writer.schemas)
    made = GrammarFilter(lark=lark, inner=inner, schemas=schemas, check=check)
    return ToolGrammar(made, (*writer.warnings, *made.warnings))


class _Writer:
    """Writes the rules of one grammar; `warnings` and `schemas` fill up meanwhile."""

    def __init__(
        self, fmt: ToolFormat, tokenizer: Tokenizer, *, is_single: bool, has_answer: bool
    ) -> None:
        self._fmt, self._is_single, self._has_answer = fmt, is_single, has_answer
        self._special = marks_of(tokenizer)
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._rules, self.warnings, self._counted = list[str](), list[str](), 0
        self.schemas, self._length = list[Alternatives](), 0
        self._holds_many = fmt.kind in ("json_list", "pythonic") or bool(fmt.call_begin)

    def lines(self, functions: Mapping[str, Schema], choice: Choice) -> list[str]:
        if choice != "none":
            one: dict[str, Callable[[str, Schema], str]] = {
                "json": self._object,
                "json_list": self._object,
                "name_json": self._name_json,
                "channel": self._name_json,
                "parameters": self._parameters,
                "pythonic": self._python,
            }
            calls = [one[self._fmt.kind](name, schema) for name, schema in functions.items()]
            self._rules.append(f"call: {' | '.join(calls)}")
            self._rules.append(f"calls: {self._calls()}")
        return [*self._start(choice), *self._rules, SPACES, ANY]

    def _start(self, choice: Choice) -> list[str]:
        begin, closing = self._fmt.begin, self._closing(self._fmt.end)
        section = f"section: {self._mark(begin)} calls {closing}"
        if choice in ("required", "named"):
            others, first = self._channels()
            is_whole = self._is_single or self._holds_many or not begin or bool(others)
            more = "" if is_whole else " (SPACE? section)*"
            return [f"start: {first}section{more}", section, *others]
        if not begin and self._has_answer:
            return ["start: section | @inner", section]
        if not begin:
            head = "{" if self._fmt.kind == "json" else "["
            other = rf"OTHER: /(\s*[^\s\{head}](.|\n)*)?/"
            return (
                ["start: ANY"] if choice == "none" else ["start: section | OTHER", section, other]
            )
        others, first = self._channels()
        if others and choice != "none":
            text = "@inner" if self._has_answer else "ANY"
            end = self._with_ids(f'<[C]> "final" <[M]> {text}')
            return [f"start: {first}(section | {end} | {text})", section, *others]
        if self._has_answer:
            more = "" if self._is_single or self._holds_many else "+"
            return [f"start: (SPACE? section){more} | @inner", section]
        return self._free(choice, closing)

    def _free(self, choice: Choice, closing: str) -> list[str]:
        """Return rules of a text that is free up to a mark."""
        first = self._pieces(self._fmt.begin)[0]
        word = first if first in self._special else first.rstrip("\n")
        tail = f"TAIL: ANY & ~(ANY {_quoted(word)} ANY)"
        begun = f"begun[lazy]: ANY {_quoted(word)}"
        if word in self._special:
            begun = f"begun: TAIL {self._mark(word)}"
        if choice == "none":
            return ["start: TAIL", tail]
        rest = self._mark(self._fmt.begin[len(word) :])
        start = "start: TAIL | tag" if self._is_single else "start: tag* TAIL"
        return [start, tail, begun, f"tag: begun {rest} calls {closing}"]

    def _channels(self) -> tuple[list[str], str]:
        """Return the rule of turns in other channels, and what lets them come first."""
        if self._fmt.kind != "channel" or not all(name in self._special for name in HARMONY):
            return [], ""
        kinds = '("analysis" | "commentary" | "final")'
        return [
            self._with_ids(f'other: <[C]> {kinds} <[M]> ANY <[E]> <[S]> "assistant"')
        ], "other* "

    def _with_ids(self, rule: str) -> str:
        for letter, name in zip("CMES", HARMONY, strict=True):
            rule = rule.replace(f"<[{letter}]>", f"<[{self._special[name]}]>")
        return rule

    def _calls(self) -> str:
        """Return the rule of what stands between the marks."""
        fmt, more = self._fmt, ""
        if fmt.kind == "json_list" or fmt.brackets:
            more = "" if self._is_single else ' ("," SPACE? call)*'
            return f'SPACE? "[" SPACE? call{more} SPACE? "]"'
        if fmt.kind == "pythonic":
            return "call" if self._is_single else 'call ("\\n" call)*'
        if fmt.call_begin:
            one = f"{self._mark(fmt.call_begin)} call"
            return one if self._is_single else f"({one})+"
        return "call"

    # calls

    def _object(self, name: str, schema: Schema) -> str:
        fmt = self._fmt
        keys = [json.dumps(fmt.name_key), json.dumps(fmt.arguments_key)]
        before, behind, id_key = '"{"', "", _quoted(f'{json.dumps(fmt.id_key)}: "')
        if fmt.id_key and fmt.id_is_first:
            before = f'"{{" {id_key} /[0-9]{{1,2}}/ {_quoted(chr(34) + ", ")}'
        elif fmt.id_key:
            letters = f"/[A-Za-z0-9]{{{fmt.id_length}}}/"
            behind = f'(", " {id_key} {letters} {_quoted(chr(34))})? '
        middle = _quoted(f'{keys[0]}: "{name}", {keys[1]}: ')
        return f'{before} {middle} {self._arguments(name, schema)} {behind}"}}"'

    def _arguments(self, name: str, schema: Schema) -> str:
        return self._json(name, {**schema, "type": "object"})

    def _name_json(self, name: str, schema: Schema) -> str:
        mark = self._mark(self._fmt.between + self._fmt.name_end)
        end = self._closing(self._fmt.call_end)
        return f"{_quoted(name)} {mark} {self._arguments(name, schema)} {end}"

    def _parameters(self, name: str, schema: Schema) -> str:
        fmt, parts = self._fmt, [self._mark(f"{self._fmt.name_begin}{name}{self._fmt.name_end}")]
        for key, inner, is_required in _properties(schema):
            value = self._raw_value(f"{name}.{key}", _with_definitions(inner, schema))
            pair = f"{self._mark(fmt.key_begin + key + fmt.key_end)} {value}"
            parts.append(pair if is_required else f"({pair})?")
        return " ".join([*parts, self._mark(fmt.call_end)])

    def _raw_value(self, where: str, schema: Schema) -> str:
        """Return a rule for a value as raw text, with what comes behind it."""
        end, number = self._fmt.value_end, len(self._rules)
        word = end.split()[0]
        if types_of(schema) != {"string"}:
            return f"{self._json(where, schema)} {self._mark(end)}"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values:
            return f"({' | '.join(_quoted(value) for value in values)}) {self._mark(end)}"
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if {"pattern", "format"} & schema.keys():
            self.warnings.append(f"`{where}`: raw text is not held to its pattern or format")
        lengths = [length for length in (least, most) if length != ""]
        is_held = all(isinstance(length, int) for length in lengths) and lengths == sorted(lengths)
        if is_held and lengths[0] >= 0 and self._counted + lengths[-1] <= MOST_COUNTED:
            self._counted += lengths[-1]
        else:
            self.warnings.append(f"`{where}`: raw text is not held to its length")
            least, most = 0, ""
        text = f"TEXT_{number}: /(.|\\n){{{least},{most}}}/ & ~(ANY {_quoted(word)} ANY)"
        if word in self._special:  # no text contains it
            self._rules.append(text)
            return f"TEXT_{number} {self._mark(end.lstrip())}"
        self._rules += [text, f"raw_{number}[lazy]: TEXT_{number} {_quoted(end)}"]
        return f"raw_{number}"

    def _python(self, name: str, schema: Schema) -> str:
        needed, optional = list[str](), list[str]()
        for key, inner, is_required in _properties(schema):
            if not NAME.fullmatch(key):
                self.warnings.append(f"`{name}.{key}` is not a name of an argument; it is left out")
                continue
            if types_of(inner) == {"boolean"} and not {"const", "enum"} & inner.keys():
                value = CONSTANTS
            else:
                value = self._json(f"{name}.{key}", _with_definitions(inner, schema))
            (needed if is_required else optional).append(f"{_quoted(key + '=')} {value}")
        given = ' ", " '.join(needed)
        more = [f'(", " {pair})?' for pair in optional]
        if needed:
            return f'{_quoted(name + "(")} {given} {" ".join(more)} ")"'
        firsts = [" ".join([pair, *more[at + 1 :]]) for at, pair in enumerate(optional)]
        inside = f"({' | '.join(firsts)})?" if firsts else ""
        return f'{_quoted(name + "(")} {inside} ")"'

    # pieces of rules

    def _json(self, where: str, schema: Schema) -> str:
        """Return a rule for JSON of a schema, of the nearest that llguidance can do, or of any."""
        is_inner = "." in where
        given = [
            (dict(schema), ""),
            (
                {**schema, "x-guidance": {"coerce_one_of": True}},
                "" if "x-guidance" in schema else f"`{where}`: `oneOf` is held to as `anyOf`",
            ),
            (
                {} if is_inner else {"type": "object"},
                f"`{where}`: any {'value' if is_inner else 'object'}; \0",
            ),
        ]
        texts = tuple((json.dumps(bounded(each)), warning) for each, warning in given)
        self._length += len(texts[0][0])
        if self._length > MOST_SCHEMAS:
            why = f"have more than {MOST_SCHEMAS} characters, `$defs` counted for each parameter"
            raise ConfigError(f"the schemas of `tools` {why}; give fewer functions")
        self.schemas.append(texts)
        return f"\0{len(self.schemas) - 1}\0"

    def _pieces(self, mark: str) -> list[str]:
        """Cut a mark where special tokens begin and end."""
        names = "|".join(re.escape(name) for name in sorted(self._special, key=len, reverse=True))
        return [piece for piece in re.split(f"({names})", mark) if piece] if names else [mark]

    def _mark(self, mark: str) -> str:
        special = self._special
        parts = [f"<[{special[p]}]>" if p in special else _quoted(p) for p in self._pieces(mark)]
        return " ".join(part for part in parts if part != '""')

    def _closing(self, mark: str) -> str:
        """Return the rule of a mark at the end, which the model's EOS stands for if it is one."""
        return "" if self._special.get(mark.strip()) in self._eos else self._mark(mark)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Schema) -> Sequence[tuple[str, Schema, bool]]:
    """Return name, schema and whether it is required, of each argument."""
    given, required = schema.get("properties") or {}, schema.get("required") or ()
    known = {**given, **{key: {} for key in required if key not in given}}
    pairs = ((key, inner if isinstance(inner, Mapping) else {}) for key, inner in known.items())
    return [(key, inner, key in required) for key, inner in pairs]


def _with_definitions(schema: Schema, root: Schema) -> dict[str, Any]:
    """Return the schema of a part, with what its references point to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**schema, **shared}
