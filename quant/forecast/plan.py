"""The plan of a run: its steps, the memory and disk it needs, and what a resume still does."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import StoreError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.store.changes import Outlook, outlook, stage_rows
from exl2flow.core.store.files import read_json
from exl2flow.core.store.need import Need
from exl2flow.core.store.outline import place_of
from exl2flow.core.store.source import DIGESTS_FILE
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.core.store.store import StageFolder
from exl2flow.kernels import resolve_device
from exl2flow.model import Composition, ModelSpec
from exl2flow.quant.forecast.gpu_fit import GpuFit, in_words
from exl2flow.quant.measure.candidates import FAST_GROUP
from exl2flow.quant.walk.needs import Card

MOST_NAMES = 8  # of files or tensors that are listed
BASE_MEMORY = 700 * 2**20  # interpreter, torch, Prefect
CUDA_MEMORY = 800 * 2**20  # what CUDA, its libraries and kernels add to it


def base_memory(card: Card | None) -> int:
    """Return the main memory of a process that has done nothing yet, in bytes."""
    return BASE_MEMORY + (CUDA_MEMORY if card else 0)


def what_is_left(
    config: RunOptions,
    stages: Sequence[Stage[Any]],
    needs: Mapping[str, Need],
    *,
    anew: bool = False,
) -> tuple[dict[str, Need], tuple[Outlook, ...]]:
    """Return what the unfinished stages still need, and what a run does with each stage.

    Without stages, or if no earlier run has digested the source, all are left;
    of those that are made `anew`, nothing counts as finished.
    """
    pipeline = None if anew or not stages else begun_pipeline(config, stages)
    if pipeline is None:
        names = [stage.name for stage in stages if stage.enabled(config)] or [*needs]
        return {name: need for name, need in needs.items() if name in names}, ()
    stages_now = outlook(pipeline)
    names = [now.stage for now in stages_now if now.state != "finished" and now.stage in needs]
    return {name: _less(needs[name], _valid_bytes(pipeline, name)) for name in names}, stages_now


def begun_pipeline(config: RunOptions, stages: Sequence[Stage[Any]]) -> Pipeline | None:
    """Return the stages in their folders, if an earlier run has digested the source."""
    try:
        remembered = list(read_json(config.work_dir_root / DIGESTS_FILE))
    except (StoreError, TypeError):
        remembered = []
    source = f"{place_of(config.source)}/"
    if not any(str(path).startswith(source) for path in remembered):
        return None
    return Pipeline(config, stages, device=resolve_device(config.device).type)


def _valid_bytes(pipeline: Pipeline, name: str) -> int:
    """Return the bytes of a stage's files that a resume keeps, those in `--out` included."""
    folder = StageFolder.load(pipeline.path(name), pipeline.refs[name].fingerprint)
    if folder is None or folder.manifest.device != pipeline.device:
        return 0
    records = [r for file, r in folder.manifest.files.items() if folder.valid(file)]
    states = folder.manifest.states
    if states is not None and states.record.matches(folder.path / states.file):
        records.append(states.record)
    return sum(record.size for record in records)


