"""Models as one self-contained HTML page: figures, plots, bits, samples, provenance.

Models of one source that were scored on one text share a section; others are not compared. The
page, written as `page.html.j2`, needs no network and no script. Its content comes from the models'
own folders; the samples come from validation's reports.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from exl2flow.core import words
from exl2flow.core.errors import SourceModelError
from exl2flow.core.options.sweep import SWEEP_FILE
from exl2flow.core.reports import Json, LayerExperts, Score, mapping
from exl2flow.core.store.stage import RECORD_FILE, SOURCE_FINGERPRINT
from exl2flow.inference.report.comparison import (
    Compared,
    check_bitrates,
    compared,
    distinct_names,
    known_score,
)
from exl2flow.inference.report.experts import (
    coverage_in_words,
    expert_rows,
    never_routed,
)
from exl2flow.inference.report.inspection import ModelContents, inspect_model
from exl2flow.inference.report.plots import render_comparison, render_plot, render_tokens
from exl2flow.inference.report.publication import without_paths
from exl2flow.inference.report.record import Record, read_object
from exl2flow.inference.report.tables import bitrate_row, certainty_rows, scored_on

TEMPLATE = "page.html.j2"
VALIDATION = f"validate/{'?' * 16}/report.json"  # of a work directory; none that was set aside
SEEDS = {"seed": "seed of {}", "sample_seed": "seed of the sample"}  # option → in words
FEWEST, MOST = 2.0, 8.0  # bits per weight between which cells are coloured

Found = dict[Path, Json]  # folder of a model → entry of a sweep, or report; empty if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """One model of the page; plots are SVG, that of tokens is empty without experts."""

    figures: Compared
    score: Score
    contents: ModelContents
    record: Record
    sample: str
    plot: str
    tokens_plot: str

    @property
    def experts(self) -> tuple[LayerExperts, ...]:
        """The experts of all layers; none of a dense model."""
        return self.record.experts.layers

    @property
    def source(self) -> Path:
        """The source that the record names, or the model's own folder."""
        return Path(str(self.record.content.get("source") or self.contents.folder))

    @property
    def compared_by(self) -> tuple[object, ...]:
        """Source and text: models that agree in both can be compared.

        The source is recognized by its files, because its folder may be moved or hold another model
        later. Records of older versions name only its folder. Their scores do not name the text;
        its length and the source's figure stand in.
        """
        source = words.perplexity(self.score.reference_perplexity)
        files = self.record.content.get(SOURCE_FINGERPRINT)
        return str(files or self.source), self.score.text or (self.score.tokens, source)


def write_up(folder: Path) -> str:
    """Return the page for a sweep's folder, a folder of models, or a work directory.

    Models of different sources, or scored on different texts, are in sections of their own.

    Raises:
        SourceModelError: no validated model.
    """
    folder = folder.expanduser().resolve()
    folders = _found(folder)
    scores = [score for path in folders if (score := known_score(path)) is not None]
    if not scores:
        raise SourceModelError(
            f"`{folder}` holds no validated models; give the folder that `exl2flow sweep` made, "
            "one with converted models in it, or a work directory in `.exl2flow`"
        )
    models = compared(scores)
    ordered = sorted(zip(scores, models, strict=True), key=lambda pair: pair[1].bytes)
    entries = [_entry(score, model, folders[Path(score.model)]) for score, model in ordered]
    sections = _sections(entries)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bits": words.bits, "shade": _shade, "short": words.short}
    environment.filters |= {"coverage": coverage_in_words, "unused": never_routed}
    environment.filters |= {"expert_rows": expert_rows}
    return environment.get_template(TEMPLATE).render(
        name=sections[0]["name"] if len(sections) == 1 else folder.name,
        count=len(entries),
        sections=sections,
        failed={p.name: without_paths(k["error"]) for p, k in folders.items() if k.get("error")},
        published=read_object(folder / SWEEP_FILE).get("published"),
    )


