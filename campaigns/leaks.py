"""Let everything fail that uses a secret, and search all that is left behind for the secrets.

    python campaigns/leaks.py --failures 100 --seed 1

Commands talk to a Hub on 127.0.0.1 that refuses, breaks off or repeats the token in its answers;
flows read it from a Secret block of a Prefect server that has a password. Each secret is searched
for as it is and in base64, in what was printed, in every file below a folder that was the commands'
home, work root, cache and temporary folder, and in all rows of the Prefect database.
"""

import argparse
import base64
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

from crash import Conditions, Ended, Program, Run
from hub_server import Hub, serving
from scenarios import SOURCE, Material
from state import HELP, State

USER, BLOCK = "somebody", "hub-token"
WHERE = {  # requests of a command that fail
    "convert": ("GET /api/models/", "GET .*/resolve/", "GET /objects/", "GET /api/whoami"),
    "publish": (
        "GET /api/whoami",
        "POST /api/repos/create",
        "POST .*/preupload",
        "POST .*/commit/",
        "POST .*/objects/batch",
        "PUT /uploads/",
        "POST .*/branch/",
        "GET .*/refs",
    ),
    "validate": ("GET /api/models/", "GET .*/resolve/", "GET /objects/"),
}
FAILURES = ("401", "403", "404", "429", "500", "reset", "cut", "echo")
VARIANTS = ("header", "address")  # how a secret reaches the Hub
ABORTED, FLOW = "aborted command", "failed flow"
COMMAND = {variant: f"failed command, secret in the {variant}" for variant in VARIANTS}
LONGEST_SECONDS = 300.0  # of a command
IMPATIENT = Conditions(hub_waits=(0.01, 0.02))


def drawn(rng: random.Random, prefix: str = "") -> str:
    """Return a secret that occurs nowhere by chance."""
    return prefix + "".join(rng.choices("abcdefghjkmnpqrstuvwxyzABCDEFGHJKMNPQRSTUVWXYZ", k=30))


def forms(secret: str) -> set[bytes]:
    """Return how a secret may be written: as it is, and in base64 wherever it begins."""
    found = {secret.encode()}
    for offset in range(3):
        coded = base64.b64encode(b"\0" * offset + secret.encode() + b"\0\0")
        found.add(coded[4 if offset else 0 : len(coded) - 8])  # but what its neighbours change
    return found


class Search:
    """Remembers where a secret was found. secrets: name → text."""

    def __init__(self, secrets: dict[str, str]) -> None:
        self.secrets = {name: forms(text) for name, text in secrets.items()}
        self.searched: Counter[str] = Counter()
        self.places: list[str] = []
        self.known: dict[Path, tuple[int, int, int]] = {}
        self.rows: set[int] = set()

    def look(self, kind: str, data: bytes, place: str) -> None:
        """Search some bytes."""
        self.searched[kind] += 1
        for name, spelled in self.secrets.items():
            if any(form in data for form in spelled):
                self.places.append(f"{name} in {place}")

    def folder(self, folder: Path) -> None:
        """Search all files below a folder and all rows of databases that are new or changed."""
        for path in folder.rglob("*"):
            if not path.is_file() or not (data := self._changed(path)):
                continue
            self.look("file", data, str(path))
            if path.parent == folder and path.name.startswith("core"):
                self.places.append(f"a core: {path}")
        for path in folder.rglob("prefect.db"):
            with closing(sqlite3.connect(path)) as database:
                for line in database.iterdump():
                    if (row := hash(line)) not in self.rows:
                        self.rows.add(row)
                        self.look("database row", line.encode(errors="replace"), line[:200])

    def _changed(self, path: Path) -> bytes:
        """Return a file's content unless it was searched before; nothing if it is gone."""
        try:
            stat = path.stat()
            stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if self.known.get(path) == stamp:
                return b""
            data = path.read_bytes()
        except FileNotFoundError:
            return b""
        self.known[path] = stamp
        return data


def fail(hub: Hub, rng: random.Random, command: str, token: str) -> str:
    """Switch a random fault on, and return its name."""
    where, kind = rng.choice(WHERE[command]), rng.choice(FAILURES)
    match kind:
        case "reset":
            hub.fail(where, "lose", times=None)
        case "cut":
            hub.fail(where, "cut", times=None, after=rng.randrange(100))
        case "echo":
            headers = {"X-Error-Message": f"the token {token} may not do this"}
            hub.fail(where, "status", times=None, status=403, headers=headers)
        case _:
            hub.fail(where, "status", times=None, status=int(kind))
    return f"{command}: {kind}"


