"""Damaged files for every reader: `python campaigns/fuzz.py --reader all --inputs 500`.

An input must end in an error of ours or a right result, within 2 s of processor time and 1 GB, must
run no code, and must touch no file outside its folder. Inputs are read in a process of their own,
which a crash ends. Input number n of a seed is always the same, but for times, paths and secrets in
the whole files of a few readers: a failure prints how to repeat it, and `--keep` keeps the bytes.
"""

import argparse
import json
import mmap
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # its own one reserves 1 GB at once
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.dont_write_bytecode = True
sys.path[:1] = [str(HERE), str(ROOT / "tests" / "support")]

import torch  # noqa: E402  # after the environment is set
from readers import READERS  # noqa: E402  # as torch
from state import HELP, State  # noqa: E402  # as torch

from exl2flow.core.errors import Exl2FlowError  # noqa: E402  # as torch

SECONDS = 2.0  # of processor time for an input
TRIAL = 0.1  # of it for what a child does for users; there more, but a bomb takes all
MEMORY = 1 << 30  # bytes of address space for an input, beyond those of the process
BATCH = 50  # inputs of a reader, then it is the turn of another
WAIT = 60.0  # seconds without progress after which a process counts as hung
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None  # no disk waits for each input
CORPUS = ROOT / "tests" / "corpus"
SHARED = struct.Struct("<qqqq?")  # next input, used, refused, ended in a trial; whether in a trial
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "pickle.find_class",
    "subprocess.Popen",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
PROGRAMS = ("/template_program.py", "/tokenizer_program.py")  # that readers start
WRITING = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod")
READABLE = tuple(  # without links: an environment may be one
    os.path.realpath(path)
    for path in (*filter(None, sys.path), ROOT, sys.prefix, sys.base_prefix, "/proc", "/sys")
)


@dataclass
class Tally:
    """What became of the inputs of a reader; failures: number of the input → what happened."""

    name: str
    used: int = 0
    refused: int = 0
    ended: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """All inputs so far."""
        return self.used + self.refused + self.ended + len(self.failures)

    def causes(self) -> Iterator[tuple[int, str, int]]:
        """Yield the first input of each cause, what happened, and to how many inputs."""
        found = dict[str, list[int]]()
        for number, what in sorted(self.failures.items()):
            places = re.findall(r'File "(.*?)", line (\d+)', what)[-1:]
            error = what.strip().rpartition("\n")[2].partition(":")[0]
            found.setdefault(f"{places} {error}", []).append(number)
        for numbers in found.values():
            yield numbers[0], self.failures[numbers[0]], len(numbers)


class Guard:
    """Finds access to what is outside of a folder, among all that Python audits."""

    def __init__(self, folder: Path) -> None:
        cache = os.path.realpath(os.environ["EXL2FLOW_CACHE"])
        self.own = (os.path.realpath(folder), cache, "/dev/null")
        self.allowed = (*READABLE, "/dev/urandom", *self.own)
        self.found = ""

    def __call__(self, event: str, args: Sequence[object]) -> None:
        """See `sys.addaudithook`."""
        is_program = event == "subprocess.Popen" and any(p in str(args[1]) for p in PROGRAMS)
        if event in FORBIDDEN and not is_program:
            self.found = f"{event}{args!r:.200}"
        elif event in ("open", *WRITING) and isinstance(args[0], str | bytes | os.PathLike):
            path, flags = os.path.realpath(os.fsdecode(args[0])), args[-1]
            is_reading = event == "open" and not (isinstance(flags, int) and flags & WRITES)
            if not path.startswith(self.allowed if is_reading else self.own):
                self.found = f"{event} {path!r}"


class Run:
    """Inputs of one reader, in a process that is replaced when one of them ends it."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name, self.seed = name, seed
        torch.manual_seed(0)  # the whole files are always the same
        random.seed(0)
        self.reader = READERS[name](folder / name)
        self.reader.trial = self._trial
        self.state = mmap.mmap(-1, SHARED.size)
        self.log = folder / f"{name}.log"
        self.log.touch()

    def input(self, number: int) -> bytes:
        """Return an input."""
        return self.reader.damaged(random.Random(f"{self.name}/{self.seed}/{number}"))

    def files(self, paths: Sequence[Path]) -> Tally:
        """Read files of the corpus, after the whole ones, which must be right."""
        sound = self._read(self.reader.seeds, 0, len(self.reader.seeds), time.monotonic() + 600)
        if sound.used != len(self.reader.seeds):
            raise AssertionError(f"{self.name}: a whole file is refused: {sound}")
        return self._read(
            [path.read_bytes() for path in paths], 0, len(paths), time.monotonic() + 600
        )

    def inputs(self, first: int, count: int, end: float) -> Tally:
        """Read so many inputs, or those that there is time for."""
        return self._read(None, first, first + count, end)

    def _read(self, given: list[bytes] | None, first: int, stop: int, end: float) -> Tally:
        tally, begun = Tally(self.name), time.monotonic()
        self._set(first, 0, 0, 0, False)
        while self._get()[0] < stop and time.monotonic() < end:
            child = os.fork()
            if child == 0:
                try:
                    self._child(given, stop, end)
                    os._exit(0)
                finally:
                    os._exit(1)  # nothing of the parent's is cleaned up here
            why = _waited(child, self.state)
            number, used, refused, ended, in_trial = self._get()
            if why and in_trial:
                self._set(number + 1, used, refused, ended + 1, False)
            elif why:
                tally.failures[number] = why
                self._set(number + 1, used, refused, ended, False)
        _, tally.used, tally.refused, tally.ended, _ = self._get()
        for line in self.log.read_text().splitlines():
            number, what = json.loads(line)
            tally.failures[number] = what
        self.log.write_text("")
        tally.seconds = time.monotonic() - begun
        return tally

    def _child(self, given: list[bytes] | None, stop: int, end: float) -> None:
        """Read inputs until there are no more."""
        guard = Guard(self.reader.folder)
        sys.addaudithook(guard)
        allowed = _address_space() + MEMORY
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # of the library in Rust, too
        os.dup2(sys.stderr.fileno(), 2)
        number, used, refused, ended, _ = self._get()
        while number < stop and time.monotonic() < end:
            data = self.input(number) if given is None else given[number]
            guard.found = ""
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
            what = ""
            try:
                refusal = self._refusal(data)
                used, refused = used + (not refusal), refused + refusal
            except BaseException:
                what = traceback.format_exc(limit=-6)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if what or guard.found:
                with self.log.open("a") as log:
                    log.write(f"{json.dumps([number, what or guard.found])}\n")
            number += 1
            self._set(number, used, refused, ended, False)

    def _refusal(self, data: bytes) -> bool:
        """Use an input; return whether it is refused in words that can be printed."""
        try:
            self.reader.read(data)
        except Exl2FlowError as error:
            str(error).encode()
            return True
        return False

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Run what a child process runs for users: its end by a signal is a refusal."""
        self.state[SHARED.size - 1] = 1
        signal.setitimer(signal.ITIMER_PROF, TRIAL)
        yield
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        self.state[SHARED.size - 1] = 0

    def _get(self) -> tuple[int, int, int, int, bool]:
        number, used, refused, ended, in_trial = SHARED.unpack(self.state[:])
        return number, used, refused, ended, in_trial

    def _set(self, *values: int) -> None:
        self.state[:] = SHARED.pack(*values)


