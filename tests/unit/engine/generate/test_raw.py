"""`Request.raw`: the model's own probabilities, whatever the sampler does with them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from bounds import near, terms_of
from decoding import Again
from tiny import VOCAB_SIZE

from exl2flow.core.requests.request import Sampled
from exl2flow.engine.filters import GrammarFilter
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.sampling import own_probabilities
from exl2flow.inference import (
    Adapter,
    Draft,
    Event,
    Generator,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
)
from exl2flow.kernels.cuda import graphs as cuda_graphs

PROMPT = (5, 6, 7, 8, 5, 6, 7)
GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)
RICH = SamplingSettings(
    temperature=1.5,
    top_k=3,
    repetition_penalty=1.5,
    frequency_penalty=0.3,
    dry_multiplier=0.8,
    xtc_probability=0.3,
    typical=0.9,
    token_bias=((9, 5.0), (10, -math.inf)),
)
DIGITS = GrammarFilter(regex="[0-9]{3}[a-z]{20}")
EVERY: dict[str, dict[str, Any]] = {
    "greedy": {"settings": GREEDY},
    "sampled": {"settings": HOT},
    "penalties": {"settings": RICH},
    "mirostat": {"settings": SamplingSettings(mirostat=True, mirostat_tau=3.0)},
    "excluded": {"settings": GREEDY, "excluded": range(5, 200)},
    "filter": {"settings": HOT, "filters": (DIGITS,)},
    "bans": {"settings": HOT, "banned_strings": ("a", "e")},
    "hooks": {"settings": GREEDY, "hooks": (lambda seen: None,)},
    "no top": {"settings": HOT, "top_tokens": 0},
}


def request(**fields: Any) -> Request:
    given = {"max_new_tokens": 12, "seed": 1, "stops": (), "probabilities": True, "top_tokens": 5}
    return Request(**{"prompt": PROMPT, **given, **fields})


def joined(events: list[Event], name: str) -> tuple[Any, ...]:
    return tuple(x for event in events for x in getattr(event, name))


@torch.inference_mode()
def check_own(model: LoadedModel, events: list[Event], prompt: tuple[int, ...] = PROMPT) -> None:
    """Compare with the softmax of logits that the decoder gives for the whole text."""
    ids = joined(events, "ids")
    logits = model.decoder.forward(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
    logs = logits.double().log_softmax(-1)
    bound = near(logits, terms_of(model.spec, len(prompt + ids)))["atol"]
    found, tops = joined(events, "probabilities"), joined(events, "top_ids")
    assert len(found) == len(ids) > 0
    for token, p, row in zip(ids, found, logs, strict=True):
        assert math.log(p) == pytest.approx(float(row[token]), abs=bound)
    shares = joined(events, "top_probabilities")
    for top, top_shares, row in zip(tops, shares, logs, strict=len(tops) > 0):
        best = row[: model.tokenizer.vocab_size].topk(len(top))
        assert list(top) == best.indices.tolist()
        assert [*map(math.log, top_shares)] == pytest.approx(best.values.tolist(), abs=bound)


@pytest.mark.parametrize("kind", EVERY)
def test_probabilities_are_those_of_the_model_alone(model: LoadedModel, kind: str) -> None:
    generator, wanted = Generator(model, tokens=1024), request(raw=True, **EVERY[kind])

    events = [*generator.stream(wanted)]
    plain = [*generator.stream(request(**EVERY[kind]))]

    check_own(model, events)
    assert joined(events, "ids") == joined(plain, "ids")
    assert joined(events, "probabilities") != joined(plain, "probabilities")
    tops = joined(events, "top_ids")
    assert {*map(len, tops)} <= {5}
    assert len(tops) == (len(joined(events, "ids")) if wanted.top_tokens else 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_drafts_and_company_change_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, draft: str, records: bool
) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Again)
    monkeypatch.setattr(Again, "made", [], raising=False)
    drafter = Draft(model=model, least=0.0) if draft == "model" else NgramDraft()
    generator = Generator(model, tokens=8192, draft=drafter)
    generator._device_slots.graphs.records = records
    every = [request(raw=i % 3 > 0, tag=i, **more) for i, more in enumerate(EVERY.values())]
    every += [request(raw=True, tag=99, top_tokens=20), request(tag=100, settings=GREEDY)]

    events = [*generator.stream(*every)]

    for one in every:
        mine = [event for event in events if event.tag == one.tag]
        if one.raw:
            check_own(model, mine)
        elif one.settings == GREEDY:
            assert set(joined(mine, "probabilities")) == {1.0}
    accepted = [e.statistics.accepted_tokens for e in events if e.statistics is not None]
    assert sum(accepted) > 0


def test_a_pair_has_those_after_its_first_prompt(model: LoadedModel) -> None:
    settings = SamplingSettings(cfg_scale=2.0, temperature=1.0)
    wanted = request(prompt=(PROMPT, (9, 8)), raw=True, settings=settings)

    check_own(model, [*Generator(model, tokens=1024).stream(wanted)])


def test_an_adapter_counts_as_the_model(folder: Path, model: LoadedModel, tmp_path: Path) -> None:
    adapter = Adapter.load(make_adapter(tmp_path / "adapter", folder), model)
    found = [
        joined([*Generator(model, tokens=1024).stream(wanted)], "probabilities")[0]
        for wanted in (
            request(raw=True, adapters=(adapter,), max_new_tokens=1),
            request(raw=True, max_new_tokens=1),
        )
    ]

    assert found[0] != found[1]


def test_hooks_see_the_samplers_probabilities_and_replace_tokens(model: LoadedModel) -> None:
    seen = list[float]()

    def always_nine(sampled: Sampled) -> None:
        seen.append(sampled.sampled_prob)
        sampled.sampled_token = 9

    wanted = request(raw=True, settings=GREEDY, hooks=(always_nine,))
    events = [*Generator(model, tokens=1024).stream(wanted)]

    assert seen == [1.0] * 12
    assert set(joined(events, "ids")) == {9}
    check_own(model, events)


def test_the_stop_token_has_its_own_probability_too(model: LoadedModel) -> None:
    free = joined([*Generator(model, tokens=1024).stream(request(settings=HOT))], "ids")
    wanted = request(settings=HOT, stops=(free[3],), raw=True)

    last = [*Generator(model, tokens=1024).stream(wanted)][-1]

    assert last.held is not None
    assert last.held.ids == free[3:4]
    assert 0 < last.held.probabilities[0] < 1
    assert len(last.held.top_ids[0]) == 5


@pytest.mark.parametrize(
    ("more", "calls"),
    [
        ({"raw": True}, 12),
        ({"raw": True, "probabilities": False, "top_tokens": 0}, 0),
        ({"raw": False}, 0),
    ],
)
def test_only_steps_that_want_it_compute_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], calls: int
) -> None:
    own: Callable[..., Any] = DeviceSlots.own
    counted = list[int]()
    monkeypatch.setattr(DeviceSlots, "own", lambda *given: counted.append(1) or own(*given))

    [*Generator(model, tokens=1024).stream(request(**more))]

    assert len(counted) == calls


def test_ties_go_to_the_lowest_id_and_ids_without_logits_have_none() -> None:
    logits = torch.zeros(70, VOCAB_SIZE + 20)
    ids = torch.arange(70) + VOCAB_SIZE

    found = own_probabilities(logits, ids, top=3, vocab_size=VOCAB_SIZE)

    expected = -math.log(VOCAB_SIZE + 20)
    assert found.top_ids.tolist() == [[0, 1, 2]] * 70
    torch.testing.assert_close(found.top_logs, torch.full((70, 3), expected).double())
    assert found.logs[:20].tolist() == pytest.approx([expected] * 20)
    assert found.logs[20:].tolist() == [-math.inf] * 50
