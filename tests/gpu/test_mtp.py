"""Drafts of a model's own block on a GPU, quantized there: texts are those without it."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from conversions import small_config
from gpu_texts import NEAR_TIE, assert_alike, run
from safetensors.torch import save_file
from texts import ids_of

from exl2flow.engine.drafts import draft_head
from exl2flow.engine.drafts.costs import StepCosts
from exl2flow.engine.drafts.draft_head import DraftHead
from exl2flow.inference import (
    HybridDraft,
    LoadedModel,
    Mtp,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.model import resolve
from exl2flow.model.config.mtp import mtp_of
from exl2flow.model.layers.experts import ExpertsSublayer
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import STAGES

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHARP = 30  # times as large weights of routers
GREEDY = SamplingSettings.greedy()
DRAFTS = [Mtp(), Mtp(tokens=7), HybridDraft(other=Mtp(tokens=3))]


def add_block(source: Path) -> None:
    """Write a random block beside a model's weights."""
    block = mtp_of(resolve(source))
    assert block is not None
    torch.manual_seed(7)
    tensors = {
        name: torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else 0.1 * torch.randn(shape)
        for name, shape in block.tensors.items()
    }
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(halves, source / "block.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["qwen3.5-text", "qwen3.5-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    source = make_checkpoint(request.param, tmp_path_factory.mktemp("mtp") / "model")
    add_block(source)
    config = small_config(source, source.parent / "out", device=DEVICE, bpw=6)
    run_locally(config, stages=[stage for stage in STAGES if stage.name != "validate"])
    model = load_model(config.out, device=DEVICE, max_tokens=512)
    for sublayer in model.decoder.sublayers:
        if isinstance(
            sublayer, ExpertsSublayer
        ):  # random routers nearly choose others all the time
            sublayer.router.weight.mul_(SHARP)
    return model


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "best", lambda _self, _slots, _kind, _rate, most: most)
    monkeypatch.setattr(StepCosts, "shared", lambda _self, _slots, _kind, t: max(n for _, n in t))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_greedy_texts_are_those_without_the_block(
    model: LoadedModel, draft: Mtp | HybridDraft, slots: int
) -> None:
    requests = [
        Request([9, 5, 7 + i], settings=GREEDY, stops=(), max_new_tokens=100, logits=True)
        for i in range(slots)
    ]
    alone = run(model, None, requests, slots=slots)

    found = run(model, draft, requests, slots=slots)

    assert sum(events[-1].statistics.drafts["mtp"][0] for events in found) > 50
    assert_alike(model, requests, found, alone)


def test_recorded_steps_draft_what_launched_ones_do(model: LoadedModel) -> None:
    hot = SamplingSettings(temperature=1.5, repetition_penalty=1.1)
    requests = [
        Request([5, 6, 7 + i], settings=s, seed=i, stops=(), max_new_tokens=60 + i)
        for i, s in enumerate([GREEDY, hot, GREEDY, hot, GREEDY])
    ]

    recorded, launched = (run(model, Mtp(), requests, launched=each) for each in (False, True))

    assert [*map(ids_of, recorded)] == [*map(ids_of, launched)]
    for mine, theirs in zip(recorded, launched, strict=True):
        assert mine[-1].statistics.drafts == theirs[-1].statistics.drafts


def test_a_part_of_a_packed_head_finds_what_the_whole_finds_there(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_head, "LIKELIEST", 3)
    monkeypatch.setattr(draft_head, "OWN", 2)
    head, device = model.decoder.head, torch.device(DEVICE)
    ids = torch.cat([torch.arange(128), torch.arange(160, 192)]).to(device)
    with torch.inference_mode():
        states = torch.randn(40, model.spec.hidden_size, device=device).half()
        part = DraftHead(head)
        part.add([100, 170])
        logits, likeliest = head.logits(states)[:, ids], part.likeliest(states)

    greatest = logits.max(dim=-1).values
    chosen = logits.gather(1, (likeliest[:, None] == ids).int().argmax(dim=-1, keepdim=True))[:, 0]
    assert torch.isin(likeliest, ids).all()
    assert ((greatest - chosen) <= NEAR_TIE * greatest.abs()).all()
