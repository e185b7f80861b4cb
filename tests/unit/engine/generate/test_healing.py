from outputs import PROMPT, Run
from spelled import spelled

from exl2flow.core.requests.request import Request
from exl2flow.engine.generate.prompt import Prompt, encoded


def test_healed_token_adds_only_what_the_prompt_lacks() -> None:
    vocabulary = ["wor", "world", "work", " hello"]
    tokenizer, ids = spelled(["prompt", *vocabulary])
    prompt = encoded(Request((1, ids[b"wor"]), heal=True), tokenizer)
    run = Run(vocabulary, prompt=prompt, heal=True, max_new_tokens=1)

    assert prompt == Prompt(((1,),), healed=ids[b"wor"])
    assert run.output.healing == (2, 3, 4)
    assert run.output.new_tokens == -1
    run.push("world")
    assert run.text == "ld"
    assert run.output.healing is None
    assert run.output.new_tokens == 0
    run.push(" hello")
    assert (run.text, run.output.new_tokens) == ("ld hello", 1)
    assert run.shown_ids == [3, 5]


def test_last_token_of_the_prompt_does_not_stop_the_text_that_heals_it() -> None:
    prompt = Prompt((PROMPT,), healed=2)
    run = Run(["\n", "\n\n"], prompt=prompt, stops=(2, 3), min_new_tokens=1)

    assert run.output.blocked() == {3}
    run.push("\n")
    assert (run.output.reason, run.output.ids) == (None, [2])

    assert Run(["\n", "\n\n"], prompt=prompt, stops=(3,)).push("\n\n") is not None


def test_banned_suffix_of_a_healed_token_heals_again() -> None:
    run = Run(
        ["I ", "I delve", "dig"], prompt=Prompt((PROMPT,), healed=2), banned_strings=("delve",)
    )

    run.push("I delve")
    assert run.rewinds == [1]
    assert run.output.healing == (2, 3)
    assert run.output.blocked() == {3}
    run.push("I ", "dig")

    assert run.text == "dig"
