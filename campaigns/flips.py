"""Flip single bits in what a conversion stores, and count what finds them.

    python campaigns/flips.py --count 500 --seed 1

One small conversion is made. Then, for each kind of data, random bits are flipped one at a time
without a trace in the file's times, as on a faulty disk, and flipped back. Every check is asked
alone: the digest that a later run compares, the comparison after compiling, and the gates on the
result's quality, which are slow and get `--gate` flips each.
"""

import argparse
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import checkout  # noqa: F401  # finds the package in a bare checkout
from converted import Converted, Counts
from flipped_bits import flip, flip_unseen, some_bit
from state import HELP, State

from exl2flow.core.runtime.progress import silent
from exl2flow.core.store import damage
from exl2flow.core.store.files import FileRecord, digest
from exl2flow.core.store.source import digests
from exl2flow.core.store.store import MANIFEST, StageFolder
from exl2flow.engine.cache.page_files import NAME_LENGTH, PageFiles
from exl2flow.engine.cache.prefix_tree import FullPage
from exl2flow.pipeline.hub.publish import _differences
from exl2flow.pipeline.hub.repository import Repository

ROOT = Path(__file__).parents[1]
TENSORS = {  # kind → endings of the names of its tensors
    "stored code": (".q_weight",),
    "scale": (".q_scale", ".q_scale_max"),
    "permutation": (".q_invperm",),
    "group table": (".q_groups",),
    "bias, norm, embedding": (".bias", "norm.weight", "embed_tokens.weight"),
}
FILES = {  # kind → stage
    "factor": "sensitivity",
    "choice": "allocate",
    "measurement": "measure",
    "tokens": "tokenize",
}
GATED = ("factor", "choice")
STATES = "state"
TURN = 5  # flips of a kind, then it is the turn of another
SHARD, UPLOAD = "shard after compile", "shard during upload"
MANIFESTS, DIGESTS, PAGE = "manifest", "digests.json", "page of a prompt on a disk"
KINDS = (*TENSORS, STATES, *FILES, SHARD, UPLOAD, MANIFESTS, DIGESTS, PAGE)


@contextmanager
def flipped(folder: Path, name: str, bit: int) -> Iterator[StageFolder]:
    """Flip a bit of a stage's file unseen for the block."""
    flip_unseen(folder, name, bit)
    found = StageFolder.load(folder)
    assert found is not None
    damage.distrust()
    try:
        yield found
    finally:
        flip_unseen(folder, name, bit)