def _less(need: Need, stored: int) -> Need:
    """Subtract bytes that are already on disk, first from what stays."""
    kept = max(0, need.kept_bytes - stored)
    passing = max(0, need.kept_bytes + need.passing_bytes - stored) - kept
    output = max(0, need.output_bytes - stored)
    return replace(need, kept_bytes=kept, passing_bytes=passing, output_bytes=output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Forecast of a run and of what is left to do; sizes in bytes.

    unused_gpu: why `auto` took the CPU although there is a GPU;
    left: what the unfinished stages still need; stages: what a run does with each of them, if an
    earlier run has digested the source; download_bytes: what a run fetches from the Hub first;
    carried, left_out: files of the source; unused: tensors
    that the model does not need;
    not_quantized: how many tensors of other parts, such as vision towers, the output keeps as they
    are, and their bytes; block: what becomes of the source's block that drafts tokens, empty: none.
    """

    model: str
    architecture: str
    layers: int
    weights: int
    device: str
    unused_gpu: str | None
    calibration: str
    target: str
    prefer: str
    reachable_bpw: tuple[float, float]
    output_bytes: int
    work_bytes: int
    memory_bytes: int
    needs: Mapping[str, Need]
    left: Mapping[str, Need]
    finished: tuple[str, ...]
    stages: tuple[Outlook, ...]
    card: Card | None
    cards: tuple[Card, ...]
    dealt: tuple[str, ...]
    gpu_fits: tuple[GpuFit, ...]
    work_dir: str
    out: str
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    unused: tuple[str, ...]
    not_quantized: tuple[int, int]
    download_bytes: int = 0
    block: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON."""
        return asdict(self)

    def rows(self, names: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
        """Return (what, value) for people; `names` maps options to what people call them."""
        low, high = self.reachable_bpw
        count = f"{self.layers} layers, {self.weights / 1e6:.1f} M weights"
        named = {name: need for name, need in self.needs.items() if name != "tokenize"}
        memory = [
            f"{name} {(base_memory(self.card) + need.memory_bytes) / 1e9:.2f}"
            for name, need in named.items()
            if need.memory_bytes
        ]
        rows = [("model", f"{self.model} ({self.architecture}, {count})")]
        if self.download_bytes:
            fetched = words.size(self.download_bytes)
            rows.append(("download", f"{fetched} from the Hub, to {self.work_dir}"))
        rows += [
            ("device", f"{self.device}; {self.unused_gpu}" if self.unused_gpu else self.device),
            ("calibration", self.calibration),
            ("target", f"{self.target} (decoder's reachable bpw: {low:.2f} to {high:.2f})"),
        ]
        if self.block:
            rows.append(("MTP block", self.block))
        if self.prefer == "speed":
            rows.append(("prefer", f"speed: groups of {FAST_GROUP} rows in all layers"))
        rows += [
            ("output", f"{self.out}, about {words.size(self.output_bytes)}"),
            ("checkpoints", f"{self.work_dir}, up to {words.size(self.work_bytes)}"),
            ("memory", f"up to {words.size(self.memory_bytes)}: {', '.join(memory)}"),
            ("carried", ", ".join(self.carried)),
        ]
        if self.left_out:
            rows.append(("left out", _some(self.left_out)))
        if self.unused:
            rows.append(("not used", _some(self.unused)))
        tensors, total_bytes = self.not_quantized
        if tensors:
            text = f"{tensors} tensors of other parts, {words.size(total_bytes)}, kept as they are"
            rows.append(("not quantized", text))
        if self.card:
            alone = (
                [] if len(self.cards) < 2 else [name for name in named if name not in self.dealt]
            )
            on_card = [
                f"{name} {need.gpu_memory_bytes / 1e9:.1f}"
                + " (states in main memory)" * bool(need.pinned_bytes)
                + " (first GPU)" * (name in alone)
                for name, need in named.items()
                if need.gpu_memory_bytes
            ]
            rows.append(("GPU memory", f"{', '.join(on_card)} of {self._memory()}"))
        rows.append(("GPU fit", in_words(self.gpu_fits)))
        if self.finished:
            rows.append(("finished", ", ".join(self.finished)))
        return rows + stage_rows(self.stages, names or {})

    def _memory(self) -> str:
        """Return what tensors may take of each GPU."""
        name = self.cards[0].name
        rooms = [f"{card.memory / 1e9:.1f}" for card in self.cards]
        if len(rooms) == 1:
            return f"{rooms[0]} GB of the {name}"
        return f"{rooms[0] if len({*rooms}) == 1 else ', '.join(rooms)} GB of each {name}"


def _some(names: Sequence[str]) -> str:
    """Return the first of many names."""
    shown = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def calibration_in_words(config: RunOptions, spec: ModelSpec, card: Card | None) -> str:
    """Describe the calibration rows."""
    options = config.calibration
    text = f"{options.rows} rows x {options.row_tokens} tokens, {config.rows_in_words}"
    if options.text == "chat":
        text += f"; {options.special_rows(options.rows)} of the rows are dialogues"
    if config.writes:
        plan = Composition.of_run(spec, config, card.memory if card else None)
        rows = (
            (options.written_rows, "of the rows itself"),
            (config.training_rows, "to be trained on"),
        )
        written = " and ".join(f"{count} {use}" for count, use in rows if count)
        text += f"; the model first writes {written}"
        text += f", as {plan.texts} texts, {plan.at_once} at a time"
    return text
