"""The card of a repository: what its bitrates are worth, need and come from; all from records."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from exl2flow.core import words
from exl2flow.inference.report.comparison import Compared
from exl2flow.inference.report.publication import Bitrate, Origin
from exl2flow.inference.report.tables import Row, bitrate_row, markdown_table, scored_on
from exl2flow.model.footprint import cache_bytes

TEMPLATE = "card.md.j2"
TAGS = ("exl2", "exllamav2", "exl2flow", "quantized")
FORMS = ("fp16", "q8", "q6", "q4")  # of the cache, that the card lists
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
SHORT = 12  # digits of digests for people


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
        bitrates: all that are there, in any order.
        origin: their source.
        notes: what was overridden.
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
    scores = [bitrate.score for bitrate in ordered if bitrate.score is not None]
    example = min(ordered, key=lambda bitrate: abs(bitrate.bpw - 4))
    name = repo.rpartition("/")[2]
    contexts = _contexts(ordered)
    return environment.get_template(TEMPLATE).render(
        metadata=_metadata(origin),
        name=name.removesuffix("-exl2"),
        repo=repo,
        source=_source(origin),
        has_measurement=has_measurement,
        notes=notes,
        bitrates=ordered,
        table=markdown_table([_row(repo, bitrate) for bitrate in ordered]),
        scored_on=scored_on(asdict(scores[0])) if scores else "",
        contexts=contexts,
        forms=[_form(form, ordered, contexts) for form in FORMS],
        example=example.branch,
        folder=f"{name.removesuffix('-exl2')}-{example.branch}",
        facts=_facts(ordered, origin),
        size=words.size,
    )


def _row(repo: str, bitrate: Bitrate) -> Row:
    """Return a line of the table of bitrates, with a link to the branch."""
    score = {} if bitrate.score is None else asdict(bitrate.score)
    figures = Compared(
        label=f"[{bitrate.branch}](https://huggingface.co/{repo}/tree/{bitrate.branch})",
        series=None,
        bpw=bitrate.bpw,
        bytes=bitrate.weight_bytes,
        kl=score.get("kl_divergence"),
        predicted_kl=bitrate.record.get("predicted_kl"),
    )
    return bitrate_row(figures, score)


def _metadata(origin: Origin) -> dict[str, object]:
    """Return what the Hub reads; what is not known is left out."""
    found = {
        "base_model": origin.repo,
        "base_model_relation": "quantized" if origin.repo else None,
        "license": origin.license,
        "license_name": origin.license_name,
        "license_link": _absolute(origin),
        "pipeline_tag": "text-generation",
        "tags": list(TAGS),
    }
    return {key: value for key, value in found.items() if value is not None}


def _absolute(origin: Origin) -> str | None:
    """Return the link to the licence; one inside of the source's repository leads there."""
    link = origin.license_link
    if link is None or "://" in link or origin.repo is None:
        return link
    return f"https://huggingface.co/{origin.repo}/blob/{origin.commit or 'main'}/{link}"


def _source(origin: Origin) -> str:
    if origin.repo is None:
        return "a model that is not on the Hub"
    link = f"[{origin.repo}](https://huggingface.co/{origin.repo})"
    return link if origin.commit is None else f"{link} at commit `{origin.commit}`"


def _contexts(bitrates: Sequence[Bitrate]) -> list[int]:
    """Return the lengths that the model has positions for, at least one."""
    most = min(bitrate.spec.max_positions for bitrate in bitrates)
    return [tokens for tokens in CONTEXTS if tokens <= most] or [most]


def _form(form: str, bitrates: Sequence[Bitrate], contexts: Sequence[int]) -> dict[str, object]:
    """Return the table of one form of the cache, in bytes."""
    rows = [
        {
            "branch": bitrate.branch,
            "sizes": [
                bitrate.weight_bytes + cache_bytes(bitrate.spec, context=tokens, cache_format=form)
                for tokens in contexts
            ],
        }
        for bitrate in bitrates
    ]
    return {"name": form, "rows": rows}


def _facts(bitrates: Sequence[Bitrate], origin: Origin) -> list[tuple[str, list[str]]]:
    """Return (name, its value for each bitrate)."""

    def row(name: str, *path: str, short: bool = False) -> tuple[str, list[str]]:
        values = [_found(bitrate.record, path) for bitrate in bitrates]
        return name, [value[:SHORT] if short else value for value in values]

    heads = [_found(b.spec.config, ("quantization_config", "head_bits")) for b in bitrates]

    return [
        ("source commit", [(origin.commit or words.UNKNOWN)[:SHORT]] * len(bitrates)),
        row("exl2flow", "versions", "exl2flow"),
        row("torch", "versions", "torch"),
        row("quality preset", "options", "quality"),
        ("bits of the head", heads),
        row("calibration", "calibration", "dataset"),
        row("sha256 of its rows", "calibration", "sha256", short=True),
        row("seed of calibration", "options", "calibration", "seed"),
        row("seed of sensitivity", "options", "sensitivity", "seed"),
        row("fingerprint", "fingerprint", short=True),
    ]


def _found(record: Mapping[str, Any], path: Sequence[str]) -> str:
    """Return an entry of nested objects in words."""
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return words.UNKNOWN if value is None else str(value)
