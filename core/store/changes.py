"""Which inputs changed since a stage last ran, and so what a run will do again.

An input is named as the user sets it: by the dotted name of an option, such as `rounding.rounds`,
by a file, or by the schema number of a stage's code.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from exl2flow.core.errors import ReadFailed
from exl2flow.core.store.manifest import RunRecord, StageManifest, versions
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import MANIFEST, StageFolder, with_inputs

Results = Mapping[str, StageFolder]  # by fingerprint
State = Literal["finished", "continues", "again", "begins"]

DIGEST = re.compile(r"[0-9a-f]{64}")
REFINED = "model"  # an option of refinements only
SHOWN_DIGITS = 12  # of a digest
MOST_FILES = 3  # that are listed
# Groups of the options that stages store without the group's name
GROUPS = {"tokenize": "calibration", "sensitivity": "sensitivity", "validate": "validate_options"}
# Other entries of a stage's options, in words
NAMES = {
    "tokenize.file": "`calibration.text`",
    "tokenize.own": "`calibration.text`",
    "compile.dataset": "`calibration.text`",
    "tokenize.judging": "the built-in held-out text",
    "tokenize.further": "`tune.rows`",
    "tokenize.further_text": "rows of `calibration.text` that are only trained on",
    "tokenize.dialogues": "the built-in dialogues",
    "tokenize.template": "the model's chat template",
    "compose.rows": "how many rows the model writes",
    "compose.tokens": "tokens per row that the model writes",
    "compose.span": "tokens per text that the model writes",
    "compose.seed": "`calibration.seed`",
    "compose.openings": "how the texts begin that the model writes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One input that differs; `what` has the names of options in backticks."""

    what: str
    before: str
    now: str

    def words(self, names: Mapping[str, str]) -> str:
        """Return the change for people; `names` maps options to what people call them."""
        what = self.what
        for option, name in names.items():
            what = what.replace(f"`{option}`", f"`{name}`")
        return f"{what} {self.before} -> {self.now}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The work of a run on a stage, and its reason.

    finished: nothing; continues: from its checkpoints; again: although there is an earlier result;
    begins: for the first time. detail: what else there is to say; changes: since the earlier one.
    """

    stage: str
    state: State
    detail: str = ""
    changes: tuple[Change, ...] = ()

    def reason(self, names: Mapping[str, str]) -> str:
        """Return the detail and the changes for people."""
        changes = [change.words(names) for change in self.changes]
        return "; ".join([*([self.detail] if self.detail else []), *changes])

    def row(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return a row of a table for people."""
        return {"stage": self.stage, "state": self.state, "why": self.reason(names)}


