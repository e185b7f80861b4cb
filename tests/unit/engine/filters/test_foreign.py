"""Filters with the shape of exllamav2's, and lm-format-enforcer's."""

import random
from collections.abc import Collection
from copy import copy
from pathlib import Path

import pytest
import torch
from constrained import ids_of, same, text_of, walk
from spelled import EOS, spelled

from exl2flow.core.errors import ConfigError
from exl2flow.engine.filters import Combined, ForeignFilter
from exl2flow.model import Tokenizer

ROOT = Path(__file__).parents[4]
KEYS = [*"abcdef", "ab", "cd"]
WIDTH = 40


class Ascending:
    """Texts of ascending letters that end at `f`, told by state that only `begin` resets."""

    def __init__(self, tokenizer: Tokenizer, *, as_list: bool = False) -> None:
        self.tokenizer, self.as_list, self.calls = tokenizer, as_list, list[str]()
        self.text = "unset"

    def begin(self, prefix_str: str) -> None:
        assert prefix_str == ""
        self.text = ""
        self.calls.append("begin")

    def feed(self, token: torch.Tensor) -> None:
        assert (token.shape, token.dtype) == ((1, 1), torch.int64)
        self.text += self.tokenizer.pieces[token]
        self.calls.append("feed")

    def next(self) -> tuple[Collection[int] | None, Collection[int]]:
        pieces = self.tokenizer.pieces
        ids = [
            token
            for token, piece in enumerate(pieces)
            if piece and self.text[-1:] < piece and [*piece] == sorted(piece)
        ]
        ends = [token for token in ids if pieces[token].endswith("f")]
        self.calls.append("next")
        return (ids, ends) if self.as_list else ({*ids}, {*ends})


class Cloned(Ascending):
    def clone(self) -> "Cloned":
        return copy(self)


class Itself(Ascending):
    def clone(self) -> "Itself":
        return self  # as lm-format-enforcer's


class Masking(Ascending):
    """Masks logits, as formatron's."""

    breaks = False

    def can_mask_logits(self) -> bool:
        return True

    def prepare_logit_mask(self) -> bool:
        self.calls.append("prepare")
        return True

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        assert (logits.shape, logits.dtype) == ((WIDTH,), torch.float32)
        if self.breaks:
            raise RuntimeError("cannot access the accelerator")
        masked = torch.full_like(logits, -torch.inf)
        ids, _ = self.next()
        masked[[EOS] if self.text.endswith("f") else list(ids or ())] = 0
        masked[len(self.tokenizer.pieces) :] = 0  # no ids of the tokenizer
        return masked


def test_allowed_ids_and_ends_are_taken_over() -> None:
    tokenizer, ids = spelled(KEYS)
    for as_list in (False, True):
        state = ForeignFilter(Ascending(tokenizer, as_list=as_list)).start(tokenizer, WIDTH)
        state.accept(ids[b"cd"])
        allowed = state.allowed()

        assert ids_of(allowed.words, WIDTH) == [ids[b"e"], ids[b"f"]]
        assert allowed.ends == {ids[b"f"]}
        assert not allowed.may_end


@pytest.mark.parametrize("kind", [Ascending, Cloned, Itself])
def test_texts_that_share_an_object_do_not_disturb_each_other(kind: type[Ascending]) -> None:
    tokenizer, ids = spelled(KEYS)
    given = ForeignFilter(kind(tokenizer))
    one, other = given.start(tokenizer, WIDTH), given.start(tokenizer, WIDTH)

    one.accept(ids[b"a"])
    other.accept(ids[b"cd"])
    first, second = one.allowed(), other.allowed()
    one.accept(ids[b"e"])

    assert ids[b"b"] in ids_of(first.words, WIDTH)
    assert ids_of(second.words, WIDTH) == [ids[b"e"], ids[b"f"]]
    assert ids_of(one.allowed().words, WIDTH) == [ids[b"f"]]


def test_text_alone_is_fed_each_token_once() -> None:
    tokenizer, ids = spelled(KEYS)
    inner = Ascending(tokenizer)
    state = ForeignFilter(inner).start(tokenizer, WIDTH)
    for key in (b"a", b"b"):
        state.allowed()
        state.accept(ids[key])
    state.rollback(0)
    state.allowed()

    assert inner.calls == ["begin", "next", "feed", "next", "feed", "next"]


@pytest.mark.parametrize("kind", [Ascending, Cloned, Masking])
def test_text_that_is_cut_back_continues_like_a_new_one(kind: type[Ascending]) -> None:
    tokenizer, ids = spelled(KEYS)
    given = ForeignFilter(kind(tokenizer))
    for seed in range(20):
        rng = random.Random(seed)
        state, kept = Combined([given], tokenizer, WIDTH), list[int]()
        for _ in range(10):
            if kept and rng.random() < 0.5:
                count = rng.randint(1, len(kept))
                state.rollback(count)
                del kept[len(kept) - count :]
            choices = ids_of(state.allowed().words, WIDTH)
            if {ids[b"f"], EOS} & {*choices} == {*choices}:
                continue
            kept.append(rng.choice([token for token in choices if token != ids[b"f"]]))
            state.accept(kept[-1])
            fresh = Combined([ForeignFilter(lambda: kind(tokenizer))], tokenizer, WIDTH)
            for token in kept:
                fresh.accept(token)
            assert same(state, fresh)


