"""A model's own block that drafts tokens: its bits, its tensors, and runs that go on."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conversions import small_config
from mtp_checkpoints import with_block
from tiny import make_tiny

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.stage import Pipeline
from exl2flow.engine.drafts import DraftKind, Mtp
from exl2flow.inference import Event, Generator, LoadedModel, Request, SamplingSettings, load_model
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.inference.report.record import read_record
from exl2flow.model import resolve
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.allocate.block import block_bytes, block_options, stored_spec
from exl2flow.quant.allocate.layout import carried_tensors
from exl2flow.quant.mtp.stage import MTP
from exl2flow.quant.tokenize.stage import TOKENIZE

MODELS = ("qwen3.5-text", "glm4-moe")
BPW = 5.5
QUICK = {
    "sensitivity": {"kind": "error"},
    "rounding": {"rounds": 0},
    "bpw": 6,
}


def configured(source: Path, **mtp: object) -> ConversionConfig:
    return small_config(source, source.parent / "out", mtp={"bpw": BPW, **mtp}, **QUICK)


@dataclass(frozen=True)
class Converted:
    config: ConversionConfig
    model: LoadedModel


@pytest.fixture(scope="module", params=[MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)])
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    source, _, _ = with_block(request.param, tmp_path_factory.mktemp("block") / "model")
    config = configured(source)
    run_locally(config, stages=[stage for stage in STAGES if stage.name != "validate"])
    return Converted(config, load_model(config.out, device="cpu", max_tokens=256))


def written(model: LoadedModel, draft: Mtp | None) -> tuple[list[int], Event]:
    generator = Generator(model, tokens=512, slots=1, draft=draft)
    events = list[Event]()
    settings = SamplingSettings.greedy()
    request = Request(prompt=[5, 6, 7, 8], max_new_tokens=24, stops=(), settings=settings)
    generator.submit(request, deliver=events.append)
    while not generator.is_idle:
        generator.step()
    return [i for event in events for i in event.ids], events[-1]


def test_a_quantized_block_drafts_and_the_text_stays(converted: Converted) -> None:
    alone, _ = written(converted.model, None)

    text, last = written(converted.model, Mtp(tokens=3))

    assert text == alone
    assert last.statistics is not None
    assert last.statistics.drafts[DraftKind.MTP][0] > 0


def test_the_bits_of_a_block_are_counted_apart(converted: Converted) -> None:
    contents, record = inspect_model(converted.config.out), read_record(converted.config.out)

    assert record is not None
    assert record.block_bpw == contents.block_bpw
    assert contents.block_bpw is not None
    assert contents.block_bpw <= BPW
    assert all(part.rel_err is not None and part.rel_err < 0.2 for part in contents.block)
    assert not [part.name for part in contents.layers if part.name.startswith("mtp")]
    assert contents.bpw <= 6


def stage_files(pipeline: Pipeline) -> dict[str, bytes]:
    folder = pipeline.path("mtp")
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


def interruptions(pipeline: Pipeline, every: int) -> Iterator[None]:
    """Interrupt the stage after every `every` steps and resume it, until it is finished."""
    while True:
        ticks = list[Tick]()

        def count(tick: Tick, seen: list[Tick] = ticks) -> None:
            seen.append(tick)
            if len(seen) == every and tick.done < tick.total:
                signal.raise_signal(signal.SIGTERM)

        try:
            pipeline.run("mtp", progress=count)
        except Interrupted:
            yield
        else:
            return


def test_a_stage_that_was_stopped_goes_on_to_the_same_bytes(
    converted: Converted, tmp_path: Path
) -> None:
    whole = Pipeline(converted.config, STAGES, device="cpu")
    elsewhere = converted.config.model_copy(update={"work_root": tmp_path})
    stopped = Pipeline(elsewhere, [TOKENIZE, MTP], device="cpu")
    stopped.run("tokenize", progress=silent)

    stops = len([*interruptions(stopped, 4)])

    assert stops > 1
    assert stage_files(stopped) == stage_files(whole)


@pytest.mark.parametrize("name", MODELS)
def test_a_block_is_kept_under_its_own_names_or_dropped(name: str, tmp_path: Path) -> None:
    folder, _, _ = with_block(name, tmp_path / "model")
    spec = resolve(folder)
    start = "model.layers.2." if name == "glm4-moe" else "mtp."
    carried = {
        form: set(carried_tensors(stored_spec(configured(folder, block=form), spec)))
        for form in ("quantize", "keep", "drop")
    }

    assert carried["drop"] == carried["quantize"] == set()
    assert carried["keep"]
    assert all(tensor.startswith(start) for tensor in carried["keep"])
    assert not MTP.enabled(configured(folder, block="keep"))


def test_options_of_a_block_change_nothing_for_a_model_without_one(tmp_path: Path) -> None:
    config = configured(make_tiny("llama", tmp_path / "model"))
    spec = resolve(config.source)

    assert not MTP.enabled(config)
    assert block_options(config) == {}
    assert block_bytes(config, spec) == 0
    assert stored_spec(config, spec) is spec
