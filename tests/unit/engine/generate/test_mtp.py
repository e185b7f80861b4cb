"""Drafts by the model's own block: the same texts, and what the block says of the whole text."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import near, terms_of
from mtp_checkpoints import with_block
from small_pages import small_generator
from texts import ids_of, run
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.drafts import (
    DraftKind,
    DraftRequest,
    HybridDraft,
    Mtp,
    Proposal,
    draft_head,
    hybrid,
)
from exl2flow.engine.drafts.draft_head import DraftHead
from exl2flow.engine.drafts.mtp import MtpProposer
from exl2flow.engine.filters import GrammarFilter
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.drafting import Drafting
from exl2flow.engine.generate.step_job import StepJob
from exl2flow.inference import (
    Generator,
    LoadedModel,
    PromptCache,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.model import DenseLinear
from exl2flow.model.layers.decoder import Head

pytestmark = pytest.mark.usefixtures("eager")
GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0)


@pytest.fixture(scope="module", params=["qwen3.5-text", "glm4-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    source, _, _ = with_block(request.param, tmp_path_factory.mktemp("mtp") / "model")
    return load_model(source, device="cpu", max_tokens=512)


def requests() -> list[Request]:
    options: list[dict[str, object]] = [
        {"settings": GREEDY},
        {"settings": HOT},
        {"settings": GREEDY, "banned_strings": ("a", "e")},
        {"settings": SamplingSettings(cfg_scale=1.5), "prompt": ([5, 6, 7, 8], [6, 7])},
        {"settings": HOT, "max_new_tokens": 2},
        {"settings": GREEDY, "prompt": [9]},
        {"settings": GREEDY, "stops": (*range(200, 240),)},
        {"settings": GREEDY, "filters": (GrammarFilter(regex="[a-z ]{30,60}"),)},
        {"settings": GREEDY, "stops": (*range(5, 40),), "min_new_tokens": 9},
    ]
    return [
        Request(**{"prompt": [5, 6, 7, 8 + i], "max_new_tokens": 40, "seed": i, "stops": ()} | more)  # type: ignore[arg-type]  # options by name
        for i, more in enumerate(options)
    ]


@pytest.mark.parametrize("kind", ["alone", "with-copies", "few-ids"])
def test_texts_are_those_without_a_draft(
    model: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "LONG", 2)
    if kind == "few-ids":
        monkeypatch.setattr(draft_head, "LIKELIEST", 2)
        monkeypatch.setattr(draft_head, "OWN", 1)
    mtp = Mtp(tokens=3)
    draft = HybridDraft(other=mtp) if kind == "with-copies" else mtp

    alone, found = (
        run(Generator(model, tokens=4096, slots=8, draft=one), requests()) for one in (None, draft)
    )

    assert [*map(ids_of, found)] == [*map(ids_of, alone)]
    counts = found[0][-1].statistics
    assert counts is not None
    assert counts.drafts["mtp"][0] > 0


def test_a_step_is_drafted_for_while_the_one_before_is_read(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block runs once for a step, and drafts what it drafts when all tokens are known."""
    chain, counts = MtpProposer._chain, list[int]()

    def counted(proposer: MtpProposer, batch: int, count: int, drafts: int) -> None:
        counts.append(drafts)
        chain(proposer, batch, count, drafts)

    monkeypatch.setattr(MtpProposer, "_chain", counted)
    request = Request([5, 6, 7, 8], settings=GREEDY, stops=(), max_new_tokens=60)
    statistics = []
    for is_late in (False, True):
        monkeypatch.setattr(DeviceSlots, "is_asynchronous", is_late)
        generator = Generator(model, tokens=512, slots=1, draft=Mtp(tokens=3))
        counts.clear()
        [events] = run(generator, [request])
        statistics.append(events[-1].statistics)
        assert len(counts) <= statistics[-1].steps + 2

    assert statistics[0].drafts == statistics[1].drafts
    assert statistics[0].steps == statistics[1].steps


