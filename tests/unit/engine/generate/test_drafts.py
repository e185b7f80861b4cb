"""Drafts: the same texts with and without, whatever is guessed; and guesses that are good."""

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bounds import near, terms_of
from decoding import RICH, Again
from guesses import Guesses
from small_pages import PAGE_TOKENS, small_generator
from texts import ids_of, run
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.drafts import Acceptance, DraftKind, DraftRequest, hybrid
from exl2flow.engine.drafts.costs import StepCosts
from exl2flow.engine.drafts.suffixes import REVERTIBLE, SuffixAutomaton
from exl2flow.engine.filters import GrammarFilter
from exl2flow.inference import (
    Draft,
    Event,
    Generator,
    HybridDraft,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.kernels.cuda import graphs as cuda_graphs

DEMO = Path(__file__).parents[4] / "demo" / "model"
GREEDY = SamplingSettings.greedy()
COOL = SamplingSettings(top_k=10)
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0)
MIROSTAT = SamplingSettings(mirostat=True, mirostat_tau=3.0)
STORY = "Once upon a time there was a little"
DATE = GrammarFilter(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2} [a-z ]{4,20}")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(DEMO, device="cpu", max_tokens=1024)


def requests() -> list[Request]:
    options: list[dict[str, object]] = [
        {"settings": GREEDY, "max_new_tokens": 45},
        {"settings": HOT},
        {"settings": RICH, "probabilities": True, "top_tokens": 3},
        {"settings": MIROSTAT},
        {"settings": HOT, "banned_strings": ("a", "th", ".")},
        {"settings": MIROSTAT, "banned_strings": ("e", "o")},
        {"settings": SamplingSettings(cfg_scale=1.5), "prompt": (STORY, "There was")},
        {"settings": HOT, "filters": (DATE,)},
        {"settings": GREEDY, "filters": (DATE,), "banned_strings": ("1", "x")},
        {"settings": HOT, "stops": (" the",), "min_new_tokens": 20},
        {"settings": GREEDY, "heal": True, "logits": True},
        {"settings": HOT, "hooks": (lambda seen: None,)},
        {"settings": GREEDY, "max_new_tokens": 1},
        {"settings": GREEDY, "max_new_tokens": 2},
    ]
    return [
        Request(**{"prompt": STORY, "max_new_tokens": 30, "seed": i, "stops": (), **more})  # type: ignore[arg-type]  # options by name
        for i, more in enumerate(options)
    ]