def test_function_makes_an_object_for_each_text() -> None:
    tokenizer, ids = spelled(KEYS)
    made = []

    def make() -> Ascending:
        made.append(Ascending(tokenizer))
        return made[-1]

    given = ForeignFilter(make)
    one, other = given.start(tokenizer, WIDTH), given.start(tokenizer, WIDTH)
    for state in (one, other, one, other):
        state.allowed()
        state.accept(ids[b"a"])

    assert [inner.calls.count("begin") for inner in made] == [1, 1]


def test_class_makes_an_object_for_each_text() -> None:
    tokenizer, ids = spelled(KEYS)

    class Ready(Ascending):
        def __init__(self) -> None:
            super().__init__(tokenizer)

    one, other = (ForeignFilter(Ready).start(tokenizer, WIDTH) for _ in range(2))
    one.accept(ids[b"cd"])

    assert len(ids_of(one.allowed().words, WIDTH)) == 2
    assert len(ids_of(other.allowed().words, WIDTH)) == 8


def test_masks_of_logits_replace_ids() -> None:
    tokenizer, ids = spelled(KEYS)
    inner = Masking(tokenizer)
    state = ForeignFilter(inner).start(tokenizer, WIDTH)
    state.accept(ids[b"cd"])

    assert ids_of(state.allowed().words, WIDTH) == [ids[b"e"], ids[b"f"]]
    assert "prepare" in inner.calls
    state.accept(ids[b"f"])
    allowed = state.allowed()
    assert (ids_of(allowed.words, WIDTH), allowed.ends, allowed.may_end) == ([EOS], {EOS}, True)


def test_ids_replace_masks_that_need_another_machine() -> None:
    tokenizer, ids = spelled(KEYS)
    inner = Masking(tokenizer)
    inner.breaks = True
    state = ForeignFilter(inner).start(tokenizer, WIDTH)
    for key in (b"cd", b"e"):
        state.accept(ids[key])
        state.allowed()

    assert inner.calls.count("prepare") == 1
    assert ids_of(state.allowed().words, WIDTH) == [ids[b"f"]]


def test_filter_may_allow_all() -> None:
    class Free(Ascending):
        def next(self) -> tuple[None, Collection[int]]:
            return None, set()

    tokenizer, _ = spelled(KEYS)
    allowed = ForeignFilter(Free(tokenizer)).start(tokenizer, WIDTH).allowed()

    assert (allowed.words, allowed.may_end, allowed.must_end) == (None, True, False)


def test_filter_begins_behind_a_healed_token() -> None:
    tokenizer, ids = spelled(KEYS)
    inner = Ascending(tokenizer)
    state = ForeignFilter(inner).start(tokenizer, WIDTH, "e")

    assert state.allowed().words is None
    state.accept(ids[b"e"])
    state.allowed()
    state.accept(ids[b"ab"])

    assert inner.text == "ab"
    state.rollback(1)
    assert ids[b"a"] in ids_of(state.allowed().words, WIDTH)


def test_object_without_the_methods_is_refused() -> None:
    tokenizer, _ = spelled(KEYS)

    class Half:
        def begin(self, prefix_str: str) -> None:
            pass

    with pytest.raises(ConfigError, match="lacks `begin`, `feed` or `next`"):
        ForeignFilter(Half()).start(tokenizer, WIDTH)


def test_lm_format_enforcer_plugs_in() -> None:
    """Its own classes, in the shape of its exllamav2 integration, which imports exllamav2."""
    lmformatenforcer = pytest.importorskip("lmformatenforcer")
    demo = Tokenizer.load(ROOT / "demo" / "model")
    tokens = [(i, p, p[:1] == " ") for i, p in enumerate(demo.pieces) if p]
    data = lmformatenforcer.TokenEnforcerTokenizerData(tokens, demo.decode, 1, False, 4096)

    class Enforced:
        def __init__(self) -> None:
            parser = lmformatenforcer.RegexParser(r"(yes|no), [0-9]{2}")
            self.enforcer = lmformatenforcer.TokenEnforcer(data, parser)

        def begin(self, prefix_str: str) -> None:
            self.ids = list[int]()

        def feed(self, token: torch.Tensor) -> None:
            self.ids.append(int(token[0][0]))

        def clone(self) -> "Enforced":
            return self

        def next(self) -> tuple[set[int], set[int]]:
            return set(self.enforcer.get_allowed_tokens(self.ids).allowed_tokens), set()

    given = ForeignFilter(Enforced())
    for seed in range(5):
        ids = walk(Combined([given], demo, 4128), demo, seed=seed)
        assert ids is not None
        assert text_of(demo, ids)[-4:-2] == ", "


def test_a_filter_that_its_user_feeds_is_read_as_it_stands() -> None:
    tokenizer, ids = spelled(KEYS)
    inner = Ascending(tokenizer)
    given = ForeignFilter(inner, is_fed=True)
    inner.begin("")
    first = ids_of(given.start(tokenizer, WIDTH).allowed().words, WIDTH)
    inner.feed(torch.tensor([[ids[b"c"]]]))

    second = ids_of(given.start(tokenizer, WIDTH).allowed().words, WIDTH)

    assert {ids[b"a"], ids[b"d"]} <= {*first}
    assert ids[b"a"] not in second
    assert ids[b"d"] in second
    assert inner.calls == ["begin", "next", "feed", "next"]
