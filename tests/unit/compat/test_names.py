"""Names, signatures and defaults are those of a committed list."""

import inspect
import subprocess
import sys
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
from exllamav2_signatures import ATTRIBUTES, SIGNATURES

from exl2flow.compat import exllamav2
from exl2flow.compat.exllamav2 import generator

NAMES = SimpleNamespace(**(vars(exllamav2) | vars(generator)))


def described(function: Any) -> str:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    shown = []
    for p in parameters:
        default = getattr(p.default, "__name__", repr(p.default))
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        shown.append(stars + p.name + ("" if p.default is p.empty else f"={default}"))
    return ", ".join(shown)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_and_defaults_are_those_of_the_list(name: str) -> None:
    assert described(attrgetter(name)(NAMES)) == SIGNATURES[name]


def test_attributes_begin_with_the_values_of_the_list(config, model, cache, tokenizer) -> None:
    streaming = generator.ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    objects = {"ExLlamaV2Config": config, "ExLlamaV2StreamingGenerator": streaming}

    for name, values in ATTRIBUTES.items():
        assert {key: getattr(objects[name], key) for key in values} == values
    assert config.max_seq_len == 1024


def test_star_imports_bring_the_listed_names_and_no_modules() -> None:
    names: dict[str, Any] = {}
    exec("from exl2flow.compat.exllamav2 import *", names)
    exec("from exl2flow.compat.exllamav2.generator import *", names)

    roots = {name.partition(".")[0] for name in SIGNATURES}
    assert roots <= set(names)
    assert not {"model", "cache", "tokenizer", "generator", "config", "install"} & set(names)
    assert exllamav2.__version__ == "0.3.2"


def test_install_serves_libraries_that_import_exllamav2() -> None:
    program = """
from exl2flow.compat.exllamav2 import install
install()
install()
import exllamav2.generator.filters
from exllamav2 import ExLlamaV2, ExLlamaV2Tokenizer, model_init
from exllamav2.generator.base import ExLlamaV2Filter
from exl2flow.compat.exllamav2 import ExLlamaV2 as ours
assert ExLlamaV2 is ours and exllamav2.__version__ == "0.3.2"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_install_refuses_to_replace_exllamav2_itself(monkeypatch) -> None:
    from exl2flow.core.errors import ConfigError

    monkeypatch.setitem(sys.modules, "exllamav2", SimpleNamespace(__name__="exllamav2"))
    with pytest.raises(ConfigError, match="install"):
        exllamav2.install()
