"""Flip single bits in what a conversion stores, and count what finds them.

    python campaigns/flips.py --count 500 --seed 1

One small conversion is made. Then, for each kind of data, random bits are flipped one at a time
without a trace in the file's times, as on a faulty disk, and flipped back. Every check is asked
alone: the digest that a later run compares, the comparison after compiling, and the gates on the
result's quality, which are slow and get `--gate` flips each.
"""

import argparse
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import checkout  # noqa: F401  # finds the package in a bare checkout
from flipped_bits import flip, flip_unseen, some_bit
from state import HELP, State

from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.core.options.config import ConversionConfig, ValidateOptions
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store import damage, store
from exl2flow.core.store.files import FileRecord, digest
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import StageFolder
from exl2flow.inference.scoring.evaluate import evaluate
from exl2flow.inference.scoring.text import text_rows
from exl2flow.inference.validate.stage import check_verdict, verdict
from exl2flow.model import Tokenizer, resolve
from exl2flow.quant.compile.stage import _compare, _Tensors
from exl2flow.tasks.publish import _differences
from exl2flow.tasks.repository import Repository
from exl2flow.tasks.stages import STAGES

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
KINDS = (*TENSORS, STATES, *FILES, SHARD, UPLOAD)
MAX_KL = PublishConfig.model_fields["max_kl"].default


@dataclass
class Counts:
    """What found the flips of one kind: check → how many of how many."""

    tried: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    undetected: list[str] = field(default_factory=list)  # by all checks that were asked

    def ask(self, check: str, found: bool) -> bool:
        """Count an answer, and return it."""
        self.tried[check] += 1
        self.found[check] += found
        return found

    def merge(self, other: "Counts") -> None:
        """Add the answers about another flip."""
        self.tried += other.tried
        self.found.update(other.found)
        self.undetected += other.undetected

    def share(self, check: str) -> str:
        """Return `found/tried`, a dash for a check that does not apply."""
        return f"{self.found[check]}/{self.tried[check]}" if self.tried[check] else "–"


class Converted:
    """A finished conversion, and another one that was interrupted with its states saved."""

    def __init__(self, source: Path, folder: Path, *, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.config = ConversionConfig.model_validate(
            {
                "source": source,
                "out": folder / "out",
                "device": "cpu",
                "quality": "fast",
                "bpw": 4.0,
                "sensitivity": {"rows": 2},
                "calibration": {
                    "rows": 4,
                    "row_tokens": row_tokens,
                    "measure_rows": 2,
                    "measure_row_tokens": row_tokens,
                },
                "validate_options": ValidateOptions(rows=4, row_tokens=row_tokens, sample_tokens=0),
            }
        )
        self.pipeline = Pipeline(self.config, STAGES, device="cpu")
        for name in self.pipeline.stages:
            self.pipeline.run(name, progress=silent)
        self.spec = resolve(source)
        self.out = self.config.out.resolve()
        self.shards = sorted(self.out.glob("*.safetensors"))
        self.text = text_rows(None, Tokenizer.load(source), rows=4, row_tokens=row_tokens)
        self.runs = 0
        self._stopped: Path | None = None

    def other(self) -> Pipeline:
        """Return a conversion that shares tokens, factors and measurement with this one."""
        self.runs += 1
        out = self.out.with_name(f"other-{self.runs}")
        config = self.config.model_copy(update={"out": out, "bpw": 4.0 - 1e-4 * self.runs})
        return Pipeline(config, STAGES, device="cpu")

    def interrupted(self) -> tuple[Pipeline, Path]:
        """Return a conversion that stopped while quantizing, and the file of its states."""
        pipeline, before = self.other(), store.STATES_INTERVAL_SECONDS

        def stopping(tick: Tick) -> None:
            if tick.done == 2:
                raise Interrupted("stopped", signum=signal.SIGINT)

        pipeline.run("allocate", progress=silent)
        store.STATES_INTERVAL_SECONDS = 0.0
        try:
            pipeline.run("quantize", progress=stopping)
        except Interrupted:
            pass
        finally:
            store.STATES_INTERVAL_SECONDS = before
        found = StageFolder.load(pipeline.path("quantize"))
        assert found is not None
        assert found.manifest.states is not None
        return pipeline, found.path / found.manifest.states.file

    def stopped(self) -> Path:
        """Return the states of a conversion that was interrupted, the same each time."""
        if self._stopped is None:
            self._stopped = self.interrupted()[1]
        return self._stopped

    def bits_of(self, endings: tuple[str, ...]) -> list[range]:
        """Return the bits of the first shard in which tensors of these names lie."""
        with self.shards[0].open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        return [
            range(8 * (8 + size + begin), 8 * (8 + size + end))
            for name, entry in header.items()
            if name.endswith(endings)
            for begin, end in [entry["data_offsets"]]
        ]

    def compares(self) -> bool:
        """Return whether the comparison after compiling accepts the output."""
        quantized = self.pipeline.path("quantize")
        try:
            tensors = _Tensors(self.spec, quantized / "sublayers")
            with torch.inference_mode():
                _compare(self.out, quantized, self.spec, tensors, "cpu")
        except Exl2FlowError:
            return False
        return True

    def passes_gates(self) -> bool:
        """Return whether validation and publishing accept the output's quality."""
        try:
            [score] = evaluate([self.out], self.text, reference=self.config.source)
        except Exl2FlowError:
            return False
        failures = verdict(score, None, self.config.validate_options)[1]
        return not failures and (score.kl_divergence or 0.0) <= MAX_KL

    def finishes(self, pipeline: Pipeline) -> bool:
        """Return whether all stages of another conversion accept what they read."""
        try:
            for name in pipeline.stages:
                pipeline.run(name, progress=silent)
            check_verdict(pipeline.path("validate"))
        except (Exl2FlowError, KeyError):  # or a choice for a matrix that the model lacks
            return False
        score = json.loads((pipeline.path("validate") / "report.json").read_text())["score"]
        return bool(score["kl_divergence"] <= MAX_KL)


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


def attempt(made: Converted, kind: str, *, is_gated: bool, chance: random.Random) -> Counts:
    """Flip a bit of a kind of data; return what found it."""
    if kind == STATES:
        return try_states(made, is_gated=is_gated, chance=chance)
    if kind == UPLOAD:
        return try_upload(made, is_gated=is_gated, chance=chance)
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
