"""`exl2flow doctor` finds the GPU that the tests run on."""

import pytest

from exl2flow.cli.work.findings import gpu_failure
from exl2flow.cli.work.gpus import probe_gpus

pytestmark = pytest.mark.gpu


def test_a_gpu_is_found_runs_a_kernel_and_is_timed() -> None:
    gpus = probe_gpus()

    assert gpus.cupy.runs
    assert all(card.copy_rate and card.problem is None for card in gpus.cards)
    assert gpu_failure(gpus) is None