class Share(float):
    """A probability, but for rounding."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-4

    __hash__ = float.__hash__


def seen(events: list[Event]) -> tuple[object, ...]:
    """Return what the events of a request say, but how it was cut into pieces."""
    fields = ("ids", "top_ids", "suppressed_ids")
    joined = [tuple(x for e in events for x in getattr(e, name)) for name in fields]
    shares = [Share(p) for e in events for p in e.probabilities]
    logits = [int(torch.as_tensor(x).argmax()) for e in events for x in e.logits]
    end = events[-1]
    held = None if end.held is None else (end.held.text, end.held.ids)
    text = "".join(e.text for e in events)
    return text, *joined, shares, logits, end.reason, end.trigger, held, type(end.error)


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[list[Event]]:
    return run(Generator(model, tokens=8192, slots=16), requests())


@dataclass
class Oracle(Guesses):
    """Guesses what it has seen, but errs as often as asked; for each text any number of tokens."""

    texts: list[list[int]]
    right: float
    tokens: int

    def start(self, *_: object) -> "Oracle":
        self._random = random.Random(0)
        return self

    def guess(self, request: DraftRequest) -> list[int]:
        ids, most = [*request.ids], request.most(DraftKind.MODEL)
        for text in self.texts:
            if text[: len(ids)] == ids:
                known = text[len(ids) : len(ids) + self._random.randint(0, most)]
                return [i if self._random.random() < self.right else i + 1 for i in known]
        return [self._random.randrange(400) for _ in range(most)]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("slots", "right", "tokens"),
    [
        pytest.param(1, 0.7, 4, marks=pytest.mark.slow),
        pytest.param(2, 1.0, 7, marks=pytest.mark.slow),
        pytest.param(3, 0.7, 7, marks=pytest.mark.slow),
        (3, 0.9, 15),  # all of them once two texts are left
        pytest.param(4, 0.0, 3, marks=pytest.mark.slow),
        pytest.param(8, 0.7, 1, marks=pytest.mark.slow),
        pytest.param(16, 0.8, 4, marks=pytest.mark.slow),
    ],
)
def test_texts_do_not_depend_on_guesses(
    slots: int, right: float, tokens: int, model: LoadedModel, expected: list[list[Event]]
) -> None:
    start = model.tokenizer.encode(STORY, add_bos=True)
    oracle = Oracle([start + ids_of(events) for events in expected], right, tokens)
    pairs = [*zip(requests(), expected, strict=True)]
    if slots == 1:
        pairs = [(request, known) for request, known in pairs if len(request.prompts) == 1]

    found = run(Generator(model, tokens=8192, slots=slots, draft=oracle), [r for r, _ in pairs])

    assert [*map(seen, found)] == [seen(known) for _, known in pairs]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("pages", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_texts_that_were_sent_back_do_not_depend_on_guesses(pages: int, model: LoadedModel) -> None:
    wanted = [
        Request(f"The {i}. day", settings=COOL, seed=i, stops=(), max_new_tokens=22)
        for i in range(4)
    ]
    known = run(Generator(model, tokens=2048, slots=4), wanted)
    starts = [model.tokenizer.encode(request.prompts[0], add_bos=True) for request in wanted]
    texts = [start + ids_of(events) for start, events in zip(starts, known, strict=True)]

    cramped = small_generator(
        model, tokens=pages * PAGE_TOKENS, slots=4, draft=Oracle(texts, 0.9, 7)
    )
    found = run(cramped, wanted)

    assert cramped.preemptions
    assert [*map(seen, found)] == [*map(seen, known)]


@pytest.mark.usefixtures("eager")
def test_texts_do_not_depend_on_ngrams(model: LoadedModel, expected: list[list[Event]]) -> None:
    draft = NgramDraft(tokens=7)

    found = run(Generator(model, tokens=8192, slots=16, draft=draft), requests())

    assert [*map(seen, found)] == [*map(seen, expected)]


@pytest.mark.usefixtures("eager")
def test_texts_do_not_depend_on_a_recorded_draft_model(
    model: LoadedModel, expected: list[list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Again.made = []
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Again)
    draft = Draft(model=model, tokens=3, least=0.5)
    generator = Generator(model, tokens=8192, slots=16, draft=draft)
    generator._device_slots.graphs.records = True

    found = run(generator, requests())

    assert [*map(seen, found)] == [*map(seen, expected)]
    assert Again.made


def test_a_draft_model_that_is_the_model_itself_is_always_right(model: LoadedModel) -> None:
    """Also behind prompts that were shared or copied, after bans, and for jobs sent back."""
    generator = Generator(model, tokens=1024, slots=3, draft=Draft(model=model, least=0.0))
    long = STORY + " dog. It was a very good dog" * 40
    prompts = [STORY, long, long + " and", STORY + " cat"]
    wanted = [
        Request(p, settings=GREEDY, stops=(), max_new_tokens=120, banned_strings=bans)
        for p, bans in zip(prompts, [(), (), (), (".",)], strict=True)
    ]

    ends = [events[-1].statistics for events in run(generator, wanted)]

    free, banned = ends[:3], ends[3]
    assert [s.accepted_tokens for s in free] == [s.drafted_tokens for s in free]
    assert all(s.accepted_tokens > 60 for s in free)
    assert 20 < banned.accepted_tokens < banned.drafted_tokens


def test_guesses_are_counted(model: LoadedModel, expected: list[list[Event]]) -> None:
    request = requests()[0]
    text = model.tokenizer.encode(STORY, add_bos=True) + ids_of(expected[0])

    for right in (0.0, 1.0):
        [events] = run(Generator(model, tokens=1024, draft=Oracle([text], right, 4)), [request])
        found = events[-1].statistics
        assert found.drafted_tokens > 0
        assert found.accepted_tokens == (found.drafted_tokens if right else 0)
        assert found.new_tokens == 45


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_wrong_guesses_leave_no_trace_in_the_cache(model: LoadedModel) -> None:
    request = Request(STORY, settings=COOL, seed=1, stops=(), max_new_tokens=300, logits=True)
    logits = list[torch.Tensor]()
    for draft in (None, Oracle([], 0.0, 7)):
        [events] = run(Generator(model, tokens=1024, draft=draft), [request])
        logits.append(torch.stack([torch.as_tensor(x) for e in events for x in e.logits]))

    bound = near(logits[1], terms_of(model.spec, 1024))
    torch.testing.assert_close(*logits, **bound)


def proposed(guesses: object, ids: list[int], limit: int = 4) -> list[int]:
    """Return the draft tokens for a text, of which none were verified before."""
    asked = request_for(guesses, ids, limit, Acceptance())
    return [*guesses.propose({0: asked})[0].ids]  # type: ignore[attr-defined]  # a proposer


def request_for(owner: object, ids: list[int], limit: int, acceptance: Acceptance) -> DraftRequest:
    return DraftRequest(
        owner=owner,
        ids=ids,
        length=len(ids),
        pages=(),
        limit=limit,
        acceptance=acceptance,
        slots=1,
        costs=StepCosts(limit),
    )


def test_ngrams_go_on_as_they_did() -> None:
    def after(ids: list[int], limit: int = 4) -> list[int]:
        return proposed(NgramDraft().start(), ids, limit)

    assert after([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1, 2]
    assert after([1, 2, 9, 7, 2, 8, 6, 1, 2]) == [9, 7, 2, 8]  # the longest, not the latest
    assert after([1, 2, 9, 1, 2, 8, 6, 1, 2], 2) == [8, 6]  # of equally long ones the latest
    assert after([7, 1, 2, 1, 2]) == [1, 2, 1, 2]  # it may overlap itself
    assert after([5, 5, 5], 3) == [5, 5, 5]
    assert after([5, 6, 5]) == []  # one token is a bad guide
    assert after([1, 2, 3]) == []
    assert after([1]) == []
    assert after([1, 2, 1], 0) == []


def test_a_text_that_copies_is_drafted_as_far_as_may_be() -> None:
    doubtful = Acceptance()
    for _ in range(20):
        doubtful.rates[DraftKind.NGRAM].note(1000, 7, 0)

    def after(copied: int) -> int:
        guesses = NgramDraft().start()
        ids = [*range(100), *range(copied)]
        return len(guesses.propose({0: request_for(guesses, ids, 7, doubtful)})[0].ids)

    assert [after(copied) for copied in (1, 2, 19, 20, 50)] == [0, 0, 0, 7, 7]


def test_ngrams_follow_a_text_that_was_cut_back() -> None:
    guesses = NgramDraft().start()
    ids = [*range(100), 7, 8]
    assert proposed(guesses, ids, 2) == [9, 10]

    ids[-2:] = [20, 21, 22]

    assert proposed(guesses, ids, 2) == [23, 24]


def test_long_prompts_are_looked_at_piece_by_piece() -> None:
    guesses, ids = NgramDraft().start(), [*range(1500), 7, 8]

    assert proposed(guesses, ids, 2) == []
    assert proposed(guesses, ids, 2) == [9, 10]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_end_that_occurred_before_is_found(seed: int) -> None:
    """Also after tokens were taken back, more of them than are remembered."""
    chance, text, ids = random.Random(seed), SuffixAutomaton(), list[int]()
    for _ in range(60):
        if chance.random() < 0.2 and ids:
            del ids[-chance.randint(1, REVERTIBLE + 6) :]
        ids += [chance.randrange(3) for _ in range(chance.randint(0, 4))]

        assert text.follow(ids, most=len(ids))

        places = {
            count: [e for e in range(count, len(ids)) if ids[e - count : e] == ids[-count:]]
            for count in range(1, len(ids))
        }
        longest = max((count for count, ends in places.items() if ends), default=0)
        assert text.match.length == longest
        assert not longest or text.match.end in places[longest]


def test_what_is_accepted_decides_how_much_is_drafted() -> None:
    acceptance, costs = Acceptance(), StepCosts(7)
    good, bad = (acceptance.rates[kind] for kind in (DraftKind.MODEL, DraftKind.NGRAM))
    lengths = list[int]()
    for length in range(2000):
        more = good.most(length, lambda rate: costs.best(1, DraftKind.MODEL, rate, 7))
        good.note(length, more, more)
        if most := bad.most(length, lambda rate: costs.best(1, DraftKind.NGRAM, rate, 7)):
            bad.note(length, most, 0)
            lengths.append(length)

    assert more == 7
    assert len(lengths) < 45  # it is off soon, and tries again now and then
    assert max(right - left for left, right in pairwise(lengths)) == 512
    assert acceptance.counts["ngram"] == (bad.drafted, 0)

    bad.note(2000 + 512, 1, 1)
    assert bad.most(2513, lambda rate: costs.best(1, DraftKind.NGRAM, rate, 7)) == 1


def test_measured_steps_decide_how_much_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL2FLOW_TUNING", "on")
    costs = StepCosts(7)
    assert [costs.compares(1) for _ in range(6)] == [False] * 5 + [True]
    assert costs.best(1, DraftKind.MODEL, 0.7, 7) == 3  # by its rows

    for _ in range(3):
        costs.note(1, "", 0, 10.0)
        for most in (1, 2, 3, 7):
            costs.note(1, DraftKind.MODEL, most, 30.0)
    assert costs.best(1, DraftKind.MODEL, 0.6, 7) == 0  # 2.5 tokens in the time of 3
    for _ in range(9):
        costs.note(1, DraftKind.MODEL, 1, 11.0)
    assert costs.best(1, DraftKind.MODEL, 0.6, 7) == 1

    for drafted, seconds in ((0, 10.0), (1, 15.0), (3, 20.0)):
        for _ in range(3):
            costs.note(4, DraftKind.MODEL, drafted, seconds)
    assert costs.shared(4, DraftKind.MODEL, [(0.9, 3)] * 3 + [(0.2, 1)]) == 3
    assert costs.shared(4, DraftKind.MODEL, [(0.9, 3)] + [(0.0, 0)] * 3) == 0


def test_copies_and_a_model_take_turns(
    model: LoadedModel, expected: list[list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model has read what was copied meanwhile: it is the model, so it is right."""
    monkeypatch.setattr(hybrid, "LONG", 2)
    draft = HybridDraft(other=Draft(model=model, tokens=3, least=0.0))
    generator = Generator(model, tokens=8192, slots=16, draft=draft)

    found = run(generator, requests())
    [events] = run(generator, [Request(STORY, settings=GREEDY, stops=(), max_new_tokens=150)])

    assert [*map(seen, found)] == [*map(seen, expected)]
    counts = events[-1].statistics
    assert counts is not None
    drafted, accepted = counts.drafts[DraftKind.MODEL]
    assert accepted == drafted > 0
    assert counts.drafts[DraftKind.NGRAM][0] > 10
    assert counts.steps * 2 < counts.new_tokens


def test_many_texts_are_drafted_less(model: LoadedModel) -> None:
    def most(tokens: int) -> list[int]:
        steps = Generator(model, tokens=512, slots=40, draft=NgramDraft(tokens))._device_slots
        return [steps.max_drafts(slots) for slots in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40)]

    assert most(4) == [4, 4, 4, 4, 3, 3, 1, 1, 0, 0]
    assert most(15) == [15, 15, 7, 7, 3, 3, 1, 1, 0, 0]


def test_broken_drafts_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    other = load_model(make_tiny("llama", tmp_path / "tiny"), device="cpu", max_tokens=512)

    with pytest.raises(ConfigError, match="take a draft of the same model family"):
        Generator(model, tokens=512, draft=Draft(model=other))
    with pytest.raises(ConfigError, match="`tokens` of a draft is 16; it must be from 1 to 15"):
        NgramDraft(tokens=16)
    with pytest.raises(ConfigError, match="`least` of a draft is"):
        Draft(model=model, least=1.5)
