"""How texts begin that a model goes on with."""

import json
import shutil
from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.model import Tokenizer
from exl2flow.quant.tokenize.openings import (
    IN_TURN,
    PIECE_TOKENS,
    Openings,
    origin,
    plausible_firsts,
)

BOS = 0
TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("openings") / "model")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "model")


def openings(folder: Path, seed: int = 0) -> Openings:
    return Openings(folder, Tokenizer.load(folder), seed=seed)


def test_texts_begin_alone_or_with_a_piece_of_the_built_in_set(made: Path) -> None:
    found = openings(made)

    assert found.kinds == ("alone", "continued")
    assert found.of(0) == found.of(2) == [[BOS]] * IN_TURN
    pieces = [piece for text in range(1, 40, 2) for piece in found.of(text)]
    assert {piece[0] for piece in pieces} == {BOS}
    assert {len(piece) for piece in pieces} == {1 + PIECE_TOKENS}
    assert len(set(map(tuple, pieces))) > 0.9 * len(pieces)


def test_number_and_seed_determine_an_opening(made: Path) -> None:
    assert openings(made).of(1) == openings(made).of(1)
    assert openings(made).of(1) != openings(made, seed=1).of(1)
    assert openings(made).of(1) != openings(made).of(3)


def test_a_model_with_a_template_also_answers_requests(folder: Path) -> None:
    without = origin(folder, Tokenizer.load(folder))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(folder)

    found = openings(folder)

    assert found.kinds == ("alone", "continued", "answers")
    asked = [tokenizer.decode(ids) for ids in found.of(2)]
    assert all(text.startswith("<user>") and text.endswith("<assistant>") for text in asked)
    assert len(set(asked)) > 1
    assert origin(folder, tokenizer) != without


def test_a_template_that_refuses_requests_leaves_the_other_kinds(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('tools only') }}")

    assert openings(folder).kinds == ("alone", "continued")


def test_a_model_without_bos_begins_with_capitalized_words(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": None}))
    tokenizer = Tokenizer.load(folder)

    firsts = {ids[0] for text in range(0, 8, 2) for ids in openings(folder).of(text)}

    assert len(firsts) > 1
    assert firsts <= set(plausible_firsts(tokenizer))
    words = [tokenizer.decode([token]) for token in plausible_firsts(tokenizer)]
    assert "The" in words
    assert all(word.isalpha() and word[0].isupper() for word in words)
