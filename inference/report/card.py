"""The card of a repository: quality, memory and origin of its bitrates, all from records."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from exl2flow.core import words
from exl2flow.core.reports import CarriedReport, Json, mapping
from exl2flow.inference.report.comparison import Compared
from exl2flow.inference.report.experts import coverage_in_words, mean_changed_routes
from exl2flow.inference.report.publication import Bitrate, Origin
from exl2flow.inference.report.tables import (
    Row,
    bitrate_row,
    certainty_rows,
    markdown_table,
    scored_on,
)
from exl2flow.model.memory.footprint import cache_bytes

TEMPLATE = "card.md.j2"
EXLLAMAV2 = "exllamav2"
TAGS = ("exl2", EXLLAMAV2, "exl2flow", "quantized")
FORMS = ("fp16", "q8", "q6", "q4")  # of the cache, that the card lists
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
SHORT = 12  # digits of digests for people
DIGESTS = ("sha256 of its rows", "fingerprint")


def render_card(
    repo: str,
    bitrates: Sequence[Bitrate],
    origin: Origin,
    *,
    notes: Sequence[str] = (),
    has_measurement: bool = False,
) -> str:
    """Return the card as Markdown with metadata in front.

    Args:
        repo: where it is published.
        bitrates: all bitrates of the repository, in any order.
        origin: their source.
        notes: problems that were overridden.
        has_measurement: whether `main` has one.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=False,  # Markdown
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    ordered = sorted(bitrates, key=lambda bitrate: bitrate.bpw)
    figures = [_figures(bitrate) for bitrate in ordered]
    scores = [bitrate.score for bitrate in ordered if bitrate.score is not None]
    example = min(ordered, key=lambda bitrate: abs(bitrate.bpw - 4))
    name = repo.rpartition("/")[2]
    is_loaded = all(map(_exllamav2_loads, ordered))
    return environment.get_template(TEMPLATE).render(
        metadata=_metadata(origin, [tag for tag in TAGS if is_loaded or tag != EXLLAMAV2]),
        name=name.removesuffix("-exl2"),
        repo=repo,
        source=_source(origin),
        has_measurement=has_measurement,
        is_lossy=any(bitrate.record.content.get("source_form") == "gptq" for bitrate in ordered),
        notes=notes,
        bitrates=ordered,
        table=markdown_table([_row(repo, model) for model in figures]),
        certainty=markdown_table(certainty_rows(figures)),
        scored_on=scored_on(scores[0]) if scores else "",
        forms=[{"name": form, "table": _memory(form, ordered)} for form in FORMS],
        example=example.branch,
        is_in_exllamav2=is_loaded,
        architecture=example.spec.family.architecture,
        folder=f"{name.removesuffix('-exl2')}-{example.branch}",
        experts=_experts(ordered, of=example),
        facts=_facts(ordered, origin),
    )


def _row(repo: str, model: Compared) -> Row:
    """Return a line of the table of bitrates, with a link to the branch."""
    link = f"[{model.label}](https://huggingface.co/{repo}/tree/{model.label})"
    return {**bitrate_row(model), "model": link}


def _figures(bitrate: Bitrate) -> Compared:
    return Compared(
        label=bitrate.branch,
        series=None,
        bpw=bitrate.bpw,
        bytes=bitrate.weight_bytes,
        kl=None if bitrate.score is None else bitrate.score.kl_divergence,
        predicted_kl=bitrate.record.predicted_kl,
        score=bitrate.score,
    )


def _exllamav2_loads(bitrate: Bitrate) -> bool:
    """Return whether exllamav2 knows the architecture and all that its files hold."""
    declared = mapping(bitrate.spec.config.get("quantization_config")).get("extension")
    return bitrate.spec.family.is_in_exllamav2 and not (declared or bitrate.spec.extension)


def _metadata(origin: Origin, tags: Sequence[str]) -> Json:
    """Return the metadata that the Hub reads, without unknown entries."""
    metadata = {
        "base_model": origin.repo,
        "base_model_relation": "quantized" if origin.repo else None,
        "license": origin.license,
        "license_name": origin.license_name,
        "license_link": _absolute(origin),
        "pipeline_tag": "text-generation",
        "tags": list(tags),
    }
    return {key: value for key, value in metadata.items() if value is not None}


