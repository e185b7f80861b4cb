"""Strangers' grammars are compiled in a child first."""

import asyncio

import pytest
import tokenizers
from tiny import TOKENIZER_SIZE, tiny_tokenizer

from exl2flow.core.errors import ConfigError
from exl2flow.inference.filters import GrammarFilter, lark_of
from exl2flow.inference.filters.trial import Trial
from exl2flow.model import Tokenizer


async def check(trial: Trial, *grammars: GrammarFilter) -> None:
    for given in grammars:
        await trial.check(given)


def test_one_child_tries_each_grammar_once() -> None:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    trial = Trial(Tokenizer(backend, bos_token_id=0, eos_token_ids=[1]), TOKENIZER_SIZE)
    try:
        asyncio.run(check(trial, GrammarFilter(regex="a+")))
        child = trial._child
        asyncio.run(check(trial, *[GrammarFilter(json_schema={"type": "object"})] * 2))
        assert trial._child is child
        assert len(trial._known) == 2
    finally:
        trial.close()
    assert child is not None
    assert child.wait(5) != 0


def test_grammars_of_llama_cpp_become_lark() -> None:
    GrammarFilter(lark=lark_of('root ::= "yes" | "no"'))
    with pytest.raises(ConfigError, match="neither"):
        lark_of("root ::= (")