def test_while_a_text_copies_the_block_drafts_nothing_ahead(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step whose draft tokens were copied: the block only follows."""
    ahead, steps = list[int](), list[set[str]]()
    run_ahead, step_jobs = MtpProposer.run_ahead, Drafting.step_jobs

    def counted(proposer: MtpProposer, slots: int, drafts: int) -> None:
        ahead.append(drafts)
        run_ahead(proposer, slots, drafts)

    def seen(drafting: Drafting, *given: Any, **options: Any) -> list[StepJob]:
        found = step_jobs(drafting, *given, **options)
        steps.append({one.kind for one in found if one.draft and one.kind is not None})
        return found

    monkeypatch.setattr(hybrid, "LONG", 2)
    monkeypatch.setattr(MtpProposer, "run_ahead", counted)
    monkeypatch.setattr(Drafting, "step_jobs", seen)
    monkeypatch.setattr(DeviceSlots, "is_asynchronous", True)
    request = Request([5, 6, 7, 8] * 20, settings=GREEDY, stops=(), max_new_tokens=60)

    run(Generator(model, tokens=512, slots=1, draft=HybridDraft(other=Mtp(tokens=3))), [request])

    copied = sum(kinds == {DraftKind.NGRAM} for kinds in steps)
    own = sum(DraftKind.MTP in kinds for kinds in steps)
    assert copied
    assert len(ahead) == own


@pytest.mark.parametrize(
    ("slots", "is_late"),
    [
        (8, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(8, False, marks=pytest.mark.slow),
    ],
)
def test_draft_tokens_that_are_right_are_taken(
    model: LoadedModel, slots: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ids on the device, which the host may not know yet: late as on a GPU, or at once."""
    wanted = [request for request in requests() if slots > 1 or len(request.prompts) == 1]
    expected = [*map(ids_of, run(Generator(model, tokens=4096, slots=8), wanted))]
    texts = [[*one.prompts[0], *ids] for one, ids in zip(wanted, expected, strict=True)]
    chain, chance = MtpProposer._chain, random.Random(0)

    def known(proposer: MtpProposer, batch: int, count: int, drafts: int) -> None:
        chain(proposer, batch, count, drafts)
        shared = proposer._slots
        for slot, length in enumerate(shared.lengths[:batch].tolist()):
            ids = shared.history[slot, : length + 1].tolist()
            text = next((one for one in texts if one[: len(ids)] == ids), ids)
            for place, token in enumerate(text[len(ids) : len(ids) + drafts]):
                if chance.random() < 0.8:
                    proposer.drafted[slot, place] = token

    monkeypatch.setattr(MtpProposer, "_chain", known)
    monkeypatch.setattr(DeviceSlots, "is_asynchronous", property(lambda _: is_late))

    found = run(Generator(model, tokens=4096, slots=slots, draft=Mtp(tokens=4)), wanted)

    assert [*map(ids_of, found)] == expected
    counts = found[0][-1].statistics
    assert counts is not None
    assert counts.tokens_per_step > 2


def test_the_block_reads_what_the_text_says(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft token is the likeliest after a pass over the whole text, without a cache."""
    propose, checked = MtpProposer.propose, list[int]()

    def compared(
        proposer: MtpProposer, wanted: Mapping[int, DraftRequest]
    ) -> Mapping[int, Proposal]:
        found = propose(proposer, wanted)
        block = proposer._block
        for slot, request in wanted.items():
            text = torch.tensor([[*request.ids]])
            states = proposer._normed(model.decoder.hidden(text[:, :-1]))
            ids = text[:, 1:]
            for token in proposer.drafted[slot, : len(found[slot].ids)].tolist():
                made = block.states(ids, states)
                logits = block.head.logits(made[:, -1])[0]
                greatest = logits.max()
                bound = near(logits, terms_of(model.spec, 512))["atol"]
                assert greatest - logits[token] <= 4 * bound
                checked.append(token)
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
                states = torch.cat([states, made[:, -1:]], dim=1)
        return found

    monkeypatch.setattr(MtpProposer, "propose", compared)
    draft = Mtp(tokens=3)

    run(Generator(model, tokens=2048, slots=2, chunk=256, draft=draft), requests()[:3])

    assert len(checked) > 60


def test_a_draft_head_knows_likely_ids_and_those_of_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tiles are those of ids 40 and 120, and up to two of ids that texts have."""
    monkeypatch.setattr(draft_head, "LIKELIEST", 2)
    monkeypatch.setattr(draft_head, "OWN", 2)
    weight, counts = torch.randn(10 * 32 + 5, 16), torch.zeros(300, dtype=torch.int32)
    counts[40:50], counts[120] = 3, 50
    whole = Head(final_norm=lambda x: x, linear=DenseLinear(weight))  # type: ignore[arg-type]  # a norm
    assert DraftHead.is_worth_it(whole)
    head, states = DraftHead(whole, counts), torch.randn(50, 16)

    def likeliest(tiles: list[int]) -> torch.Tensor:
        ids = torch.cat([torch.arange(32 * tile, 32 * tile + 32) for tile in tiles])
        return ids[(states @ weight[ids].T).argmax(dim=-1)]

    assert torch.equal(head.likeliest(states), likeliest([1, 3]))
    head.add([5, 6, 100, 324])  # the last one is of no whole tile
    assert torch.equal(head.likeliest(states), likeliest([0, 1, 3]))
    head.add([64, 319])
    assert torch.equal(head.likeliest(states), likeliest([1, 2, 3, 9]))
    head.add([*range(320)])
    assert torch.equal(head.likeliest(states), likeliest([1, 3, 7, 8]))


def test_models_without_a_block_are_refused(tmp_path: Path) -> None:
    other = load_model(make_tiny("llama", tmp_path / "tiny"), device="cpu", max_tokens=64)

    with pytest.raises(ConfigError, match=r"has no block that drafts tokens \(MTP\)"):
        Generator(other, tokens=512, draft=Mtp())
    with pytest.raises(ConfigError, match="`tokens` of a draft is 16"):
        Mtp(tokens=16)


def test_prompts_have_their_scores_and_come_from_host_memory(model: LoadedModel) -> None:
    """The block's keys and values go with the model's; layers with a state keep no pages there."""
    keep = PromptCache() if model.spec.deltas else PromptCache(ram=10**8)
    prompt = [5 + i % 200 for i in range(300)]
    wanted = [
        Request(prompt, max_new_tokens=20, stops=(), settings=GREEDY, scores=2),
        Request([*range(9, 100)] * 5, max_new_tokens=20, stops=(), settings=GREEDY),
        Request([*prompt, 7], max_new_tokens=20, stops=(), settings=GREEDY),
    ]
    plain = small_generator(model, tokens=512, slots=1)
    drafting = small_generator(model, tokens=512, slots=1, draft=Mtp(), keep=keep)

    for request in wanted:
        [alone], [found] = run(plain, [request]), run(drafting, [request])
        assert ids_of(found) == ids_of(alone)
        scores = [[event.scores for event in events if event.scores] for events in (alone, found)]
        assert scores[0] == scores[1]
    assert found[-1].statistics is not None
    assert model.spec.deltas or found[-1].statistics.hits["ram"] > 0
