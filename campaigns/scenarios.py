"""Commands that a campaign disturbs, and what they must leave behind whatever happened to them."""

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from crash import MANIFEST, Conversion
from hub_server import TOKEN, Hub, serving
from tiny import make_tiny
from traces import identity

PLACED = {"compile", "validate"}  # their folders say where the output lies, which is compared
RECORDS = ("exl2flow.json", "exl2flow-score.json")  # their fingerprint covers that place, too
SWEEP = "sweep.json"  # lists folders
SOURCE, TARGET = "org/tiny", "org/tiny-exl2"  # repositories; the second is one per command
BEFORE, BETWEEN = "before the first stage", "between stages"
AFTER = "behind the last stage"  # a publication, if it takes long
WEIGHTS = {"fast": 1, "shards": 1, "best": 5, "sweep": 2, "refine": 5, "hub": 4}

Stamps = Mapping[Path, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Conversion):
    """A command with words of its own, in the folders of a conversion."""

    words: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """See `Conversion`."""
        return list(self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What the commands work on: made once, then only read."""

    root: Path
    device: str
    with_prefect: bool = False

    @property
    def model(self) -> Path:
        """A model of one layer."""
        return self.root / "model"

    @property
    def large(self) -> Path:
        """A model whose output has several shards."""
        return self.root / "large"

    @property
    def converted(self) -> Path:
        """The first model, converted."""
        return self.root / "converted" / "out"

    def write(self) -> None:
        """Write the models."""
        make_tiny("llama", self.model, num_hidden_layers=1)
        make_tiny(
            "llama", self.large, num_hidden_layers=2, vocab_size=8192, tie_word_embeddings=True
        )

    def convert(self) -> None:
        """Convert the first model."""
        replace(self, with_prefect=False).command("fast", self.converted.parent).finish()

    def command(self, name: str, folder: Path) -> Conversion:
        """Return the command of a scenario, with its folders inside `folder`."""
        source = self.large if name == "shards" else self.model
        options = ("--device", self.device)
        plain = Conversion.inside(folder, source, *options)
        words = plain.arguments
        where, rest = ["--out", str(plain.out)], words[4:]
        match name:
            case "best":
                words += ["--quality", "best", "--calibration", "self"]
            case "sweep":
                words = ["sweep", str(source), *where, "--bpw", "3,5", *rest]
            case "refine":
                words = ["refine", str(self.converted), "--reference", str(source), *where, *rest]
                for option in ("--shard-size-mb", "--head-bits", "--quality"):
                    del words[words.index(option) : words.index(option) + 2]
            case "hub":
                words = ["convert", SOURCE, *where, *rest, "--publish", target_of(folder)]
        if self.with_prefect:
            words.remove("--no-prefect")
        fields = {"source": source, "out": plain.out, "work_root": plain.work_root}
        return Command(**fields, words=tuple(words))


@contextmanager
def hub_for(folder: Path, model: Path) -> Iterator[Hub]:
    """Run the Hub of all commands that start, in this process and its children, from now on."""
    with serving(folder) as hub:
        hub.add_folder(SOURCE, model, card={"license": "mit"})
        names = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        os.environ.update(names, HF_HOME=str(folder / "home"), EXL2FLOW_TUNING="off")
        yield hub


def target_of(folder: Path) -> str:
    """Return the repository to which the command in a folder publishes."""
    return f"{TARGET}-{folder.name}"


def manifests(work_root: Path) -> dict[Path, dict[str, Any]]:
    """Return the manifests of all stages below a work root, which may be changing."""
    found = {}
    for path in work_root.glob(f"*/*/{'?' * 16}/{MANIFEST}"):
        with suppress(FileNotFoundError):
            found[path] = json.loads(path.read_bytes())
    return found


def stamps(paths: Iterable[Path]) -> Stamps:
    """Return time and inode of each existing file; writing it again changes them."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            found[path] = identity(path)
    return found


def under_way(work_root: Path, known: Stamps | None = None) -> str:
    """Return the stage that a command is working on, or between which it is.

    known: the manifests when the command was started; a stage begins when its own is written anew.
    """
    found = manifests(work_root)
    partial = [path for path, each in found.items() if each["status"] == "partial"]
    for path, stamp in stamps(partial).items():
        if stamp != (known or {}).get(path):
            return str(found[path]["stage"])
    return BETWEEN if found else BEFORE


def committed(work_root: Path) -> dict[Path, tuple[int, int]]:
    """Return the identity of each finished sublayer, head and shard, and of complete stages."""
    found = {}
    for path, manifest in manifests(work_root).items():
        for name in manifest["files"]:
            is_result = "sublayers/" in name or name.endswith(".safetensors")
            if is_result and not name.startswith("inputs/"):  # states, dropped in the end
                found[path.parent / name] = identity(path.parent / name)
        if manifest["status"] == "complete":
            found[path] = identity(path)
    return found


# As a command shows it, or as the log of a worker does.
SUBLAYER = re.compile(
    r"^(?:((?:[\d.]+bpw )?(?:sensitivity|measure|quantize|refine)) \d+/\d+ (model\.\S+)"
    r"|.* exl2flow\.(quant\.\S+) - (model\.\S+ \w+)=)",
    re.MULTILINE,
)


def repeated(log: str) -> list[str]:
    """Return the sublayers that the log of all attempts reports as finished more than once."""
    names = Counter(" ".join(filter(None, groups)) for groups in SUBLAYER.findall(log))
    return [name for name, count in names.items() if count > 1]


def redone(before: dict[Path, tuple[int, int]], now: dict[Path, tuple[int, int]]) -> list[str]:
    """Return finished files that were written again; parts of a stage may be deleted at its end."""
    return [str(path) for path in before if now.get(path, before[path]) != before[path]]


def held_locks(work_root: Path) -> list[Path]:
    """Return the lock files below a work root that some process still holds."""
    held = []
    for path in (
        *work_root.glob("*/lock"),
        *work_root.glob("*/locks/*"),
        *work_root.glob("*.lock"),
    ):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path)
    return held