def _waited(child: int, state: mmap.mmap) -> str:
    """Wait for a process; return how it died, "" if it ended by itself."""
    seen, since = state[:8], time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if state[:8] != seen:
            seen, since = state[:8], time.monotonic()
        elif time.monotonic() - since > WAIT:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    if -code == signal.SIGPROF:
        return f"more than {SECONDS:g} s of processor time"
    return f"the process died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def begun(name: str, seed: int, scratch: Path) -> tuple[Run, dict[str, str]]:
    """Let a reader read its corpus; return it, and the files of the corpus that failed."""
    run = Run(name, seed, scratch)
    files = sorted((CORPUS / name).glob("*"))
    found = run.files(files).failures.items()
    return run, {str(files[number]): what for number, what in found}


def fuzz(given: argparse.Namespace, names: list[str], state: State, scratch: Path) -> bool:
    """Read inputs, a batch of each reader in turn; return whether a file of the corpus failed."""
    runs: dict[str, Run] = {}
    end = time.monotonic() + given.seconds
    goal = given.first + given.inputs
    for name in names:
        state.begin(name)
        state.next[name] = max(state.next[name], given.first)
    has_failed = False
    while time.monotonic() < end:
        left = [name for name in names if state.next[name] < goal]
        if not left:
            break
        name = min(left, key=state.next.__getitem__)
        if name not in runs:
            runs[name], failed = begun(name, given.seed, scratch)
            has_failed |= bool(failed)
            for path, what in failed.items():
                print(f"{path}: {what}\n", flush=True)
        first = state.next[name]
        tally = runs[name].inputs(first, min(BATCH, goal - first), end)
        counts = {"used": tally.used, "refused": tally.refused, "ended": tally.ended}
        state.add(
            name,
            after=first + tally.inputs,
            tried=tally.inputs,
            failures=tally.failures,
            counts={**counts, "seconds": tally.seconds},
        )
        state.save()
        for number in tally.failures if given.keep is not None else ():
            (given.keep / name).mkdir(parents=True, exist_ok=True)
            (given.keep / name / f"{given.seed}-{number}").write_bytes(runs[name].input(number))
    return has_failed


def causes(state: State) -> Iterator[str]:
    """Yield for each reader what went wrong, once for each cause, and how to repeat it."""
    for name in state.counts:
        found = {each["case"]: each["what"] for each in state.failures if each["kind"] == name}
        for number, what, count in Tally(name, failures=found).causes():
            replay = f"--reader {name} --seed {state.seed} --first {number} --inputs 1"
            yield f"python campaigns/fuzz.py {replay}\n{count} like it: {what}\n"


def main() -> int:
    """Fuzz; return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--reader", nargs="+", default=["all"], choices=["all", *READERS], metavar="NAME")
    add("--inputs", type=int, default=500, help="of each reader")
    add("--seconds", type=float, default=3600.0, help="of all readers, at most")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="number of the first input")
    add("--keep", type=Path, help="folder for the inputs that fail")
    add("--state", type=Path, help=HELP)
    given = parser.parse_args()
    if given.state is not None and given.first:
        parser.error("--first repeats a failure: give it without --state")
    torch.set_num_threads(1)
    names = list(READERS) if "all" in given.reader else given.reader
    state = State.opened("fuzz", path=given.state, seed=given.seed)
    with tempfile.TemporaryDirectory(prefix="exl2flow-fuzz-", dir=SCRATCH) as scratch:
        os.environ["EXL2FLOW_CACHE"] = f"{scratch}/cache"
        has_failed = fuzz(given, names, state, Path(scratch).resolve())
    state.save(now=True)
    print(*causes(state), sep="\n")
    print(state.report("reader"))
    return int(has_failed or state.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
