"""A launch that the driver refuses is replaced by others with the same results; nothing raises."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_products import DEVICE, TOLERANCE, chain, inputs
from expert_banks import bank
from expert_layers import LAYERS
from sampled import PLAIN, slots_of

from exl2flow.engine.sampling import Kind
from exl2flow.kernels import get_ops
from exl2flow.kernels.cuda import compiler
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda import sampler as cuda_sampler
from exl2flow.kernels.cuda.compiler import TEAM, LaunchRefused, limits
from exl2flow.kernels.cuda.graphs import CudaGraph
from exl2flow.kernels.reference.ops import TORCH_OPS

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
TOO_LARGE = 720  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
UNDER_MPS = (
    "tests/gpu/test_packed.py::test_a_chain_is_what_its_products_are",
    "tests/gpu/test_chains.py::test_steps_are_those_of_the_cpu[llama]",
    "tests/gpu/test_step.py::test_a_replay_is_a_step[llama-fp16-4]",
    "tests/gpu/test_step.py::test_a_replay_is_a_step[llama-fp16-16]",
)


class Driver:
    """The driver of a device on which `room` CTAs that wait for each other are resident."""

    def __init__(self, room: int) -> None:
        self.room, self.refused = room, 0
        self._driver = compiler._driver()

    def cuLaunchKernelEx(self, call: Any, *given: Any) -> int:  # the driver's name
        how = call._obj
        is_together = how.count and how.attributes == compiler._TOGETHER_AT
        if is_together and how.x * how.y * how.z > self.room:
            self.refused += 1
            return TOO_LARGE
        status: int = self._driver.cuLaunchKernelEx(call, *given)
        return status


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Driver]:
    """Give the device room for so many CTAs that wait for each other, from the call on."""
    monkeypatch.setattr(cuda_sampler, "_MOST_TEAMS", {})
    compiler.tell_refusal.cache_clear()

    def limit(room: int) -> Driver:
        driver = Driver(room)
        monkeypatch.setattr(compiler, "_driver", lambda: driver)
        return driver

    return limit


def half() -> int:
    """Return half of the multiprocessors, as MPS leaves with 50 % of the threads."""
    return limits(torch.cuda.current_device())[0] // 2


def check_notes(caplog: pytest.LogCaptureFixture) -> None:
    """Check that there are notes, and none twice."""
    notes = [text for text in caplog.messages if "refused=" in text]
    assert notes
    assert len({*notes}) == len(notes)
    assert all("too few free multiprocessors" in note for note in notes)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 17, 32])
@pytest.mark.parametrize("is_shared", [False, True])
def test_refused_products_run_otherwise(
    is_shared: bool, rows: int, limited: Callable[[int], Driver], caplog: pytest.LogCaptureFixture
) -> None:
    products, (x, hidden) = chain(), inputs(rows)
    expected, grown = TORCH_OPS.multiply(x, products, hidden)
    driver = limited(half() if is_shared else 0)

    found, after = get_ops(DEVICE).multiply(x, products, hidden)

    count = driver.refused
    again, after_again = get_ops(DEVICE).multiply(x, products, hidden)
    assert driver.refused == count > 0
    for y, same, z in zip([*found, after], [*again, after_again], [*expected, grown], strict=True):
        assert (y.double() - z.double()).norm() <= TOLERANCE * z.double().norm()
        assert torch.equal(y, same)
    check_notes(caplog)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_products_that_no_launch_fits_are_multiplied_decoded(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **how: Any) -> None:
        raise LaunchRefused("any", reason="too little memory")

    products, (x, hidden) = chain(), inputs(rows)
    expected, grown = TORCH_OPS.multiply(x, products, hidden)
    monkeypatch.setattr(cuda_products, "launch", refuse)

    found, after = get_ops(DEVICE).multiply(x, products, hidden)

    for y, z in zip([*found, after], [*expected, grown], strict=True):
        assert (y.double() - z.double()).norm() <= TOLERANCE * z.double().norm()


@pytest.mark.parametrize("rows", [1, 8])
def test_a_recording_holds_what_runs_instead(rows: int, limited: Callable[[int], Driver]) -> None:
    products, (x, hidden) = chain(), inputs(rows)
    driver = limited(0)

    recording = CudaGraph(lambda: get_ops(DEVICE).multiply(x, products, hidden))

    assert driver.refused == (1 if rows == 1 else 1 + len(products))  # of the warm-up
    found, after = recording.replay()
    launched, after_launched = get_ops(DEVICE).multiply(x, products, hidden)
    for y, z in zip([*found, after], [*launched, after_launched], strict=True):
        assert torch.equal(y, z)


@torch.inference_mode()
def test_refused_experts_run_with_fewer_ctas(
    limited: Callable[[int], Driver], caplog: pytest.LogCaptureFixture
) -> None:
    rule, options = LAYERS["mixtral"]
    layer, hidden = bank(rule, **options, device=DEVICE), torch.randn(4, options["size"]).half()
    hidden = hidden.to(DEVICE)
    expected = TORCH_OPS.experts(hidden, layer)
    driver = limited(half())

    found = get_ops(DEVICE).experts(hidden, layer)

    count = driver.refused
    assert torch.equal(get_ops(DEVICE).experts(hidden, layer), found)
    assert driver.refused == count > 0
    assert (found.float() - expected.float()).norm() <= TOLERANCE * expected.float().norm()
    check_notes(caplog)


@pytest.mark.parametrize("room", ["none", "a team", "half"])
@torch.inference_mode()
def test_a_sampler_with_few_teams_or_none_draws_the_same(
    room: str, limited: Callable[[int], Driver], caplog: pytest.LogCaptureFixture
) -> None:
    rows, vocab = 16, 20_011
    settings = [PLAIN] * rows
    kind = Kind.of(settings, top=8, probabilities=True)
    logits = torch.randn(rows, vocab, device=DEVICE) * 3
    draws = torch.rand(2, rows, dtype=torch.float64, device=DEVICE)
    all_teams, few_teams = (slots_of(settings, vocab, device=DEVICE) for _ in range(2))
    expected = [
        get_ops(DEVICE).sample(logits, all_teams.state(rows, kind), draw, kind) for draw in draws
    ]
    driver = limited({"none": 0, "a team": TEAM, "half": half()}[room])

    found = [
        get_ops(DEVICE).sample(logits, few_teams.state(rows, kind), draw, kind) for draw in draws
    ]

    assert driver.refused > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        torch.testing.assert_close(mine.probabilities, theirs.probabilities, rtol=1e-6, atol=0)
    for mine, theirs in zip(few_teams.tensors(), all_teams.tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    check_notes(caplog)


@pytest.mark.skipif(
    not os.environ.get("EXL2FLOW_TEST_CARD"), reason="takes half a minute: `make test-cards CARD=`"
)
def test_half_of_the_threads_under_mps_suffice() -> None:
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("no nvidia-cuda-mps-control")

    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # the path of a socket is short
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = {**os.environ, **places, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}

        def run(*command: str, wait: float = 60, **options: Any) -> Any:
            return subprocess.run(
                command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=wait, **options
            )

        started = run(control, "-d")
        if started.returncode:
            pytest.skip(f"MPS cannot be started: {started.stdout}{started.stderr}")
        try:
            try:
                client = run(sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')")
                servers = run(control, input="get_server_list\n").stdout
            except subprocess.TimeoutExpired as error:
                pytest.skip(f"MPS does not answer: {error}")
            if client.returncode or not servers.strip():
                pytest.skip(f"MPS serves no client: {client.stderr[-500:]}")
            done = run(sys.executable, "-m", "pytest", "-q", *UNDER_MPS, wait=300)
        finally:
            run(control, input="quit -t 10\n")

    assert done.returncode == 0, done.stdout[-3000:]
