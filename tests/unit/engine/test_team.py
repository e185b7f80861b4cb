"""Processes that follow this one give the text of one process, and end with it or end it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packed_models import make_packed
from torch import distributed

from exl2flow.core.errors import BackendUnavailable, ConfigError, Exl2FlowError, InferenceError
from exl2flow.engine.generate.event import PromptScores
from exl2flow.engine.loading.team import places
from exl2flow.inference import (
    Event,
    Generator,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
    load_model,
)

TEXT = "The quick brown fox jumps over the lazy dog. " * 9
GREEDY = SamplingSettings.greedy()
SOON = 10  # seconds in which the loss of a rank ends all
LEADER = """
import sys, time
from exl2flow.inference import load_model
model = load_model(sys.argv[1], device="cpu", tensor_parallel=2)
print(model.team.followers[0], flush=True)
time.sleep(600)
"""


def text(model: LoadedModel, **options: object) -> list[int]:
    request = Request(TEXT, max_new_tokens=12, settings=GREEDY, stops=())
    events = Generator(model, slots=2, tokens=1024, **options).stream(request)
    return [token for event in events for token in event.ids]


def scores_of(events: Iterator[Event]) -> list[PromptScores]:
    return [event.scores for event in events if event.scores is not None]


def is_running(pid: int) -> bool:
    """Return whether a process runs: one that ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    end = time.monotonic() + SOON
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("team") / "model"
    return make_packed("llama", place).source_dir


@pytest.fixture(scope="module")
def alone(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu", max_tokens=1024)


@pytest.fixture(scope="module")
def led(folder: Path) -> Iterator[LoadedModel]:
    """A model with a follower, which the last test that uses it loses."""
    model = load_model(folder, device="cpu", max_tokens=1024, tensor_parallel=2)
    assert model.team is not None
    yield model
    model.team.close()


def test_what_a_team_says_is_what_one_process_says(alone: LoadedModel, led: LoadedModel) -> None:
    assert led.spec.attending[0].num_heads == alone.spec.attending[0].num_heads // 2
    assert text(led) == text(alone)
    assert text(led, draft=NgramDraft(tokens=3)) == text(alone)
    assert text(led, cache="q8") == text(alone, cache="q8")
    both = [Generator(model, slots=4, tokens=2048) for model in (alone, led)]
    prompts = [TEXT[:90], TEXT, TEXT[9:]]  # a shared page is copied
    texts = [one.generate(prompts, max_new_tokens=30, settings=GREEDY) for one in both]
    assert texts[0] == texts[1]
    request = Request(TEXT, max_new_tokens=0, scores=1)
    logs = [scores.logs[1:] for one in both for scores in scores_of(one.stream(request))]
    assert torch.allclose(*map(torch.tensor, logs), atol=1e-3)
    states = [one.states.hidden([5, 6, 7], last=2) for one in both]
    assert torch.allclose(states[0][0], states[1][0], atol=1e-4)
    logits = [one.states.logits(x[0][None]) for one, x in zip(both, states, strict=True)]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    with pytest.raises(ConfigError, match="whole model"):
        led.decoder.forward(torch.tensor([[5, 6, 7]]))


def test_a_rank_that_falls_silent_ends_all(
    led: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exl2flow.core.runtime.team.SILENCE", 3.0)
    assert led.team is not None
    [pid] = led.team.followers
    generator = Generator(led, slots=2, tokens=1024)
    stream = generator.stream(Request(TEXT, max_new_tokens=500, settings=GREEDY, stops=()))
    next(event for event in stream if event.ids)
    began = time.monotonic()

    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(InferenceError, match="rank 1 of 2 has been silent"):
        for _ in stream:
            pass
    assert time.monotonic() - began < SOON
    assert ends(pid)
    with pytest.raises(InferenceError, match="the generator has failed: rank 1"):
        generator.submit(Request(TEXT))
    with pytest.raises(InferenceError, match="load the model again"):
        Generator(led)


def test_a_rank_lost_while_loading_ends_all_and_so_does_the_end_of_a_model(folder: Path) -> None:
    def kill(done: int, _: int) -> None:
        if done == 1:
            children = Path("/proc/self/task").glob("*/children")
            pids = [int(pid) for path in children for pid in path.read_text().split()]
            for pid in pids:
                if b"generate.follow" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)

    with pytest.raises(InferenceError, match="rank 1 of 2 ended"):
        load_model(folder, device="cpu", tensor_parallel=2, progress=kill)

    again = load_model(folder, device="cpu", tensor_parallel=2)  # nothing of it is left
    assert again.team is not None
    [pid] = again.team.followers
    del again  # as nothing refers to the team, it ends
    assert ends(pid)


def test_followers_end_with_the_process_that_leads_them(folder: Path) -> None:
    command = [sys.executable, "-c", LEADER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # it cannot see that its pipe is closed

        leader.kill()

        assert ends(pid)


def test_one_rank_and_ranks_that_cannot_share_start_no_process(folder: Path) -> None:
    assert load_model(folder, device="cpu", tensor_parallel=1).team is None
    with pytest.raises(Exl2FlowError, match="3 ranks cannot share"):
        load_model(folder, device="cpu", tensor_parallel=3)


@pytest.mark.parametrize("given", ["all", 0, [0, 1]])
def test_places_on_cpus_are_a_number(given: object) -> None:
    with pytest.raises(ConfigError, match="on CPUs"):
        places(given, "cpu")


def test_places_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl2flow.engine.loading.team.resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)

    with pytest.raises(BackendUnavailable, match="no NCCL"):
        places("all", "cuda")
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    assert [one.index for one in places("all", "cuda")] == [0, 1, 2]
    assert [one.index for one in places(2, "cuda")] == [0, 1]
    assert [one.index for one in places((2, 0), "cuda")] == [2, 0]
    for given, message in (((1, 1), "twice"), (4, "needs GPU 3"), ("few", "'few'"), (0, "is 0")):
        with pytest.raises(ConfigError, match=message):
            places(given, "cuda")
