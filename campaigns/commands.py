"""Small commands of every kind, to be disturbed: what they need, how they run, what they leave.

All they write lies below one folder, the disk; what they read lies beside it.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_conversions
from hub_server import Hub, serving, used_by_client
from huggingface_hub import _tree_cache
from refinements import rough_model
from stage_runs import foreign_measurement, text_parquet
from tiny import make_tiny

from exl2flow.cli.output.failures import of_the_machine
from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.config import ConversionConfig, SharedOptions
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.store import store
from exl2flow.core.store.cleaning import clean_after
from exl2flow.core.store.source import HubModel
from exl2flow.core.store.stage import Stage
from exl2flow.inference.report import page
from exl2flow.inference.validate import stage as validate_stage
from exl2flow.model import resolve
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.hub.publish import publish
from exl2flow.pipeline.local import run_locally, sweep_locally
from exl2flow.pipeline.stages import STAGES

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
ROWS = {"rows": 2, "row_tokens": 32, "measure_rows": 1, "measure_row_tokens": 32}
JUDGED = {"rows": 1, "row_tokens": 32, "sample_tokens": 1, "fail_perplexity_ratio": 1000}
TUNED = {"steps": 4, "tokens": 32, "interval": 2, "held_out_rows": 1}
OPENED = hub_tasks.Hub.open
TIMEOUT_SECONDS = 20.0  # for an answer of the Hub
REPO, SOURCE = "org/tiny-exl2", "org/tiny"
PASSING = ("seconds", "versions", "checksum", "states")  # fields of a manifest
UNCOMPARED = (".lock", "digests.json")  # ends of names: they say who, or when


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its disk, what it does, and the Hub that it talks to, if any."""

    disk: Path
    run: Callable[[], object]
    hub: Hub | None = None

    def results(self) -> dict[str, object]:
        """Return all that must not depend on how the command came to its end."""
        found: dict[str, object] = {}
        for path in sorted(self.disk.rglob("*")):
            name = str(path.relative_to(self.disk))
            is_apart = "/locks/" in name or ".cache/" in name or path.name.endswith(UNCOMPARED)
            if path.is_file() and path.name != "lock" and not is_apart:
                is_manifest = path.name == store.MANIFEST and (path.parent.name).isalnum()
                found[name] = _manifest(path) if is_manifest else path.read_bytes()
        if self.hub is not None:
            found["hub"] = json.loads(json.dumps(self.hub.repos))
        return found


def _manifest(path: Path) -> object:
    """Return what a manifest says, without times."""
    content = {k: v for k, v in json.loads(path.read_bytes()).items() if k not in PASSING}
    content["files"] = {n: (r["sha256"], r["size"]) for n, r in content["files"].items()}
    return content


def differing(found: dict[str, object], wanted: dict[str, object]) -> list[str]:
    """Return the names of results that differ."""
    names = sorted(found.keys() | wanted.keys())
    return [name for name in names if found.get(name) != wanted.get(name)]


def problem_of(error: Exception) -> str | None:
    """Return what a user reads of an error; None if it is a defect: it would be a traceback."""
    if isinstance(error, Exl2FlowError):
        return f"{type(error).__name__}: {error}"
    return of_the_machine(error)


