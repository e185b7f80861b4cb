"""Files of converted models to publish, and the reasons to refuse a publication.

Records are published without paths of the machine they were made on.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.naming import BITRATE, bitrate_name
from exl2flow.core.reports import Json, Score, mapping, number
from exl2flow.core.store.model_files import (
    check_links,
    is_of_model,
    public_content,
    weights_size,
)
from exl2flow.core.store.stage import FILES, RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.comparison import Rise, compared, rises
from exl2flow.inference.report.licences import licence_problem
from exl2flow.inference.report.record import Record, read_record
from exl2flow.model import ModelSpec, resolve

CARD_FILE = "README.md"  # replaces that of the source
# entries of records that may contain slashes but are not paths
NOT_PATHS = ("repo", "revision", "license", "license_name", "license_link", "sample_prompt")
BRANCH_DIGITS = 3  # of a bitrate that followed from another target
OPTIONS = "options"  # the entry with the user's options, which may be relative paths
FOLDERS_IN_TEXT = re.compile(r"(?<![\w:/~])~?/(?:[^\s/`'\"]+/)+(?=[^\s/`'\"])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source: its repository on the Hub, commit and licence, as far as they are known."""

    repo: str | None = None
    commit: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitrate:
    """A converted model, as its files describe it.

    bpw: bits per weight of the decoder's matrices; weight_bytes: of its weights on disk.
    score: of the validation, None without one or without a reference.
    """

    folder: Path
    branch: str
    bpw: float
    weight_bytes: int
    record: Record
    score: Score | None
    spec: ModelSpec


def describe(folder: Path, *, weight_bytes: int | None = None) -> Bitrate:
    """Read the files that describe a converted model.

    Args:
        folder: with config.json and our records.
        weight_bytes: size of the weights, if they are not in the folder.

    Raises:
        ConfigError: exl2flow did not write the folder.
        SourceModelError: it is not a model.
    """
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` is not a folder; name folders that `exl2flow convert` wrote")
    record = read_record(folder)
    bpw = None if record is None else record.allocation.bpw
    target = number(mapping(record.content.get("options")).get("bpw")) if record else None
    if record is None or bpw is None or min(bpw, target or bpw) <= 0:
        raise ConfigError(
            f"`{folder}` has no {RECORD_FILE} that records how it was made; name folders that "
            "`exl2flow convert` wrote"
        )
    if weight_bytes is None:
        weight_bytes = weights_size(folder)
    score = None
    if record.score is not None and record.score.get("kl_divergence") is not None:
        score = Score.of(str(folder), record.score)
    return Bitrate(
        folder=folder,
        branch=bitrate_name(target or round(bpw, BRANCH_DIGITS)),
        bpw=bpw,
        weight_bytes=weight_bytes,
        record=record,
        score=score,
        spec=resolve(folder),
    )


def is_branch(name: str) -> bool:
    """Return whether a branch is named after a bitrate."""
    return name.endswith(BITRATE) and name.removesuffix(BITRATE).replace(".", "", 1).isdigit()


def quality_problems(bitrates: Sequence[Bitrate], max_kl: float) -> list[str]:
    """Return the problems with the quality of a set of bitrates.

    A divergence that rises is one unless an interval says that it may be chance: see `doubts`.
    """
    problems = [
        f"`{bitrate.folder}` has no measured KL divergence for these files; run `exl2flow convert` "
        "with its validation again"
        for bitrate in bitrates
        if bitrate.score is None
    ]
    scores = [bitrate.score for bitrate in bitrates if bitrate.score is not None]
    for score in scores:
        kl = score.kl_divergence
        if kl is None or not kl <= max_kl:
            text = "unknown" if kl is None else words.divergence(kl)
            problems.append(f"`{score.model}`: KL divergence {text} is above the limit {max_kl:g}")
    sure = [rise for rise in _rises(bitrates) if rise.is_sure or rise.interval is None]
    return problems + [rise.warning for rise in sure]


def doubts(bitrates: Sequence[Bitrate]) -> list[str]:
    """Return the divergences that rise, but by no more than chance may explain."""
    unsure = [rise for rise in _rises(bitrates) if not rise.is_sure and rise.interval is not None]
    return [rise.doubt for rise in unsure]


def _rises(bitrates: Sequence[Bitrate]) -> list[Rise]:
    """Return the rises among all bitrates, whatever their presets: users choose among all."""
    return rises(compared([bitrate.score for bitrate in bitrates if bitrate.score is not None]))


def origin_problems(origin: Origin) -> list[str]:
    """Return the problems with publishing models made from a source."""
    problems = []
    if origin.repo is None:
        problems.append("the source on the Hub is not known; name it with `--base-model org/name`")
    if origin.gated:
        problems.append(
            f"the source `{origin.repo}` is gated: its owner wants everyone to accept its terms"
        )
    refusal = licence_problem(origin.license, origin.license_name)
    return [*problems, refusal] if refusal else problems


def recorded_origins(bitrates: Iterable[Bitrate]) -> list[Origin]:
    """Return the distinct origins of these models' sources; none for local folders."""
    records = (bitrate.record.content.get("provenance") for bitrate in bitrates)
    origins = [origin_from(known) for known in records if isinstance(known, Mapping)]
    return list(dict.fromkeys(origins))


def origin_from(known: Mapping[str, object]) -> Origin:
    """Return the origin in a record of provenance; a card may list several licences."""
    values: Json = {field.name: _text(known.get(field.name)) for field in fields(Origin)}
    return Origin(**{**values, "gated": bool(known.get("gated"))})


def _text(value: object) -> str | None:
    """Return a text, the texts of a list with commas between them, or None."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    return value if isinstance(value, str) else None


def public_files(bitrate: Bitrate, card: str) -> dict[str, Path | bytes]:
    """Return name → file or content of a branch: the model's files, its score, record and card.

    Leave out files that are not in the record, and the paths in record and configs. A record of an
    older version lists none: then the files are chosen by their names.

    Raises:
        SourceModelError: a file is a link out of the model.
    """
    recorded = bitrate.record.content.get(FILES)

    def is_public(name: str) -> bool:
        is_known = is_of_model(name) and (not isinstance(recorded, list) or name in recorded)
        return is_known or name == SCORE_FILE

    inside = sorted(bitrate.folder.iterdir())
    paths = [path for path in inside if is_public(path.name) and path.is_file()]
    check_links(paths)
    files: dict[str, Path | bytes] = {path.name: public_content(path) or path for path in paths}
    record = json.dumps(without_paths(bitrate.record.content), indent=4, ensure_ascii=False)
    return {**files, RECORD_FILE: f"{record}\n".encode(), CARD_FILE: card.encode()}


def without_paths(value: Any, *, is_typed: bool = False) -> Any:
    """Cut paths in a JSON value down to their last part, relative ones too.

    Args:
        is_typed: whether the value is an option of the user; then a path may contain spaces.
    """
    if isinstance(value, Mapping):
        return {
            key: entry
            if key in NOT_PATHS
            else without_paths(entry, is_typed=is_typed or key == OPTIONS)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_paths(entry, is_typed=is_typed) for entry in value]
    if not isinstance(value, str) or "/" not in value or "://" in value:
        return value
    is_path = is_typed or " " not in value or value.startswith(("/", "~/", "./", "../"))
    if is_path and "\n" not in value:
        return PurePath(value).name
    return FOLDERS_IN_TEXT.sub("", value)