def arguments(command: str, material: Material, folder: Path) -> list[str]:
    """Return the words of a command."""
    match command:
        case "convert":
            return material.command("hub", folder).arguments
        case "publish":
            options = ("--repo", "org/out", "--device", "cpu", "--force")
            return ["publish", str(material.converted), *options]
    rows = ("--validate-rows", "1", "--validate-row-tokens", "64", "--sample-tokens", "2")
    words = ("--reference", SOURCE, "--no-prefect", "--device", "cpu")
    return ["validate", str(material.converted), *words, *rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all cases share: the Hub, what they work on, their home, and what was found there."""

    hub: Hub
    material: Material
    search: Search
    home: Path
    state: State

    def draw(self, part: str, number: int) -> random.Random:
        """Return the chance of a case, on a Hub without faults."""
        self.hub.faults.clear()
        self.hub.repos.pop("org/out", None)
        return random.Random(f"{self.state.seed}/{part}/{number}")

    def note(self, kind: str, number: int, what: str, problem: str = "") -> None:
        """Search all that a case has left, and count it. problem: what else was wrong."""
        self.search.folder(self.home)
        found = "; ".join(filter(None, (problem, *self.search.places)))
        self.search.places.clear()
        failures = {number: f"{what}: {found}"} if found else {}
        searched = {f"{name}s": count for name, count in self.search.searched.items()}
        self.search.searched.clear()
        self.state.add(kind, after=number + 1, failures=failures, counts=searched)
        self.state.save()


def ended(run: Run) -> Ended | None:
    """Return how a process ended; None if it had to be killed because it did not."""
    deadline = time.monotonic() + LONGEST_SECONDS
    stat = Path(f"/proc/{run.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        if time.monotonic() > deadline:
            run.send(signal.SIGKILL)
            run.wait()
            return None
        time.sleep(0.01)
    return run.wait()


def failed_command(scene: Scene, program: Program, variant: str, number: int) -> None:
    """Run a command whose Hub fails."""
    rng = scene.draw(variant, number)
    command = rng.choice(list(WHERE))
    folder = scene.home / f"{variant}-{number}"
    what = fail(scene.hub, rng, command, os.environ["HF_TOKEN"])
    words = arguments(command, scene.material, folder)
    if rng.random() < 0.5:
        words.insert(0, "--debug")
    end = ended(program.start(words, IMPATIENT))
    problem = "" if end else f"not ended in {LONGEST_SECONDS:.0f} s"
    if end:
        scene.search.look("output", (end.out + end.err).encode(), f"{what}:\n{end.err}")
    scene.note(COMMAND[variant], number, what, problem)
    shutil.rmtree(folder, ignore_errors=True)


def aborted_command(scene: Scene, program: Program, number: int) -> None:
    """Abort a command, as a library might."""
    scene.draw(ABORTED, number)
    folder = scene.home / f"aborted-{number}"
    run = program.start(arguments("convert", scene.material, folder), IMPATIENT)
    time.sleep(1.0)
    run.send(signal.SIGABRT)
    run.wait()
    scene.note(ABORTED, number, "convert")


def commands(scene: Scene, failures: int, end: float) -> None:
    """Run commands that fail, and some that are aborted."""
    goals = {COMMAND[variant]: failures // 2 for variant in VARIANTS}
    goals[ABORTED] = max(2, failures // 25)
    url = scene.hub.url
    host = url.removeprefix("http://")
    password = os.environ["URL_PASSWORD"]
    ends = {"header": url, "address": f"http://{USER}:{password}@{host}"}  # as for a mirror
    next_ = {kind: scene.state.begin(kind) for kind in goals}
    with ExitStack() as stack:
        programs = {}
        for variant in VARIANTS:
            os.environ["HF_ENDPOINT"] = ends[variant]
            programs[variant] = stack.enter_context(closing(Program()))
        os.environ["HF_ENDPOINT"] = url
        while time.monotonic() < end:
            left = [kind for kind, goal in goals.items() if next_[kind] < goal]
            if not left:
                break
            kind = min(left, key=lambda kind: next_[kind] / goals[kind])
            number = next_[kind]
            if kind == ABORTED:
                aborted_command(scene, programs[VARIANTS[number % 2]], number)
            else:
                [variant] = [name for name in VARIANTS if COMMAND[name] == kind]
                failed_command(scene, programs[variant], variant, number)
            next_[kind] = number + 1


@contextmanager
def captured(file: Path) -> Iterator[None]:
    """Send all that this process prints to a file."""
    kept = [os.dup(stream) for stream in (1, 2)]
    with file.open("ab") as target:
        sys.stdout.flush()
        for stream in (1, 2):
            os.dup2(target.fileno(), stream)
        try:
            yield
        finally:
            for stream, before in zip((1, 2), kept, strict=True):
                os.dup2(before, stream)
                os.close(before)


def failed_flow(scene: Scene, token: str, number: int) -> None:
    """Run a flow whose Hub fails."""
    from exl2flow import flows as ours
    from exl2flow.core.options.config import ConversionConfig
    from exl2flow.core.options.publication import PublishConfig

    rng = scene.draw("flows", number)
    command = rng.choice(["convert", "publish"])
    what = fail(scene.hub, rng, command, token)
    folder = scene.home / f"flow-{number}"
    flow: Callable[..., Any] = ours.convert
    config: object = ConversionConfig.model_validate(
        {"source": SOURCE, "out": folder, "device": "cpu", "token_block": BLOCK}
    )
    if command == "publish":
        flow, target = ours.publish, {"models": (scene.material.converted,), "repo": "org/out"}
        config = PublishConfig.model_validate(
            {**target, "device": "cpu", "force": True, "token_block": BLOCK}
        )
    state = flow(config, return_state=True)
    error = state.result(raise_on_failure=False)
    if isinstance(error, BaseException):
        text = "".join(traceback.format_exception(error)) + repr(error.__dict__)
        scene.search.look("traceback", text.encode(), text)
    scene.note(FLOW, number, what)


def flows(scene: Scene, count: int, end: float) -> None:
    """Run failing flows whose token is in a Secret block only."""
    from exl2flow.tasks import retries

    # Before the tasks are imported: six minutes of pauses are of no use here
    retries.RETRIED["retry_delay_seconds"] = [0.01] * len(retries.DELAYS_SECONDS)

    from prefect.blocks.system import Secret

    from exl2flow.flows.server.temporary import api
    from exl2flow.pipeline.hub import fetch as hub_tasks

    opened = hub_tasks.Hub.open
    hub_tasks.Hub.open = staticmethod(  # type: ignore[method-assign]
        lambda token=None: replace(opened(token), waits=IMPATIENT.hub_waits or ())
    )
    token = os.environ.pop("HF_TOKEN")
    first = scene.state.begin(FLOW)
    with captured(scene.home / "flows.log"), api() as server:
        server.wait()
        Secret(value=token).save(BLOCK, overwrite=True)  # type: ignore[unused-coroutine]
        for number in range(first, count):
            if time.monotonic() > end:
                break
            failed_flow(scene, token, number)


@contextmanager
def scenery(root: Path, state: State) -> Iterator[Scene]:
    """Run the Hub, put the secrets into the environment, and make a home and what is worked on."""
    rng = random.Random(state.seed)
    token, password, url_password = drawn(rng, "hf_"), drawn(rng), drawn(rng)
    home = root / "home"
    home.mkdir()
    material = Material(root=root / "material", device="cpu")
    material.write()
    with serving(root / "hub") as hub:
        login = base64.b64encode(f"{USER}:{url_password}".encode()).decode()
        hub.tokens = {token, f"Basic {login}"}  # a password in an address replaces the token
        hub.add_folder(SOURCE, material.model, card={"license": "mit"})
        os.environ.update(
            HF_ENDPOINT=hub.url,
            HF_TOKEN=token,
            HF_HUB_DISABLE_XET="1",
            HF_HOME=str(home / "huggingface"),
            HOME=str(home),
            TMPDIR=str(home),
            URL_PASSWORD=url_password,
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_AUTH_STRING=f"{USER}:{password}",
            PREFECT_SERVER_API_AUTH_STRING=f"{USER}:{password}",
        )
        os.chdir(home)  # where a core would be
        secrets = {"token": token, "password": password, "password in a URL": url_password}
        material.convert()
        search = Search(secrets)
        yield Scene(hub=hub, material=material, search=search, home=home, state=state)


def main() -> int:
    """Run the campaign and print its table; return 1 if a secret was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--failures", type=int, default=100, help="commands that fail")
    parser.add_argument("--flows", type=int, default=20, help="Prefect flows that fail")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all failures, at most")
    parser.add_argument("--state", type=Path, help=HELP)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    path = None if options.state is None else options.state.resolve()
    state = State.opened("leaks", path=path, seed=options.seed)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="leaks-") as name, scenery(Path(name), state) as scene:
        now = time.monotonic()
        has_flows = state.next.get(FLOW, 0) < options.flows
        commands(scene, options.failures, now + (end - now) / 2 if has_flows else end)
        if has_flows and time.monotonic() < end:
            flows(scene, options.flows, end)
        scene.search.folder(scene.home)
        if places := "; ".join(scene.search.places):
            state.add("after the last case", tried=1, failures={"all": places})
    return state.finish("secrets, in all that was left by a")


if __name__ == "__main__":
    sys.exit(main())
