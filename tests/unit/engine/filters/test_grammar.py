import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pytest
import tokenizers
from constrained import ids_of, same, text_of, walk
from pydantic import BaseModel
from spelled import EOS, spelled
from tiny import tiny_tokenizer
from tokenizers import models

from exl2flow.core.errors import ConfigError, TextStuck
from exl2flow.engine.filters import Combined, Constraint, GrammarFilter, grammar, prepare
from exl2flow.model import Tokenizer

WIDTH = 4128  # of the logits: wider than the demo tokenizer's vocabulary
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [7, 42]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = """
start: item ("," item)*
item: /[a-c]{1,3}/ | "(" start ")"
"""


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    return Tokenizer(backend, bos_token_id=0, eos_token_ids=[1])


@pytest.mark.parametrize("name", ["demo", "tiny", "by_sentencepiece"])
def test_text_matches_the_regular_expression(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    texts = set()
    for pattern in (r"(yes|no), [0-9]{2,4}é?", r"a/b\.\"?", r"(red|reddish)!"):
        for seed in range(15):
            ids = walk(GrammarFilter(regex=pattern).start(tokenizer, WIDTH), tokenizer, seed=seed)
            assert ids is not None
            text = text_of(tokenizer, ids)
            assert re.fullmatch(pattern, text), text
            texts.add(text)

    assert len(texts) > 12


def test_text_is_one_of_a_grammar(demo: Tokenizer) -> None:
    for seed in range(15):
        ids = walk(GrammarFilter(lark=LARK).start(demo, WIDTH), demo, seed=seed, most=500)
        if ids is None:
            continue  # it nests on and on
        text = text_of(demo, ids)
        while "(" in text:
            inner = re.sub(r"\([a-c]{1,3}(,[a-c]{1,3})*\)", "a", text)
            assert inner != text
            text = inner
        assert re.fullmatch(r"[a-c]{1,3}(,[a-c]{1,3})*", text)


def test_schema_of_a_pydantic_model_is_followed(demo: Tokenizer) -> None:
    class Inner(BaseModel):
        ok: bool

    class Answer(BaseModel):
        inner: Inner
        letters: list[Inner] = []

    given = GrammarFilter(json_schema=Answer.model_json_schema())
    ended = 0
    for seed in range(8):
        ids = walk(given.start(demo, WIDTH), demo, seed=seed, most=300)
        if ids is not None:
            Answer.model_validate_json(text_of(demo, ids))
            ended += 1
    assert ended > 2


def test_schema_may_be_text(demo: Tokenizer) -> None:
    as_text = GrammarFilter(json_schema=json.dumps(PERSON))

    assert as_text == GrammarFilter(json_schema=PERSON)
    assert hash(as_text) == hash(GrammarFilter(json_schema=PERSON))
    ids = walk(as_text.start(demo, WIDTH), demo, seed=3)
    assert ids is not None
    assert json.loads(text_of(demo, ids)).keys() == {"name", "age"}


def test_white_space_is_forbidden_on_request(demo: Tokenizer) -> None:
    given = GrammarFilter(json_schema={**PERSON, "x-guidance": {"whitespace_flexible": False}})
    for seed in range(4):
        ids = walk(given.start(demo, WIDTH), demo, seed=seed)
        assert ids is not None
        text = text_of(demo, ids)
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def blanks(state: Constraint, tokenizer: Tokenizer, text: str) -> int:
    """Return how many characters of white space may follow a text, 100 at most."""
    for token in tokenizer.backend.encode(text, add_special_tokens=False).ids:
        state.accept(token)
    for count in range(100):
        allowed = ids_of(state.allowed().words, tokenizer.vocab_size)
        found = [token for token in allowed if tokenizer.pieces[token] in ("\n", " ", "\t")]
        if not found:
            return count
        state.accept(found[0])
    return 100


@pytest.mark.parametrize("text", ["{", '{"name"', '{"name":"x"', '{"name":"x","age":7'])
def test_white_space_is_bounded_unless_the_schema_says_otherwise(
    text: str, demo: Tokenizer
) -> None:
    def most(**guidance: object) -> int:
        schema = {**PERSON, "x-guidance": guidance} if guidance else PERSON
        return blanks(GrammarFilter(json_schema=schema).start(demo, WIDTH), demo, text)

    assert 1 <= most() <= 17
    assert 1 <= most(coerce_one_of=True) <= 17
    assert most(whitespace_flexible=False) == 0
    assert most(whitespace_flexible=True) == 100
    assert most(whitespace_pattern=r"[ \n]{0,3}") == 3


def test_later_changes_of_a_schema_have_no_effect() -> None:
    schema = {"enum": ["a"]}
    given = GrammarFilter(json_schema=schema)

    schema["enum"].append("b")

    assert given == GrammarFilter(json_schema={"enum": ["a"]})


def test_every_eos_id_may_end_a_text() -> None:
    keys = ["a", "b", "end"]
    one, ids = spelled(keys)
    tokenizer = Tokenizer(one.backend, bos_token_id=None, eos_token_ids=[EOS, ids[b"end"]])
    state = GrammarFilter(regex="a+").start(tokenizer, 40)

    assert state.allowed().ends == frozenset()
    state.accept(ids[b"a"])

    allowed = state.allowed()
    assert allowed.ends == {EOS, ids[b"end"]}
    assert ids_of(allowed.words, 40) == [EOS, ids[b"a"], ids[b"end"]]
    assert (allowed.may_end, allowed.must_end) == (True, False)


def test_without_eos_ids_the_usual_token_ends_a_text(by_sentencepiece: Tokenizer) -> None:
    state = GrammarFilter(regex="a+").start(by_sentencepiece, 360)
    assert by_sentencepiece.eos_token_ids == ()

    state.accept(by_sentencepiece.encode("ba")[-1])

    assert state.allowed().ends == {by_sentencepiece.single_id("</s>")}


def test_complete_text_must_end() -> None:
    tokenizer, ids = spelled(["a", "b", "c"])
    state = GrammarFilter(regex="[ac]b").start(tokenizer, 40)

    state.accept(ids[b"a"])
    assert not state.allowed().may_end
    state.accept(ids[b"b"])

    allowed = state.allowed()
    assert (allowed.ends, allowed.must_end, ids_of(allowed.words, 40)) == ({EOS}, True, [EOS])
    state.rollback(1)
    assert ids_of(state.allowed().words, 40) == [ids[b"b"]]
    state.accept(ids[b"b"])
    state.rollback(2)
    assert ids_of(state.allowed().words, 40) == [ids[b"a"], ids[b"c"]]


@pytest.mark.parametrize("width", [2, 3, 33, 64, 300])
def test_masks_have_the_width_of_the_logits(tiny: Tokenizer, width: int) -> None:
    words = GrammarFilter(regex=r"(?s).+").start(tiny, width).allowed().words

    assert words is not None
    assert words.shape == (-(-width // 32),)
    assert max(ids_of(words, 32 * len(words)), default=0) < tiny.vocab_size


def test_healed_token_comes_before_the_grammar(demo: Tokenizer) -> None:
    healed = next(token for token, piece in enumerate(demo.pieces) if piece == ' "')
    only = set(demo.healing(healed))
    for given in (
        GrammarFilter(regex='[a-d]{1,5}"'),
        GrammarFilter(lark='start: /[a-d]{1,5}/ "\\""'),
        GrammarFilter(json_schema=PERSON),
    ):
        for seed in range(4):
            state = given.start(demo, WIDTH, ' "')
            choices = [token for token in ids_of(state.allowed().words, WIDTH) if token in only]
            first = random.Random(seed).choice(choices)
            state.accept(first)
            ids = walk(state, demo, seed=seed, most=2000)
            assert ids is not None
            text = text_of(demo, [first, *ids])
            assert text.startswith(' "')
            if given.json_schema is None:
                assert re.fullmatch('[a-d]{1,5}"', text[2:])
            else:
                assert json.loads(text[2:]).keys() == {"name", "age"}


@pytest.mark.parametrize(
    "given",
    [GrammarFilter(json_schema=PERSON), GrammarFilter(regex="[ab]{3,9}"), GrammarFilter(lark=LARK)],
)
def test_text_that_is_cut_back_continues_like_a_new_one(
    demo: Tokenizer, given: GrammarFilter
) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        state, kept = Combined([given], demo, WIDTH), list[int]()
        for _ in range(40):
            if kept and rng.random() < 0.3:
                count = rng.randint(1, len(kept))
                state.rollback(count)
                del kept[len(kept) - count :]
            choices = {*ids_of(state.allowed().words, WIDTH)} - {*demo.eos_token_ids}
            if not choices:
                state.rollback(1)
                kept.pop()
                continue
            strange, token = rng.random() < 0.1, rng.choice(sorted(choices))
            state.accept(token)
            kept.append(token)
            if strange:  # a hook may put in any token; it is taken back here
                state.accept(rng.randrange(2, demo.vocab_size))
                state.accept(token)
                state.rollback(2)
            fresh = Combined([given], demo, WIDTH)
            for one in kept:
                fresh.accept(one)
            assert same(state, fresh)


def test_nothing_follows_a_token_that_was_not_allowed(demo: Tokenizer) -> None:
    wrong, right = demo.encode("x")[0], demo.encode("a")[0]
    state = GrammarFilter(regex="a+").start(demo, WIDTH)
    state.accept(right)
    before = state.allowed()
    assert before.may_end

    for token in (wrong, right, right):
        state.accept(token)
        assert ids_of(state.allowed().words, WIDTH) == []
        assert not state.allowed().may_end
    state.rollback(2)
    assert ids_of(state.allowed().words, WIDTH) == []
    state.rollback(1)

    assert ids_of(state.allowed().words, WIDTH) == ids_of(before.words, WIDTH)
    assert state.allowed().may_end


def test_masks_of_many_texts_are_computed_together(demo: Tokenizer) -> None:
    given = [
        GrammarFilter(json_schema=PERSON),
        GrammarFilter(regex="[a-z ]+"),
        GrammarFilter(lark=LARK),
    ]
    states = [filters.start(demo, WIDTH) for filters in given * 4]
    for count, state in enumerate(states):
        walk(state, demo, seed=count, most=count // 3)

    prepare(states)

    assert all(state.words is not None for state in states)
    for count, filters in enumerate(given * 4):
        alone = filters.start(demo, WIDTH)
        walk(alone, demo, seed=count, most=count // 3)
        mask = alone.allowed().words
        assert ids_of(states[count].allowed().words, WIDTH) == ids_of(mask, WIDTH)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "(ab"}, r"`regex` of a filter is broken.*\(8\).*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"lark": "start: foo"}, r"`lark` of a filter is broken: at 1\(8\): unknown name"),
        ({"lark": ""}, "`lark` of a filter is broken: no start"),
        ({"json_schema": {"type": "nonsense"}}, "`json_schema` .* Invalid type: nonsense"),
        ({"json_schema": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
        ({"json_schema": {"$ref": "#/x"}}, "'/x' does not exist"),
        ({"json_schema": '{"type": '}, r"`json_schema` .* line 1 column 10 \(char 9\)"),
        ({"json_schema": {"enum": [object()]}}, "`json_schema` .* not JSON serializable"),
        ({"regex": 5}, "`regex` of a filter is broken"),
        ({"lark": 5}, "`lark` of a filter is broken"),
        ({"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000}, "nested too deeply"),
        ({"gbnf": "root ::= ("}, "neither Lark nor GBNF"),
        ({"gbnf": "root ::= " + "(" * 5000}, "neither Lark nor GBNF"),
        ({}, "takes one of `json_schema`, `regex`, `lark` and `gbnf`"),
        ({"regex": "a", "lark": "start: /a/"}, "takes one of"),
    ],
)
def test_broken_grammars_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        GrammarFilter(**given)


def test_token_that_the_tokenizer_lacks_is_refused_at_the_start(demo: Tokenizer) -> None:
    given = GrammarFilter(lark='start: "a" <|nothing|>')

    with pytest.raises(ConfigError, match=r"cannot start GrammarFilter.*nothing"):
        given.start(demo, WIDTH)


def test_tokenizer_that_llguidance_cannot_read_is_named() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="</s>"))
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=[1], source=Path("folder"))

    with pytest.raises(ConfigError, match="llguidance cannot read `folder`"):
        GrammarFilter(regex="a").start(tokenizer, 32)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    with pytest.raises(ConfigError, match=r"`pip install 'llguidance>=1.9.1,<2'`"):
        GrammarFilter(regex="a")


def test_threads_that_start_grammars_at_once_read_the_vocabulary_once(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = grammar._tokenizer.__wrapped__, list[int]()

    def slow(tokenizer: Tokenizer, ids: int) -> object:
        reads.append(ids)
        time.sleep(0.02)
        return read(tokenizer, ids)

    monkeypatch.setattr(grammar, "_tokenizer", lru_cache(slow))
    filters = [GrammarFilter(regex=f"thread [{i}-9]{{2}}") for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda one: one.start(tiny, WIDTH), filters * 3))

    assert reads == [WIDTH]
    for one, text in zip(filters * 3, texts, strict=True):
        assert same(text, one.start(tiny, WIDTH))


def test_a_grammar_that_is_not_checked_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    for kind in ("regex", "lark", "gbnf"):
        GrammarFilter(**{kind: "("}, check=False)
    GrammarFilter(json_schema={"$ref": "#/x"}, check=False)


def test_first_schema_that_llguidance_can_do_is_taken(tiny: Tokenizer) -> None:
    schemas = ((('{"not": {}}', ""), ('{"const": 7}', "loose: \0")),)

    given = GrammarFilter(lark='start: "a" \x000\x00', schemas=schemas)

    assert "Unimplemented" in given.warnings[0]
    ids = walk(given.start(tiny, WIDTH), tiny, seed=0)
    assert ids is not None
    assert text_of(tiny, ids) == "a7"


def test_text_whose_masks_take_long_ends_and_others_do_not(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "SLOW", 0.0)
    slow = GrammarFilter(lark='start: e\ne: e e | "a"').start(tiny, WIDTH)
    letter = tiny.encode("a")[0]
    for _ in range(3):  # the first one is measured with the others
        slow.allowed()
        slow.accept(letter)
    assert slow.slow > 0

    monkeypatch.setattr(grammar, "MOST_SLOW", slow.slow / 2)

    with pytest.raises(TextStuck, match="masks take too long"):
        slow.allowed()
    other = GrammarFilter(regex="a+").start(tiny, WIDTH)
    prepare([slow, other])
    assert ids_of(other.allowed().words, WIDTH)


def test_grammar_that_gives_up_is_an_error_of_its_text(tiny: Tokenizer) -> None:
    many = {f"p{i}": {"type": "string"} for i in range(2000)}
    schema = {"type": "object", "properties": many, "additionalProperties": False}
    state = GrammarFilter(json_schema=schema).start(tiny, WIDTH)

    with pytest.raises(TextStuck, match="a grammar gave up"):
        walk(state, tiny, seed=0, most=5)
