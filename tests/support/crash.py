"""Conversions in processes of their own that can be killed, starved of disk and looked into."""

import atexit
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tiny import make_tiny
from traces import contents, identity

WARM = Path(__file__).with_name("warm.py")
PIPE_BYTES = 1 << 20  # more than a conversion prints, so that nobody has to read along
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.002
LAYERS = 3
STAGES = ("tokenize", "sensitivity", "measure", "allocate", "quantize", "compile", "validate")
LONG_STAGES = ("sensitivity", "measure", "quantize")
MANIFEST = "manifest.json"
RECORDS = ("exl2flow.json", "exl2flow-score.json")  # of the output


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a process is up against.

    file_limit: bytes that a file may have; flush_seconds: what a flush to disk takes in addition;
    states_seconds: how often hidden states are saved, instead of the default; hub_waits: seconds
    before further attempts at a request that the Hub did not answer.
    """

    file_limit: int | None = None
    flush_seconds: float = 0.0
    states_seconds: float | None = None
    hub_waits: tuple[float, ...] | None = None


NORMAL = Conditions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """code: exit code, negative for the signal that ended it."""

    code: int
    out: str
    err: str


class Run:
    """A process of the program."""

    def __init__(self, pid: int, stdout: int, stderr: int, ask: Callable[[object], int]) -> None:
        self.pid = pid
        self._ask = ask
        self._streams = {stdout: b"", stderr: b""}

    def printed(self) -> str:
        """Return what has come on stdout and stderr so far."""
        for stream in self._streams:
            try:
                while piece := os.read(stream, PIPE_BYTES):
                    self._streams[stream] += piece
            except BlockingIOError:
                continue
        return b"".join(self._streams.values()).decode()

    def send(self, signum: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, signum)

    def wait(self) -> Ended:
        """Wait for the end of the process."""
        code = self._ask({"wait": self.pid})
        self.printed()
        for stream in self._streams:
            os.close(stream)
        out, err = (text.decode() for text in self._streams.values())
        return Ended(code=code, out=out, err=err)

    def until(self, happened: Callable[[], object]) -> None:
        """Wait until something holds while the process runs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "ZX" and not happened():
                raise AssertionError(f"the process ended before:\n{self.printed()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing in {PATIENCE_SECONDS} s:\n{self.printed()}")
            time.sleep(POLL_SECONDS)