def _sections(entries: Iterable[ReportEntry]) -> list[Json]:
    """Group models whose figures can be compared, by source."""
    groups: dict[tuple[object, ...], list[ReportEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.compared_by, []).append(entry)
    members = sorted(groups.values(), key=lambda group: str(group[0].source))
    names = distinct_names([group[0].source for group in members])
    return [_section(name, group) for name, group in zip(names, members, strict=True)]


def _section(name: str, entries: Sequence[ReportEntry]) -> Json:
    """Return what the page shows of models of one source, scored on one text, rising in size."""
    first, figures = entries[0], [entry.figures for entry in entries]
    bpws = [{part.name: part.bpw for part in entry.contents.parts} for entry in entries]
    rows = first.record.calibrated_on
    return {
        "name": name,
        "entries": entries,
        "architecture": first.contents.architecture,
        "scored_on": scored_on(first.score),
        "checked": check_bitrates(figures),
        "rows": [bitrate_row(model) for model in figures],
        "certainty": certainty_rows(figures),
        "plot": _inline(render_comparison(figures)),
        # sublayers and head, each with the bits per weight in all models that have it
        "bits": [
            (part, [parts.get(part) for parts in bpws])
            for part in dict.fromkeys(part for parts in bpws for part in parts)
        ],
        "provenance": _provenance(entries),
        "notes": rows.notes if rows else (),  # on the calibration rows, such as too little text
    }


def _found(folder: Path) -> Found:
    """Return the models that a folder holds or names."""
    sweep = read_object(folder / SWEEP_FILE).get("bitrates")
    if isinstance(sweep, dict):
        return {folder / name: known for name, known in sweep.items()}
    reports = sorted([*folder.glob(VALIDATION), *folder.glob(f"*/{VALIDATION}")])
    if reports:
        return _of_reports(map(read_object, reports))
    inside = sorted(path.parent for path in folder.glob(f"*/{RECORD_FILE}"))
    return {path: {} for path in ([folder] if (folder / RECORD_FILE).exists() else inside)}


def _of_reports(reports: Iterable[Json]) -> Found:
    """Return the models of these reports, without those that have changed since."""
    models = {}
    for report in reports:
        folder = Path(str(report.get("model")))
        score = known_score(folder)
        if score is not None and score == Score.of(score.model, mapping(report.get("score"))):
            models[folder] = report
    return models


def _entry(score: Score, figures: Compared, known: Json) -> ReportEntry:
    folder = Path(score.model)
    contents = inspect_model(folder)
    record = contents.record or Record.from_json({})
    experts = record.experts.layers
    plot = render_plot(record.layers, score.kl_divergence, record.predicted_kl)
    return ReportEntry(
        figures=figures,
        score=score,
        contents=contents,
        record=record,
        sample=str(known.get("sample") or ""),
        plot=_inline(plot),
        tokens_plot=_inline(render_tokens(experts)) if experts else "",
    )


def _provenance(entries: Sequence[ReportEntry]) -> list[tuple[str, str]]:
    """Return facts about how the models were made as (fact, values)."""
    provenance: dict[str, dict[str, None]] = {}
    for entry in entries:
        record, calibration = entry.record.content, entry.record.calibrated_on
        options = mapping(record.get("options"))
        facts = {
            "source": entry.source.name if record.get("source") else None,
            "source fingerprint": record.get(SOURCE_FINGERPRINT),
            "quality": options.get("quality"),
            "preferred": mapping(options.get("allocate")).get("prefer"),
            "calibration text": calibration and calibration.dataset,
            "calibration digest": calibration and calibration.sha256,
            **{f"version of {name}": v for name, v in (record.get("versions") or {}).items()},
            **dict(_seeds(options)),
        }
        for name, value in facts.items():
            if value is not None:
                provenance.setdefault(name, {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in provenance.items()]


def _seeds(options: Json) -> Iterable[tuple[str, object]]:
    for group, values in options.items():
        if isinstance(values, Mapping):
            for name in SEEDS.keys() & values.keys():
                yield SEEDS[name].format(group), values[name]


def _inline(svg: str) -> str:
    """Return an SVG document as an element of a page."""
    return svg[svg.index("<svg") :]


def _shade(bpw: float | None) -> str:
    """Return the shade of a cell, 0 to 1."""
    return "0" if bpw is None else f"{min(1.0, max(0.0, (bpw - FEWEST) / (MOST - FEWEST))):.2f}"