def results(command: Conversion, hub_folder: Path) -> dict[str, str]:
    """Return the digests of all that must not depend on how a command came to its end."""
    kept = {}
    for path in command.work_root.glob(f"*/*/{'?' * 16}/**/*"):
        where = path.relative_to(command.work_root)
        if path.is_file() and path.name != MANIFEST and where.parts[1] not in PLACED:
            kept[f"work/{where}"] = path.read_bytes()
    for path in command.out.rglob("*"):
        if path.is_file() and path.name != SWEEP:
            kept[f"out/{path.relative_to(command.out)}"] = path.read_bytes()
    target, hub = target_of(command.out.parent), Hub(hub_folder)  # as it lies on disk
    for branch in hub.repos[target]["branches"] if target in hub.repos else ():
        files = hub.files(target, branch)
        kept |= {f"{branch}/{name}": data for name, data in files.items()}
    record = command.out / RECORDS[0]
    fingerprint = json.loads(record.read_bytes())["fingerprint"] if record.exists() else "none"
    places = {
        str(command.out.parent).encode(): b"FOLDER",
        target.partition("/")[2].encode(): b"REPOSITORY",
        fingerprint[:12].encode(): b"FINGERPRINT",  # as on the card
    }
    return {name: _digest(name, data, places) for name, data in kept.items()}


def _digest(name: str, data: bytes, places: dict[bytes, bytes]) -> str:
    """Return the digest of a file without what depends on where it lies."""
    for own, common in places.items():
        data = data.replace(own, common)
    if Path(name).name in RECORDS:
        data = json.dumps({**json.loads(data), "fingerprint": None}).encode()
    return sha256(data).hexdigest()
