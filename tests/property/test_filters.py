"""Texts under generated schemas and choices are what the filters say."""

import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
from constrained import ids_of, text_of, walk
from hypothesis import given
from hypothesis import strategies as st
from spelled import spelled

from exl2flow.engine.filters import Combined, GrammarFilter, PrefixFilter, SelectFilter
from exl2flow.model import Tokenizer

DEMO = Tokenizer.load(Path(__file__).parents[2] / "demo" / "model")
WIDTH = 4128
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6)
BYTES = [bytes([byte]) for byte in range(256)]


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _enum(values: list[Any]) -> dict[str, Any]:
    return {"enum": values}


LEAVES = (
    st.builds(lambda a, n: _integer(a, a + n), st.integers(0, 99), st.integers(0, 99))
    | st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6))
    | st.lists(NAMES | st.booleans() | st.none(), min_size=1, unique=True).map(_enum)
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}])
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(NAMES, inner, max_size=3)
    return (
        st.builds(_object, fields, st.booleans())
        | st.builds(_array, inner, st.integers(0, 2), st.integers(0, 1))
        | st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts})
    )


def _object(fields: dict[str, Any], all_of_them: bool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields) if all_of_them else [],
        "additionalProperties": False,
    }


def _array(inner: Any, least: int, more: int) -> dict[str, Any]:
    return {"type": "array", "items": inner, "minItems": least, "maxItems": least + more}


@given(st.recursive(LEAVES, nested, max_leaves=5), st.integers(0, 2**32))
def test_text_under_a_schema_parses_and_is_valid(schema: dict[str, Any], seed: int) -> None:
    state = Combined([GrammarFilter(json_schema=schema)], DEMO, WIDTH)

    ids = walk(state, DEMO, seed=seed, most=3000)

    assert ids is not None
    jsonschema.validate(json.loads(text_of(DEMO, ids)), schema)


@given(st.lists(NAMES.filter(bool), min_size=1, max_size=5), st.booleans(), st.data())
def test_choices_hold_with_any_tokens(strings: list[str], folds: bool, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.sampled_from(strings).map(str.encode), max_size=3))
    parts = [key[a:b] for key in cuts for a, b in ((0, 2), (1, 4), (2, None))]
    tokenizer, _ = spelled([*BYTES, *filter(None, parts)])
    seed = data.draw(st.integers(0, 99))

    chosen = SelectFilter(strings, case_insensitive=folds).start(tokenizer, 300)
    ids = walk(chosen, tokenizer, seed=seed)

    assert ids is not None
    text = text_of(tokenizer, ids)
    assert text in strings or (folds and text.casefold() in {s.casefold() for s in strings})


@given(st.lists(NAMES.filter(bool), min_size=1, max_size=5), st.integers(0, 99))
def test_texts_begin_with_a_prefix(strings: list[str], seed: int) -> None:
    random, ids = Random(seed), list[int]()
    state = PrefixFilter(*strings).start(DEMO, WIDTH)
    while (words := state.allowed().words) is not None:
        ids.append(random.choice(ids_of(words, WIDTH)))
        state.accept(ids[-1])

    assert text_of(DEMO, ids).startswith(tuple(strings))
