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
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import tally
from crash import Conditions, Program
from hub_server import Hub, serving
from scenarios import SOURCE, Material

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
WHAT = (
    "in anything left behind by a failure"  # in the table: one failure leaves many rows and files
)
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
        self.found: Counter[str] = Counter()
        self.places: list[str] = []

    def look(self, kind: str, data: bytes, place: str) -> None:
        """Search some bytes."""
        self.searched[kind] += 1
        for name, spelled in self.secrets.items():
            if any(form in data for form in spelled):
                self.found[kind] += 1
                self.places.append(f"{name} in {place}")

    def folder(self, folder: Path) -> None:
        """Search all files below a folder, and all rows of databases."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.look("file", path.read_bytes(), str(path))
            if path.name == "prefect.db":
                with closing(sqlite3.connect(path)) as database:
                    for line in database.iterdump():
                        self.look("database row", line.encode(errors="replace"), line[:200])


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


def commands(
    hub: Hub,
    material: Material,
    search: Search,
    folder: Path,
    options: argparse.Namespace,
    ends: Iterator[float],
) -> list[str]:
    """Run failing commands in the home `folder`; return what failed."""
    token = os.environ["HF_TOKEN"]
    ran: list[str] = []
    for variant in ("header", "address"):
        if variant == "address":  # a password in a URL, as for a mirror
            host = hub.url.removeprefix("http://")
            os.environ["HF_ENDPOINT"] = f"http://{USER}:{os.environ['URL_PASSWORD']}@{host}"
        with closing(Program()) as program:
            for index in tally.within(options.failures // 2, next(ends)):
                rng = random.Random(f"{options.seed}/{variant}/{index}")
                command = rng.choice(list(WHERE))
                own = folder / f"{variant}-{index}"
                hub.faults.clear()
                hub.repos.pop("org/out", None)
                ran.append(fail(hub, rng, command, token))
                words = arguments(command, material, own)
                if rng.random() < 0.5:
                    words.insert(0, "--debug")
                ended = program.start(words, IMPATIENT).wait()
                search.look("output", (ended.out + ended.err).encode(), f"{ran[-1]}:\n{ended.err}")
            hub.faults.clear()
            core = program.start(
                arguments("convert", material, folder / f"aborted-{variant}"), IMPATIENT
            )
            time.sleep(1.0)
            core.send(signal.SIGABRT)  # a crash, as of a library
            core.wait()
            ran.append("convert: aborted")
    os.environ["HF_ENDPOINT"] = hub.url
    return ran


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


def flows(
    hub: Hub,
    material: Material,
    search: Search,
    folder: Path,
    options: argparse.Namespace,
    ends: Iterator[float],
) -> list[str]:
    """Run failing flows whose token is in a Secret block only; return what failed."""
    from prefect.blocks.system import Secret

    from exl2flow import flows as ours
    from exl2flow.core.options.config import ConversionConfig
    from exl2flow.core.options.publication import PublishConfig
    from exl2flow.flows.server.temporary import api
    from exl2flow.tasks import hub as hub_tasks

    opened = hub_tasks.Hub.open
    hub_tasks.Hub.open = staticmethod(  # type: ignore[method-assign]
        lambda token=None: replace(opened(token), waits=IMPATIENT.hub_waits or ())
    )
    token = os.environ.pop("HF_TOKEN")
    ran: list[str] = []
    with captured(folder / "flows.log"), api() as server:
        server.wait()
        Secret(value=token).save(BLOCK, overwrite=True)  # type: ignore[unused-coroutine]
        for index in tally.within(options.flows, next(ends)):
            rng = random.Random(f"{options.seed}/flows/{index}")
            command = rng.choice(["convert", "publish"])
            hub.faults.clear()
            hub.repos.pop("org/out", None)
            ran.append(f"flow {fail(hub, rng, command, token)}")
            flow: Callable[..., Any] = ours.convert
            config: object = ConversionConfig.model_validate(
                {
                    "source": SOURCE,
                    "out": folder / f"flow-{index}",
                    "device": "cpu",
                    "token_block": BLOCK,
                }
            )
            if command == "publish":
                flow, target = ours.publish, {"models": (material.converted,), "repo": "org/out"}
                config = PublishConfig.model_validate(
                    {**target, "device": "cpu", "force": True, "token_block": BLOCK}
                )
            state = flow(config, return_state=True)
            error = state.result(raise_on_failure=False)
            if isinstance(error, BaseException):
                text = "".join(traceback.format_exception(error)) + repr(error.__dict__)
                search.look("traceback", text.encode(), text)
    return ran


def main() -> int:
    """Run the campaign and print its table; return 1 if a secret was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--failures", type=int, default=100, help="commands that fail")
    parser.add_argument("--flows", type=int, default=20, help="Prefect flows that fail")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all failures, at most")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    token, password, url_password = drawn(rng, "hf_"), drawn(rng), drawn(rng)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="leaks-") as name:
        root = Path(name)
        home = root / "home"
        home.mkdir()
        material = Material(root=root / "material", device="cpu")
        material.write()
        with serving(root / "hub") as hub:
            hub.tokens = {token}
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
            search = Search(secrets)
            material.convert()
            ends = tally.ends(3 if options.flows else 2, options.seconds)
            ran = commands(hub, material, search, home, options, ends)
            if options.flows:
                ran += flows(hub, material, search, home, options, ends)
        search.folder(home)
        cores = [path.name for path in home.iterdir() if path.name.startswith("core")]
    print(f"seed {options.seed}: {len(ran)} failures ({tally.spread(ran)})\n")
    found = sum(search.found.values())
    print(tally.table("secrets", {WHAT: len(ran)}, {WHAT: found}))
    print(f"\nsearched: {dict(search.searched)}, found: {dict(search.found)}, cores: {len(cores)}")
    for place in search.places:
        print(f"\nFOUND {place}\nrepeat with --seed {options.seed}")
    return int(bool(search.places or cores))


if __name__ == "__main__":
    sys.exit(main())