def _absolute(origin: Origin) -> str | None:
    """Return the link to the licence; a file name leads to the source's repository."""
    link = origin.license_link
    if link is None or "://" in link or origin.repo is None:
        return link
    return f"https://huggingface.co/{origin.repo}/blob/{origin.commit or 'main'}/{link}"


def _source(origin: Origin) -> str:
    if origin.repo is None:
        return "a model that is not on the Hub"
    link = f"[{origin.repo}](https://huggingface.co/{origin.repo})"
    return link if origin.commit is None else f"{link} at commit `{origin.commit}`"


def _memory(form: str, bitrates: Sequence[Bitrate]) -> str:
    """Return weights and cache of one form, by the lengths that the model has positions for."""
    longest = min(bitrate.spec.max_positions for bitrate in bitrates)
    contexts = [tokens for tokens in CONTEXTS if tokens <= longest] or [longest]
    rows = []
    for bitrate in bitrates:
        row = {"branch": bitrate.branch}
        for tokens in contexts:
            cache = cache_bytes(bitrate.spec, context=tokens, cache_format=form)
            row[f"{tokens:,}"] = words.size(bitrate.weight_bytes + cache)
        rows.append(row)
    return markdown_table(rows)


def _experts(bitrates: Sequence[Bitrate], *, of: Bitrate) -> str:
    """Say how well the text covered the experts of one bitrate, and which routes changed in all."""
    layers = of.record.experts.layers
    if not layers:
        return ""
    changed = {
        bitrate.branch: mean_changed_routes(bitrate.record.experts.layers) for bitrate in bitrates
    }
    shares = [f"{words.percent(s)} at {name}" for name, s in changed.items() if s is not None]
    text = f"{coverage_in_words(layers)}."
    if shares:
        text += f" Of the choices of experts, these differ from the source's: {', '.join(shares)}."
    return text


def _facts(bitrates: Sequence[Bitrate], origin: Origin) -> str:
    """Return how the bitrates were made: a row per fact."""
    paths = {
        "exl2flow": ("versions", "exl2flow"),
        "torch": ("versions", "torch"),
        "form of the source": ("source_form",),
        "quality preset": ("options", "quality"),
        "preferred": ("options", "allocate", "prefer"),
        "bits of the head": ("quantization_config", "head_bits"),
        "calibration": ("calibration", "dataset"),
        "sha256 of its rows": ("calibration", "sha256"),
        "seed of calibration": ("options", "calibration", "seed"),
        "seed of sensitivity": ("options", "sensitivity", "seed"),
        "fingerprint": ("fingerprint",),
    }
    commit = (origin.commit or words.UNKNOWN)[:SHORT]
    rows = [{"": "source commit", **{bitrate.branch: commit for bitrate in bitrates}}]
    carried = {bitrate.branch: bitrate.record.not_quantized for bitrate in bitrates}
    if any(carried.values()):
        apart = {branch: _apart(known) for branch, known in carried.items()}
        rows.append({"": "not quantized", **apart})
    if any(bitrate.record.block_bpw for bitrate in bitrates):
        known = {bitrate.branch: bitrate.record.block_bpw for bitrate in bitrates}
        cells = {
            branch: "none" if bpw is None else words.bits(bpw) for branch, bpw in known.items()
        }
        rows.append({"": "bits per weight of the MTP block", **cells})
    for name, path in paths.items():
        cells = {b.branch: _found({**b.spec.config, **b.record.content}, path) for b in bitrates}
        if name in DIGESTS:
            cells = {branch: value[:SHORT] for branch, value in cells.items()}
        rows.append({"": name, **cells})
    return markdown_table(rows)


def _apart(carried: CarriedReport | None) -> str:
    """Describe the tensors that are stored as in the source."""
    if carried is None or carried.bytes is None:
        return "none"
    return f"{carried.parts} ({words.size(carried.bytes)})"


def _found(content: Json, path: Sequence[str]) -> str:
    """Return an entry of nested objects in words."""
    *objects, last = path
    for key in objects:
        content = mapping(content.get(key))
    value = content.get(last)
    return words.UNKNOWN if value is None else str(value)
