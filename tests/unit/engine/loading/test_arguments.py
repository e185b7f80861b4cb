"""Wrong arguments of calls in Python are refused in words; what the calls return prints briefly."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.inference import Draft, Generator, LoadedModel, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")
    return load_model(folder, device="cpu", max_tokens=1024)


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no folder": (lambda m: load_model(None), "`model_dir` is None; give the path"),  # type: ignore[arg-type]
    "longest text as text": (
        lambda m: load_model(m.spec.source_dir, max_tokens="4k"),
        "`max_tokens` is '4k'; it must be an integer",
    ),
    "split as text": (
        lambda m: load_model(m.spec.source_dir, placement="20,24"),
        r"`placement` is '20,24'; give `Split.parse\('20,24'\)`",
    ),
    "folder as model": (
        lambda m: Generator("a"),
        r"`model` is a folder, `a`; give `load_model\('a'",
    ),  # type: ignore[arg-type]
    "nothing as model": (lambda m: Generator(None), "`model` is of type `NoneType`; give what"),  # type: ignore[arg-type]
    "cache as text": (
        lambda m: Generator(m, tokens="8192"),
        "`tokens` is '8192'; it must be an integer",
    ),
    "folder as draft": (lambda m: Draft(model="a"), "`model` is a folder, `a`"),  # type: ignore[arg-type]
    "draft as text": (lambda m: Generator(m, draft="a"), "`draft` is 'a'; give a `Draft`"),
    "kept as text": (lambda m: Generator(m, keep="a"), "`keep` is 'a'; give a `PromptCache`"),
    "misnamed option": (
        lambda m: Generator(m, tokens=256).generate("x", max_tokens=3),
        "`max_tokens` is not an option of `generate`; give `max_new_tokens`",
    ),
    "message": (
        lambda m: Generator(m, tokens=256).generate({"role": "user"}),
        "`prompts` is {'role': 'user'}; .*`Session`",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_with_what_to_give(name: str, model: LoadedModel) -> None:
    call, message = CALLS[name]

    with pytest.raises(ConfigError, match=message):
        call(model)


def test_model_and_generator_print_briefly(model: LoadedModel) -> None:
    said = repr(Generator(model, tokens=512, slots=2))

    assert said == f"Generator({model!r}, tokens=512, slots=2)"
    assert repr(model) == (
        f"LoadedModel({str(model.spec.source_dir)!r}, LlamaForCausalLM, "
        f"{model.spec.num_layers} layers, 1024 tokens, cpu)"
    )
    assert len(repr(Draft(model=model))) < 300