def try_shard(made: Converted, kind: str, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of the output."""
    counts, folder, shard = Counts(), made.pipeline.path("compile"), made.shards[0]
    bits = made.bits_of(TENSORS[kind]) if kind in TENSORS else [range(8 * shard.stat().st_size)]
    bit = chance.choice(chance.choices(bits, weights=[len(part) for part in bits])[0])
    with flipped(folder, str(shard), bit) as found:
        seen = counts.ask("digest", damage.altered(found) == [str(shard)])
        seen |= counts.ask("compile", not made.compares())
        if is_gated:
            seen |= counts.ask("gates", not made.passes_gates())
    if not seen:
        counts.undetected.append(f"bit {bit} of {shard.name}")
    return counts


def try_stage(made: Converted, kind: str, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of a stage's results, which later stages read."""
    counts, folder = Counts(), made.pipeline.path(FILES[kind])
    manifest = StageFolder.load(folder)
    assert manifest is not None
    names = sorted(name for name in manifest.manifest.files if (folder / name).is_file())
    if kind == "factor":
        names = [name for name in names if name.endswith(".safetensors")]
    if kind == "choice":
        names = ["allocation.json"]
    name = chance.choice(names)
    bit = some_bit(folder / name, chance)
    with flipped(folder, name, bit) as found:
        seen = counts.ask("digest", damage.altered(found) == [name])
    if is_gated and kind in GATED:
        seen |= counts.ask("gates", not _finishes_with(made, kind, name, bit))
    if not seen:
        counts.undetected.append(f"bit {bit} of {name}")
    return counts


def _finishes_with(made: Converted, kind: str, name: str, bit: int) -> bool:
    """Return whether a conversion accepts a flipped input if nobody compares its digest."""
    pipeline = made.other()
    folder = made.pipeline.path("sensitivity")
    if kind == "choice":
        pipeline.run("allocate", progress=silent)
        folder = pipeline.path("allocate")
        bit %= 8 * (folder / name).stat().st_size
    with flipped(folder, name, bit):
        for stage in ("tokenize", "sensitivity", "measure", "allocate"):
            damage.trust(pipeline.path(stage))
        return made.finishes(pipeline)


def try_states(made: Converted, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of saved hidden states."""
    counts = Counts()
    path = made.stopped()
    bit = some_bit(path, chance)
    with flipped(path.parent, path.name, bit) as found:
        if not counts.ask("digest", found.load_states() is None):
            counts.undetected.append(f"bit {bit} of {path.name}")
    if is_gated:
        pipeline, path = made.interrupted()
        flip(path, some_bit(path, chance))
        folder = StageFolder.load(path.parent)
        assert folder is not None
        assert folder.manifest.states is not None
        record = FileRecord.of(path, sha256=digest(path))  # as if nobody had compared it
        states = folder.manifest.states.model_copy(update={"record": record})
        folder.manifest.states = states
        folder.save()
        counts.ask("gates", not made.finishes(pipeline))
    return counts


def try_upload(made: Converted, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of a downloaded copy, which publishing compares with what it sent."""
    counts, shard = Counts(), made.shards[0]
    place = made.out.with_name("downloaded")
    place.mkdir(exist_ok=True)
    copy = place / shard.name
    if not copy.exists():
        shutil.copy2(shard, place)
    memory = made.out.with_name("sent.json")
    repository = Repository(name="org/name", hub=None, memory=memory)  # type: ignore[arg-type]  # nothing is sent
    contents = {shard.name: shard}
    assert _differences(place, contents, repository) == []
    bit = some_bit(copy, chance)
    flip(copy, bit)
    if not counts.ask("digest", bool(_differences(place, contents, repository))):
        counts.undetected.append(f"bit {bit} of {copy.name}")
    flip(copy, bit)
    return counts


def try_manifest(made: Converted, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of a stage's manifest."""
    name = chance.choice(list(made.pipeline.stages))
    folder = made.pipeline.path(name)
    before = StageFolder.load(folder)
    assert before is not None
    counts, path = Counts(), folder / MANIFEST
    bit = some_bit(path, chance)
    flip(path, bit)
    after = StageFolder.load(folder)
    if not counts.ask("digest", after is None or after.manifest == before.manifest):
        counts.undetected.append(f"bit {bit} of the manifest of {name}")
    flip(path, bit)
    return counts


def try_digests(made: Converted, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of the remembered digests of the source: the right ones must come of it."""
    counts, memory = Counts(), made.out.with_name("remembered.json")
    files = sorted(made.config.source.glob("*"))
    memory.unlink(missing_ok=True)
    right = digests(files, memory)
    bit = some_bit(memory, chance)
    flip(memory, bit)
    if not counts.ask("digest", digests(files, memory) == right):
        counts.undetected.append(f"bit {bit} of {memory.name}")
    return counts


def try_page(made: Converted, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of a page that a server keeps on a disk."""
    counts, root = Counts(), made.out.with_name("pages")
    files = PageFiles(root, "n" * NAME_LENGTH, size=1 << 20)
    page = FullPage(key=b"k" * 16, before=b"", content=bytes(1024))
    data = bytes(range(256)) * 16
    files.write(page, memoryview(data))
    [path] = root.rglob("*.page")
    bit = some_bit(path, chance)
    flip(path, bit)
    if not counts.ask("digest", not files.read(page, memoryview(bytearray(len(data))))):
        counts.undetected.append(f"bit {bit} of {path.name}")
    return counts


OTHERS = {
    STATES: try_states,
    UPLOAD: try_upload,
    MANIFESTS: try_manifest,
    DIGESTS: try_digests,
    PAGE: try_page,
}


def attempt(made: Converted, kind: str, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of a kind of data; return what found it."""
    if kind in OTHERS:
        return OTHERS[kind](made, is_gated=is_gated, chance=chance)
    if kind in FILES:
        return try_stage(made, kind, is_gated=is_gated, chance=chance)
    return try_shard(made, kind, is_gated=is_gated, chance=chance)


def campaign(
    made: Converted,
    *,
    count: int,
    gate: int,
    seed: int,
    seconds: float = math.inf,
    state: State | None = None,
) -> dict[str, Counts]:
    """Flip a few bits of every kind in turn; return what found them.

    Raises:
        AssertionError: the conversion is refused without a flip.
    """
    end = time.monotonic() + seconds
    assert made.compares()
    assert made.passes_gates()
    state = state or State(program="flips", seed=seed)
    found = {kind: Counts() for kind in KINDS}
    goals = {kind: count for kind in KINDS if kind not in TENSORS or made.bits_of(TENSORS[kind])}
    for kind in goals:
        state.begin(kind)
    while time.monotonic() < end:
        left = [kind for kind in goals if state.next[kind] < count]
        if not left:
            break
        kind = min(left, key=state.next.__getitem__)
        first = state.next[kind]
        for number in range(first, min(first + TURN, count)):
            if time.monotonic() > end:
                break
            chance = random.Random(f"{seed} {kind} {number}")
            one = attempt(made, kind, is_gated=number < gate, chance=chance)
            found[kind].merge(one)
            counts = {f"{check}, found": one.found[check] for check in one.tried}
            counts |= {f"{check}, asked": one.tried[check] for check in one.tried}
            failures = dict.fromkeys([number] * bool(one.undetected), "; ".join(one.undetected))
            state.add(kind, after=number + 1, failures=failures, counts=counts)
            state.save()
    return found


def main() -> int:
    """Print the table, and the flips that nothing found; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model", help="a small one")
    parser.add_argument("--count", type=int, default=200, help="flips of each kind")
    parser.add_argument("--gate", type=int, default=10, help="of them for the slow gates alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all flips, at most")
    parser.add_argument("--state", type=Path, help=HELP)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    options = {"model": args.model.resolve().name, "gate": args.gate}
    state = State.opened("flips", path=args.state, seed=args.seed, options=options)
    logging.getLogger("exl2flow").setLevel(logging.ERROR)  # it warns of every flip
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    with tempfile.TemporaryDirectory(prefix="exl2flow-flips-") as folder:
        made = Converted(args.model, Path(folder), row_tokens=128)
        left = end - time.monotonic()
        campaign(made, count=args.count, gate=args.gate, seed=args.seed, seconds=left, state=state)
    return state.finish("flipped bit of a")


if __name__ == "__main__":
    sys.exit(main())
