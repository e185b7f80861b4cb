"""A model on two GPUs whose second process this one leads: near one GPU, and none stays behind."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from conversions import small_config
from stage_runs import run_until
from tiny import make_tiny

from exl2flow.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl2flow.compat.exllamav2.generator import ExLlamaV2DynamicGenerator
from exl2flow.core.errors import InferenceError
from exl2flow.inference import (
    Draft,
    Generator,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.inference.bench import bench

pytestmark = pytest.mark.multigpu

TEXT = "The quick brown fox jumps over the lazy dog. Numbers such as 3.14 and 42 " * 9
GREEDY, HOT = SamplingSettings.greedy(), SamplingSettings(temperature=1.2, top_k=0, top_p=1.0)
GUIDED = SamplingSettings(temperature=1.2, top_k=0, top_p=1.0, cfg_scale=1.5)
NEAR = 2e-3  # relative error: hidden states are fp16
STEPS = 100
OF_RANK, TOKENS = 256 << 20, 1 << 22  # bytes of its GPU; tokens that need more
SOON = 10  # seconds in which the loss of a rank ends all


@pytest.fixture(scope="module", params=["llama", "qwen2-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("team")
    if request.param == "llama":
        source = make_tiny("llama", made / "source", head_dim=64)
    else:
        source = make_checkpoint(request.param, made / "source")
    run_until(small_config(source, made / "out", bpw=4.0, work_root=made / "work"), "compile")
    return made / "out"


@pytest.fixture
def led(folder: Path) -> Iterator[LoadedModel]:
    model = load_model(folder, tensor_parallel="all", max_tokens=2048)
    assert model.team is not None
    yield model
    model.team.close()


def steps(model: LoadedModel) -> tuple[list[int], torch.Tensor, list[list[int]]]:
    """Return ids and logits of a text, and the ids of three at once, one of them a guided pair."""
    generator = Generator(model, slots=4, tokens=8192, chunk=256)
    request = Request(TEXT, max_new_tokens=STEPS, settings=GREEDY, stops=(), logits=True)
    events = [*generator.stream(request)]
    ids = [token for event in events for token in event.ids]
    logits = torch.stack([x for event in events for x in event.logits if x is not None])
    several = [
        Request(TEXT, max_new_tokens=40, settings=GREEDY, stops=()),
        Request(TEXT + "more", max_new_tokens=40, settings=HOT, seed=2, stops=()),
        Request((TEXT, "and"), max_new_tokens=40, settings=GUIDED, seed=3, stops=()),
    ]
    texts: list[list[int]] = [[] for _ in several]
    for found, one in zip(texts, several, strict=True):
        generator.submit(one, deliver=lambda event, found=found: found.extend(event.ids))
    while not generator.is_idle:
        generator.step()
    return ids, logits.cpu(), texts


def test_logits_are_near_those_of_one_gpu_and_the_same_again(
    folder: Path, led: LoadedModel
) -> None:
    ids, logits, texts = steps(led)

    alone = load_model(folder, device="cuda:0", max_tokens=2048)
    expected_ids, expected, _ = steps(alone)
    pairs = zip(ids, expected_ids, strict=True)
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), STEPS - 1) + 1
    assert len(logits) == STEPS
    errors = ((logits - expected).norm(dim=1) / expected.norm(dim=1))[:alike]
    error = errors.median() if alone.spec.has_experts else errors.max()  # near-tied experts differ
    assert error <= NEAR
    again = steps(led)
    assert again[0] == ids
    assert torch.equal(again[1], logits)
    assert again[2] == texts
    with_drafts = Generator(led, slots=2, tokens=4096, draft=NgramDraft(tokens=3))
    assert with_drafts.generate(TEXT, max_new_tokens=40, settings=GREEDY)
    drafted = Generator(led, slots=2, tokens=4096, draft=Draft(model=alone, tokens=3), cache="q6")
    assert drafted.generate(TEXT, max_new_tokens=40, settings=GREEDY)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_all(led: LoadedModel, how: signal.Signals) -> None:
    assert led.team is not None
    [pid] = led.team.followers
    generator = Generator(led, slots=2, tokens=4096)
    stream = generator.stream(Request(TEXT, max_new_tokens=1000, settings=GREEDY, stops=()))
    next(event for event in stream if event.ids)
    began = time.monotonic()

    os.kill(pid, how)

    with pytest.raises(InferenceError, match=r"rank 1 of 2|another one of 2"):
        for _ in stream:
            pass
    assert time.monotonic() - began < SOON
    assert not Path(f"/proc/{pid}").exists()


def test_memory_that_ends_on_another_rank_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, most = torch.cuda.mem_get_info("cuda:1")
    torch.zeros(1, device="cuda:0")  # this process has read its own limits
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"per_process_memory_fraction:{OF_RANK / most}")
    led = load_model(folder, tensor_parallel="all", max_tokens=2048)
    assert led.team is not None

    with pytest.raises(InferenceError, match="memory"):
        Generator(led, slots=16, tokens=TOKENS)

    assert Generator(led, slots=2, tokens=2048).generate("A", max_new_tokens=2, settings=GREEDY)
    led.team.close()


def test_a_program_of_exllamav2_loads_in_tensor_parallel(folder: Path) -> None:
    config = ExLlamaV2Config(str(folder))
    model = ExLlamaV2(config)
    model.load_tp(progress=False)
    cache = ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache, max_seq_len=1024)
    tokenizer = ExLlamaV2Tokenizer(config)
    generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)

    text = generator.generate(prompt="Once upon a time", max_new_tokens=16, add_bos=False)

    assert text.startswith("Once upon a time")
    assert model.native.team is not None
    logits = model.forward(torch.tensor([[5, 6, 7]]))
    assert logits.shape[:2] == (1, 3)
    pids = model.native.team.followers
    model.unload()
    del generator, cache
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_bench_times_two_gpus(folder: Path) -> None:
    speed = bench(folder, tensor_parallel=2, context=64, rows=(1, 4))

    assert speed.device.count("NVIDIA") == 2
    assert {timing.work for timing in speed.timings} == {"prompt", "decode"}