@contextmanager
def quietly() -> Iterator[None]:
    """Print no warnings, save states after every sublayer, draw each plot once, use one thread."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "STATES_INTERVAL_SECONDS", 0.0)
        for module in (validate_stage, page):
            patch.setattr(module, "render_plot", _drawn_once(module.render_plot))
        patch.setattr(page, "render_comparison", _drawn_once(page.render_comparison))
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _drawn_once(draw: Callable[..., str]) -> Callable[..., str]:
    drawn: dict[str, str] = {}

    def look_up(*shown: Any) -> str:
        key = repr(shown)
        if key not in drawn:
            drawn[key] = draw(*shown)
        return drawn[key]

    return look_up


def toy(root: Path) -> Command:
    """Stages that write files and compute nothing, and the cleaning after them."""
    source, disk = toy_conversions.model(root / "model"), root / "disk"
    config = ConversionConfig(
        source=source, out=disk / "out", work_root=disk / "work", device="cpu", clean_after=True
    )

    def run() -> None:
        toy_conversions.RAN.clear()
        toy_conversions.convert(config)
        clean_after(config, toy_conversions.STAGES)

    return Command(disk=disk, run=run)


def conversion(
    root: Path, stages: Sequence[Stage[ConversionConfig]] = STAGES, **values: object
) -> tuple[Command, ConversionConfig]:
    """A conversion of a model of one layer."""
    source = make_tiny("llama", root / "model", **SMALL)  # type: ignore[arg-type]  # config keys
    disk = root / "disk"
    given = {
        "source": source,
        "out": disk / "out",
        "work_root": disk / "work",
        "device": "cpu",
        "calibration": {"text": text_parquet(root / "text.parquet"), **ROWS},
        "validate_options": JUDGED,
    }
    config = ConversionConfig.model_validate({**given, **values})
    return Command(disk=disk, run=lambda: run_locally(config, stages=stages)), config


def best(root: Path) -> Command:
    """The preset `best`: trials of allocations, correction, tuning."""
    return conversion(root, quality="best", tune=TUNED)[0]


def measured(root: Path, **values: object) -> tuple[Command, ConversionConfig]:
    """A conversion whose measurement is given, cleaned in the end."""
    source = make_tiny("llama", root / "model", **SMALL)  # type: ignore[arg-type]  # config keys
    given = {
        "measurement": foreign_measurement(root / "measurement.json", resolve(source)),
        "quality": "exllamav2",
        "bpw": 5,
        "clean_after": True,
    }
    return conversion(root, **{**given, **values})


def composed(root: Path) -> Command:
    """A conversion with rows that the model writes."""
    return measured(root, calibration={**ROWS, "text": "self", "share": 1.0})[0]


def sweep(root: Path) -> Command:
    """Two bitrates and a report."""
    command, config = measured(root)
    shared = {name: getattr(config, name) for name in SharedOptions.model_fields}
    both = SweepConfig.model_validate({**shared, "bpw": (5, 7)})
    return Command(disk=command.disk, run=lambda: sweep_locally(both))


def refined(root: Path) -> Command:
    """A refinement of a roughly converted model."""
    wider = {**SMALL, "hidden_size": 64, "intermediate_size": 64}
    source, model = rough_model(root / "rough", "llama", **wider)
    disk = root / "disk"
    calibration = {**ROWS, "text": text_parquet(root / "text.parquet"), "rows": 6}
    config = RefinementConfig(
        source=source,
        model=model,
        out=disk / "out",
        work_root=disk / "work",
        device="cpu",
        calibration=calibration,
        validate_options=JUDGED,
        sensitivity={"rows": 2},
        held_out_rows=2,
    )
    return Command(disk=disk, run=lambda: run_locally(config))


@contextmanager
def published(root: Path) -> Iterator[Command]:
    """A source fetched from a Hub, and a converted model published on it."""
    made, config = conversion(root, quality="fast")
    (config.source / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    made.disk.mkdir()
    made.run()
    model = shutil.copytree(config.out, root / "3.0bpw")
    shutil.rmtree(made.disk)
    with serving(root / "hub") as hub, used_by_client(hub), ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(hub_tasks.Hub, "open", impatient)
        hub.add_folder(SOURCE, config.source, card={"license": "mit"})
        release = PublishConfig(
            models=(model,),
            repo=REPO,
            device="cpu",
            max_kl=1000,
            force=True,
            base_model=SOURCE,
            sample_tokens=1,
            work_root=made.disk / "work",
        )

        def run() -> None:
            _tree_cache._IN_MEMORY_TREE_CACHE.clear()  # a new process has none
            client = impatient()
            hub_tasks.fetch(HubModel(repo=SOURCE), made.disk / "work", client)
            publish(release, client)

        yield Command(disk=made.disk, run=run, hub=hub)


def impatient(token: str | None = None) -> hub_tasks.Hub:
    """Return a client that waits no time between its attempts."""
    return hub_tasks.Hub(api=OPENED(token).api, waits=(0.0, 0.0), timeout=TIMEOUT_SECONDS)


COMMANDS: dict[str, Callable[[Path], Command]] = {
    "toy": toy,
    "best": best,
    "composed": composed,
    "refine": refined,
    "sweep": sweep,
}


@dataclass
class Opened:
    """Commands that are made when first asked for, in a folder."""

    root: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def command(self, name: str) -> Command:
        """Make a command's inputs and return it; its disk is empty."""
        root = self.root / name
        root.mkdir(parents=True)
        if name == "publish":
            made = self.stack.enter_context(published(root))
        else:
            made = COMMANDS[name](root)
        shutil.rmtree(made.disk, ignore_errors=True)
        made.disk.mkdir()
        return made


NAMES = (*COMMANDS, "publish")
