"""A small conversion whose stored data a campaign damages, and what finds the damage."""

import json
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store import store
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import StageFolder
from exl2flow.inference.scoring.evaluate import evaluate
from exl2flow.inference.scoring.text import text_rows
from exl2flow.inference.validate.stage import check_verdict, verdict
from exl2flow.model import Tokenizer, resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.compile.stage import _compare, _Tensors

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
