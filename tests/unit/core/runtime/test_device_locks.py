"""Device slots: who holds one, who waits, and what is left by those that die."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpus import stand_in

from exl2flow.core.errors import Interrupted, WriteFailed
from exl2flow.core.runtime import device_locks as module
from exl2flow.core.runtime import interrupt
from exl2flow.core.runtime.device_locks import DeviceLocks, see_only, turn, visible_gpus
from exl2flow.core.runtime.interrupt import listening

HOLD = """
import sys
from pathlib import Path
from exl2flow.core.runtime.device_locks import DeviceLocks

def pause():
    sys.exit("none is free")

with DeviceLocks(Path(sys.argv[1])).hold(sys.argv[2:], pause) as device:
    print(device, flush=True)
    sys.stdin.read()
"""


class NoneFree(Exception):
    pass


def give_up() -> None:
    raise NoneFree


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceLocks:
    """Slots for a process that has held none yet."""
    monkeypatch.setattr(module, "_devices", {})
    return DeviceLocks(tmp_path / "slots" / "cuda")


@contextmanager
def holder(slots: DeviceLocks, *devices: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds a slot until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(slots.folder), *devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_hold_different_devices_until_they_are_killed(slots: DeviceLocks) -> None:
    with holder(slots, "3", "5") as first, holder(slots, "3", "5") as second:
        assert {said(first), said(second)} == {"3", "5"}
        assert slots.owners() == {first.pid, second.pid}
        with holder(slots, "3", "5") as refused:
            assert "none is free" in refused.communicate()[1]
        second.kill()
        second.wait()
        with holder(slots, "3", "5") as third:
            assert said(third) in {"3", "5"}
            assert slots.owners() == {first.pid, third.pid}


def test_who_holds_a_slot_is_known_at_once_and_not_its_holder_before(slots: DeviceLocks) -> None:
    slots.folder.mkdir(parents=True)
    (slots.folder / "0").write_text("99999999")  # of one that was killed

    with slots.hold(["0"], give_up):
        assert slots.owners() == {os.getpid()}

    assert (slots.folder / "0").read_text() == ""


def test_gpus_are_those_that_cuda_is_told_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("cuda") == ["0", "1"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1, 3")
    assert visible_gpus("cuda") == ["GPU-1", "3"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert visible_gpus("cuda") == []

    see_only("3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert visible_gpus("cpu") == []


def test_a_gpu_named_by_its_index_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,3")
    assert visible_gpus("cuda:1") == ["3"]

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    see_only("3")
    assert visible_gpus("cuda:1") == ["3"]


def test_a_gpu_named_by_its_index_is_current_while_a_stage_runs() -> None:
    with stand_in() as gpus:
        with turn("cuda:1"):
            assert gpus.current_stream().device.index == 1
        with turn("cuda"):
            assert gpus.current_stream().device.index == 0


def test_waiting_process_continues_when_the_device_is_free(slots: DeviceLocks) -> None:
    with holder(slots, "0") as other:
        said(other)

        def end_other() -> None:
            other.kill()
            other.wait()

        with slots.hold(["0"], end_other) as device:
            assert device == "0"

    assert slots.owners() == set()


def test_process_stays_with_its_first_device(slots: DeviceLocks) -> None:
    with slots.hold(["1", "0"], give_up):
        pass
    with slots.hold(["0", "1"], give_up) as device:
        assert device == "1"
        with pytest.raises(NoneFree), slots.hold(["0", "1"], give_up):
            pass  # neither the other one, nor its own a second time


def test_threads_of_a_process_hold_its_device_in_turn(slots: DeviceLocks) -> None:
    inside, together = 0, []
    look = threading.Lock()

    def work() -> None:
        nonlocal inside
        for _ in range(50):
            with slots.hold(["0", "1"], lambda: None):
                with look:
                    inside += 1
                    together.append(inside)
                with look:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(together) == {1}


def test_file_that_was_tidied_away_is_made_again(slots: DeviceLocks) -> None:
    with slots.hold(["0"], give_up):
        (slots.folder / "0").unlink()

    with slots.hold(["0"], give_up):
        assert (slots.folder / "0").is_file()


def test_names_of_parts_of_a_gpu_are_files(slots: DeviceLocks) -> None:
    name = "MIG-GPU-8e41/1/0"

    with slots.hold([name], give_up) as device:
        assert device == name
        assert [path.name for path in slots.folder.iterdir()] == ["MIG-GPU-8e41%2F1%2F0"]


def test_slots_of_a_host_are_for_their_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    slots = DeviceLocks.of_host("cpu")

    with slots.hold(["0"], give_up):
        mode = stat.S_IMODE(slots.folder.parent.stat().st_mode)

    assert slots.folder.is_relative_to(tmp_path)
    assert mode == 0o700


def test_folder_of_another_user_is_refused(slots: DeviceLocks, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    slots.folder.parent.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(WriteFailed, match="is not a folder of this user"):
        slots.hold(["0"], give_up).__enter__()

    assert list((tmp_path / "elsewhere").iterdir()) == []


def run_in_two_threads(device: str) -> list[str]:
    """Return what two threads do in a turn each, the second of which begins inside the first."""
    done: list[str] = []
    first_has_begun, second_has_begun = threading.Event(), threading.Event()

    def second() -> None:
        first_has_begun.wait(10)
        with turn(device):
            done.append("second begins")
            second_has_begun.set()

    thread = threading.Thread(target=second)
    thread.start()
    with turn(device):
        done.append("first begins")
        first_has_begun.set()
        second_has_begun.wait(0.2 if device == "cuda" else 10)
        done.append("first ends")
    thread.join(10)
    return done


def test_threads_of_a_process_have_the_gpu_in_turn_and_the_cpu_together() -> None:
    assert run_in_two_threads("cuda") == ["first begins", "first ends", "second begins"]
    assert run_in_two_threads("cpu") == ["first begins", "second begins", "first ends"]


def test_a_signal_ends_the_wait_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.0)

    def wait() -> None:
        with turn("cuda"):
            raise AssertionError

    with listening(), ThreadPoolExecutor(1) as pool, turn("cuda"):
        waiting = pool.submit(wait)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            waiting.result(10)
