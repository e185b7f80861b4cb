"""Strangers' grammars are compiled in a child first."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tiny import TOKENIZER_SIZE, tiny_tokenizer
from tokenizers import models

from exl2flow.core.errors import ConfigError
from exl2flow.engine.filters import GrammarFilter, lark_of, trial
from exl2flow.engine.filters.trial import Trial
from exl2flow.model import Tokenizer

TOO_DEEP = 4000
SLOW = {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (10007, 10009, 10037)]}


def stranger(**given: object) -> GrammarFilter:
    return GrammarFilter(**given, check=False)


def deep_rules(depth: int) -> str:
    rules = [f"a{i}: a{i + 1} a{i + 1}" for i in range(depth)]
    return "\n".join(["start: a0", *rules, f'a{depth}: "x"'])


def deep_references(depth: int) -> dict[str, object]:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{depth}": {"type": "string"}}}


@pytest.fixture(scope="module")
def tried() -> Iterator[Trial]:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    made = Trial(Tokenizer(backend, bos_token_id=0, eos_token_ids=[1]), TOKENIZER_SIZE)
    yield made
    made.close()


def check(tried: Trial, *grammars: GrammarFilter) -> list[str]:
    """Return what is wrong with each grammar."""

    async def all_() -> list[str]:
        return [await wrong(tried.check(given)) for given in grammars]

    return asyncio.run(all_())


async def wrong(checked: Awaitable[object]) -> str:
    try:
        await checked
    except ConfigError as error:
        return str(error)
    return ""


def test_one_child_tries_each_grammar_once(tried: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(tried, stranger(regex="a+")) == [""]
    child, asked = tried._child, list[str]()
    monkeypatch.setattr(tried, "_tried", counted(tried._tried, asked))

    assert check(tried, *[stranger(json_schema={"type": "object"})] * 2) == ["", ""]

    assert tried._child is child
    assert len(asked) == 1


def counted(
    work: Callable[[str, float], object], seen: list[str]
) -> Callable[[str, float], object]:
    def one(source: str, seconds: float) -> object:
        seen.append(source)
        return work(source, seconds)

    return one


def test_broken_grammars_are_refused_in_their_words(tried: Trial) -> None:
    found = check(
        tried,
        stranger(regex="(a"),
        stranger(gbnf="root ::= ("),
        stranger(lark="start: foo " + "x" * 10_000),
    )

    assert "unclosed group" in found[0]
    assert "neither Lark nor GBNF" in found[1]
    assert len(found[2]) < 1000


def test_a_grammar_that_ends_its_process_ends_no_other_one(tried: Trial) -> None:
    child = tried._child or (check(tried, stranger(regex="b")), tried._child)[1]

    found = check(
        tried,
        stranger(lark=deep_rules(TOO_DEEP)),
        stranger(json_schema=deep_references(TOO_DEEP)),
        stranger(regex="b+"),
    )

    assert ["too deeply" in words for words in found] == [True, True, False]
    assert tried._child is child
    assert child is not None
    assert child.poll() is None


def test_what_passes_leaves_half_of_the_stack_to_the_server(tried: Trial) -> None:
    depth, passed = 100, stranger(regex="f")
    while not check(tried, given := stranger(json_schema=deep_references(depth)))[0]:
        depth, passed = depth * 2, given

    assert depth > 400
    with ThreadPoolExecutor(1) as threads:  # whose stack is that of the server's threads
        threads.submit(lambda: passed.start(tried._tokenizer, TOKENIZER_SIZE).allowed()).result()


def test_a_slow_grammar_waits_apart_from_others(
    tried: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", (0.02, 0.2))
    order = list[str]()

    async def one(name: str, given: GrammarFilter) -> None:
        words = await wrong(tried.check(given, "one client"))
        order.append(f"{name} {'too' if 'more than 5 s' in words else words}")

    async def all_() -> None:
        slow = [stranger(json_schema={**SLOW, "title": str(i)}) for i in range(2)]
        await asyncio.gather(
            *[one("slow", given) for given in slow], one("quick", stranger(regex="c+"))
        )

    asyncio.run(all_())

    assert order == ["quick ", "slow too", "slow too"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_does_not_answer_is_started_again(
    number: signal.Signals, tried: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tried, stranger(regex="d"))
    child = tried._child
    assert child is not None
    os.kill(child.pid, number)
    monkeypatch.setattr(trial, "PATIENCE", 0.02)
    monkeypatch.setattr(trial, "SECONDS", (0.02, 5.0))

    assert check(tried, stranger(regex=f"d{{{number}}}")) == [""]

    assert tried._child is not child
    assert child.poll() is not None


def test_warnings_of_schemas_come_with_the_verdict(tried: Trial) -> None:
    schemas = ((('{"not": {}}', ""), ('{"const": 7}', "loose: \0")),)

    for _ in range(2):  # the second one is known
        given = stranger(lark="start: \x000\x00", schemas=schemas)
        [words] = asyncio.run(tried.check(given))
        assert "Unimplemented" in words
        assert json.loads(given.rules(""))["grammars"][0]["lark_grammar"].startswith("start: %json")


def test_tokenizer_that_llguidance_cannot_read_is_named() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="</s>"))
    made = Trial(Tokenizer(backend, bos_token_id=None, eos_token_ids=[1]), 32)

    assert "cannot read the tokenizer" in check(made, stranger(regex="a"))[0]

    assert made._child is None
    made.close()


def random_schema(rng: random.Random, depth: int) -> dict[str, object]:
    inner = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))] if depth else []
    match rng.randrange(6) if depth else 0:
        case 1:
            return {"type": "object", "properties": {f"p{i}": s for i, s in enumerate(inner)}}
        case 2:
            return {"anyOf": inner}
        case 3:
            return {"type": "array", "items": inner[0], "maxItems": rng.randrange(10**6)}
        case 4:
            return {"oneOf": inner, "not": inner[0]}
        case 5:
            return deep_references(rng.randrange(5000))
    return {"type": "string", "pattern": "(" * rng.randrange(3) + "a{1000}" + ")" * 2}


def random_grammar(rng: random.Random) -> GrammarFilter:
    size = 2 ** rng.randrange(14)
    match rng.randrange(6):
        case 0:
            return stranger(lark=deep_rules(size))
        case 1:
            return stranger(regex="(" * size + "a" + "){9}" * size)
        case 2:
            return stranger(gbnf="root ::= " + "(" * size + '"a"' + ")*" * size)
        case 3:
            return stranger(lark="start: " + "(" * size + '"a"' + ")?" * size)
        case 4:
            return stranger(lark="start: %json " + '{"anyOf": [' * size + "{}" + "]}" * size)
    return stranger(json_schema=random_schema(rng, rng.randrange(6)))


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_random_grammars_are_accepted_or_refused(
    count: int, tried: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", (0.02, 0.05))
    check(tried, stranger(regex="e"))
    child = tried._child

    for seed in range(count):
        given = random_grammar(random.Random(seed))
        if not check(tried, given)[0]:
            given.start(tried._tokenizer, TOKENIZER_SIZE).allowed()

    assert tried._child is child, "a grammar has ended the process of all"


def test_grammars_of_llama_cpp_become_lark() -> None:
    GrammarFilter(lark=lark_of('root ::= "yes" | "no"'))
    with pytest.raises(ConfigError, match="neither"):
        lark_of("root ::= (")


def test_closing_ends_the_process() -> None:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    made = Trial(Tokenizer(backend, bos_token_id=0, eos_token_ids=[1]), TOKENIZER_SIZE)
    assert check(made, stranger(regex="a")) == [""]
    child = made._child

    made.close()

    assert child is not None
    assert child.poll() == -signal.SIGKILL