def stage_rows(stages: Sequence[Outlook], names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (what, value) for a plan: what changed, what is done again, what continues."""
    again = [e for e in stages if e.state == "again"]
    changed = dict.fromkeys(change.words(names) for e in again for change in e.changes)
    continued = [f"{e.stage} {e.detail}" for e in stages if e.state == "continues"]
    parts = {
        "changed": "; ".join(changed),
        "again": ", ".join(e.stage + f" ({e.detail})" * bool(e.detail) for e in again),
        "continues": ", ".join(continued),
    }
    return [(what, value) for what, value in parts.items() if value]


def outlook(pipeline: Pipeline) -> tuple[Outlook, ...]:
    """Return what a run of the pipeline would do with every stage.

    Raises:
        ReadFailed: a manifest, or a file that it lists, cannot be read.
    """
    results = _results_for(pipeline)
    return tuple(_outlook(pipeline, name, results) for name in pipeline.stages)


def _outlook(pipeline: Pipeline, name: str, results: Results) -> Outlook:
    state, detail = _state(pipeline, name)
    before = None if state == "again" else _earlier(pipeline, name, results)
    changes = () if before is None else _changes(pipeline, name, before, results)
    if state == "begins" and before is not None:
        state = "again"
    return Outlook(stage=name, state=state, detail=detail, changes=tuple(dict.fromkeys(changes)))


def _state(pipeline: Pipeline, name: str) -> tuple[State, str]:
    """Return what a run would do with a stage, judged by its folder alone, and details."""
    path = pipeline.path(name)
    folder = StageFolder.load(path, pipeline.refs[name].fingerprint)
    if folder is None:
        is_damaged = path.is_dir() and any(path.iterdir())
        return ("again", "its manifest is damaged") if is_damaged else ("begins", "")
    manifest = folder.manifest
    if pipeline.is_complete(name):
        return "finished", _versions(manifest)
    if manifest.status == "cleared":
        return "again", "`exl2flow clean` removed its tensors, which are needed again"
    if manifest.status == "complete":
        lost = [file for file in manifest.files if not folder.valid(file)]
        return "again", f"changed or deleted: {_some(lost)}"
    if not folder.has_results():
        return "begins", ""
    detail = f"after {manifest.cursor} of {manifest.total}"
    if manifest.device != pipeline.device:
        detail += f", but it was begun on {manifest.device} and this is {pipeline.device}"
    return "continues", detail


def _some(files: Sequence[str]) -> str:
    """Return the first of many files."""
    more = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
    return ", ".join(f"`{file}`" for file in files[:MOST_FILES]) + more


def _versions(manifest: StageManifest) -> str:
    """Name the packages whose versions differ; they do not make a result invalid."""
    now = versions()
    other = [f"{n} {v}, now {now[n]}" for n, v in manifest.versions.items() if now.get(n, v) != v]
    return f"made with {' and '.join(other)}" if other else ""


def _earlier(pipeline: Pipeline, name: str, results: Results) -> StageFolder | None:
    """Return the last other result of a stage; for a result that exists, the last one before it."""
    wanted = pipeline.refs[name].fingerprint
    manifest = pipeline.path(name) / MANIFEST
    end = manifest.stat().st_mtime if manifest.is_file() else float("inf")
    others = [f for f in results.values() if f.manifest.stage == name]
    others = [f for f in others if f.manifest.fingerprint != wanted and f.saved_at <= end]
    return max(others, key=lambda folder: folder.saved_at, default=None)


def _results_for(pipeline: Pipeline) -> Results:
    """Return the results of runs of this kind into this output, and all results that they used.

    Results of versions that did not record their runs count as such of a conversion.
    """
    given = RunRecord.of((), pipeline.config).config
    known = {folder.manifest.fingerprint: folder for folder in _folders(pipeline)}

    def is_ours(run: RunRecord | None) -> bool:
        config = given if run is None else run.config
        is_refinement = run is not None and REFINED in run.config
        return is_refinement == (REFINED in given) and config["out"] == given["out"]

    ours = with_inputs((f for f, folder in known.items() if is_ours(folder.manifest.run)), known)
    return {fingerprint: known[fingerprint] for fingerprint in sorted(ours)}


def _folders(pipeline: Pipeline) -> Iterator[StageFolder]:
    """Yield all results for this source, those before it was changed included."""
    source = str(pipeline.config.source.resolve())
    slug = pipeline.work.root.name.rpartition("-")[0]  # of the name that the source had first
    for path in pipeline.config.work_dir_root.glob(f"{slug}-*/*/*/{MANIFEST}"):
        with suppress(ReadFailed):
            folder = StageFolder.load(path.parent)
            if folder is None or path.parent.suffix:  # set aside or removed
                continue
            run = folder.manifest.run
            if path.parents[2] == pipeline.work.root or (run and run.config["source"] == source):
                yield folder


def _changes(
    pipeline: Pipeline, name: str, before: StageFolder, results: Results
) -> Iterator[Change]:
    """Yield what differs between an earlier result and the one wanted now, inputs included."""
    manifest, now = before.manifest, pipeline.input_fingerprints(pipeline.stages[name])
    for stage in dict.fromkeys([*manifest.inputs, *now]):
        old, new = manifest.inputs.get(stage), now.get(stage)
        if old is None or new is None:
            before_it, now_it = ("off" if run is None else "on" for run in (old, new))
            yield Change(what=f"stage `{stage}`", before=before_it, now=now_it)
        elif old != new:
            if old in results:
                yield from _changes(pipeline, stage, results[old], results)
            else:
                yield Change(what=f"result of `{stage}`", before=_shown(old), now=_shown(new))
    if before.path.parents[1] != pipeline.work.root:
        yield from _source_changes(pipeline, before)
    schema = pipeline.stages[name].schema
    if manifest.schema_version != schema:
        was = f"schema {manifest.schema_version}"
        yield Change(what=f"code of `{name}`", before=was, now=f"schema {schema}")
    yield from _option_changes(pipeline, name, manifest)


def _source_changes(pipeline: Pipeline, before: StageFolder) -> Iterator[Change]:
    old, new = before.manifest.source, pipeline.source.files
    for file in sorted({*old, *new}):
        if old.get(file) != new.get(file):
            what = f"source file `{file}`"
            yield Change(what=what, before=_shown(old.get(file)), now=_shown(new.get(file)))


def _option_changes(pipeline: Pipeline, name: str, manifest: StageManifest) -> Iterator[Change]:
    """Yield the options of a stage that differ, with the values that the user gave."""
    old, new = dict(_flat(manifest.options)), dict(_flat(pipeline.options[name]))
    given = RunRecord.of((), pipeline.config).config
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if was == now:
            continue
        what = _name(name, key)
        option = what.strip("`")
        values = manifest.run and _value(manifest.run.config, option), _value(given, option)
        if manifest.run and values[0] != values[1]:
            was, now = values
        elif what == f"`{option}`" and any(DIGEST.fullmatch(str(v)) for v in (was, now)):
            what = f"contents of {what}"
        yield Change(what=what, before=_shown(was), now=_shown(now))


def _name(stage: str, key: str) -> str:
    """Return what people call an entry of a stage's options."""
    if words := NAMES.get(f"{stage}.{key}"):
        return words
    group, _, rest = key.partition(".")
    match group:
        case "files":
            return f"source file `{rest}`"
        case "limit":
            return "`max_memory`"
        case "target":
            return f"`{rest}`"
        case "rope":
            return f"`{key}`"
    return f"`{GROUPS[stage]}.{key}`" if stage in GROUPS else f"`{key}`"


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of nested options; a file's name stays whole."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(config: Mapping[str, Any], option: str) -> object:
    """Return the value of an option, None if the run has no such option."""
    value: Any = config
    for part in option.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if not isinstance(value, str):
        return json.dumps(value)
    return value[:SHOWN_DIGITS] if DIGEST.fullmatch(value) else value