class Program:
    """Starts processes of the program."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(WARM), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def close(self) -> None:
        """End the warm interpreter."""
        self._channel.close()
        self._process.wait()

    def start(self, arguments: Sequence[str], conditions: Conditions = NORMAL) -> Run:
        """Start `exl2flow` with these arguments."""
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        for stream in (out, err):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            os.set_blocking(stream, False)
        pid = self._ask({"start": list(arguments), **asdict(conditions)}, to_out, to_err)
        os.close(to_out)
        os.close(to_err)
        return Run(pid, out, err, self._ask)

    def _ask(self, request: object, *descriptors: int) -> int:
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            return int(json.loads(self._channel.recv(PIPE_BYTES)))
        except OSError as error:
            program.cache_clear()
            code = self._process.wait()
            raise AssertionError(f"the warm interpreter has ended with {code}") from error


@cache
def program() -> Program:
    """Return the warm program of this test session."""
    started = Program()
    atexit.register(started.close)
    return started


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One conversion command and the folders it works in."""

    source: Path
    out: Path
    work_root: Path
    options: tuple[str, ...] = ()

    @classmethod
    def inside(cls, folder: Path, source: Path, *options: str) -> "Conversion":
        """Return a conversion whose output and work directory lie in `folder`."""
        return cls(source=source, out=folder / "out", work_root=folder / "work", options=options)

    @property
    def arguments(self) -> list[str]:
        """The command line; rows are few and short, so that a sublayer takes some 100 ms."""
        small = "--rows 3 --row-tokens 64 --measure-rows 2 --measure-row-tokens 64"
        small += "" if "--calibration" in self.options else " --calibration standard"
        short = "--validate-rows 1 --validate-row-tokens 64 --sample-tokens 2 --quality fast"
        return [
            "convert",
            str(self.source),
            "--out",
            str(self.out),
            "--no-prefect",
            "--work-root",
            str(self.work_root),
            "--shard-size-mb",
            "1",
            "--head-bits",
            "8",
            *small.split(),
            *short.split(),
            *self.options,
        ]

    def start(self, conditions: Conditions = NORMAL) -> Run:
        """Start the conversion."""
        return program().start(self.arguments, conditions)

    def run(self, conditions: Conditions = NORMAL) -> Ended:
        """Run the conversion to its end, whatever that is."""
        return self.start(conditions).wait()

    def finish(self, conditions: Conditions = NORMAL) -> Ended:
        """Run the conversion to its success."""
        ended = self.run(conditions)
        assert ended.code == 0, ended.err
        return ended

    def stage(self, stage: str) -> Path:
        """Return the folder of a stage that ran with one set of options only."""
        (folder,) = self.work_root.glob(f"*/{stage}/{'?' * 16}")  # none that was set aside
        return folder

    def manifest(self, stage: str) -> dict[str, Any]:
        """Return a stage's manifest; without one, that of a stage that has done nothing."""
        for path in self.work_root.glob(f"*/{stage}/{'?' * 16}/{MANIFEST}"):
            manifest: dict[str, Any] = json.loads(path.read_bytes())
            return manifest
        return {"status": "absent", "cursor": 0, "files": {}}

    def finish_stage(self, stage: str) -> None:
        """Resume until a stage is complete, and leave the others as they are."""
        self.kill_when(lambda: self.manifest(stage)["status"] == "complete", NORMAL)

    def kill(self, stage: str, *, cursor: int, conditions: Conditions, delay: float = 0.0) -> None:
        """Start or resume, and SIGKILL as soon as a stage has `cursor` results, or a bit later."""
        self.kill_when(lambda: self.manifest(stage)["cursor"] >= cursor, conditions, delay)

    def kill_when(
        self, happened: Callable[[], bool], conditions: Conditions, delay: float = 0.0
    ) -> None:
        """Start or resume, and SIGKILL as soon as something holds, or a bit later."""
        run = self.start(conditions)
        run.until(happened)
        time.sleep(delay)
        run.send(signal.SIGKILL)
        assert run.wait().code == -signal.SIGKILL
        assert members(session=run.pid) == []

    def after(self, stage: str | None, folder: Path) -> "Conversion":
        """Return the same conversion inside `folder`, with the results up to a stage copied."""
        copy = Conversion.inside(folder, self.source, *self.options)
        for done in STAGES[: STAGES.index(stage) + 1] if stage else ():
            place = self.stage(done).relative_to(self.work_root)
            shutil.copytree(self.work_root / place, copy.work_root / place)
        return copy

    def finished(self, stage: str) -> dict[str, tuple[int, int]]:
        """Return the identity of each sublayer or shard that a long stage has committed."""
        folder = self.stage(stage)
        return {
            name: identity(folder / name)
            for name in self.manifest(stage)["files"]
            if ("sublayers/" in name or name.endswith(".safetensors"))
            and not name.startswith("inputs/")  # states that are dropped in the end
        }

    def made_by(self, stage: str) -> dict[str, str]:
        """Return the digests of a stage's files, but its manifest."""
        return {n: d for n, d in contents(self.stage(stage)).items() if n != MANIFEST}

    def results(self) -> dict[str, object]:
        """Return all that must not depend on how a finished conversion came about.

        Digests of files, by stage; the output's records without the fingerprint, which covers the
        output's path.
        """
        stages = {name: self.made_by(name) for name in LONG_STAGES}
        out: dict[str, object] = {**contents(self.out)}
        for name in RECORDS:
            out[name] = {**json.loads((self.out / name).read_bytes()), "fingerprint": None}
        return {**stages, "out": out}


def assert_refused(ended: Ended, *words: str) -> None:
    """Ask for an error that says these words, without a traceback, and exit code 1."""
    assert ended.code == 1
    assert "error: " in [line[:7] for line in ended.err.splitlines()]
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signum - 1) & 1)


def members(*, session: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def small_model(folder: Path, family: str = "llama", **overrides: object) -> Path:
    """Write the random model that these tests convert: deep, narrow, with a large vocabulary.

    Embedding and head then fill three shards of 1 MiB and the layers one.
    """
    shape = {
        "num_hidden_layers": LAYERS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 16384,
    }
    return make_tiny(family, folder, **{**shape, **overrides})
