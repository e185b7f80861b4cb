"""Which files belong to a model: one list for what is fetched, copied and published.

Everything else in a source folder stays there: training data, keys, weights in other formats, the
targets of links out of the model, and the paths that configs remember.
"""

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from exl2flow.core.errors import SourceModelError

CONFIG_FILE = "config.json"
TOKENIZER_FILE, TEKKEN_FILE = "tokenizer.json", "tekken.json"
SHARDS = "*.safetensors"
WEIGHTS = (SHARDS, "*.safetensors.index.json")
SECOND_COPIES = "consolidated*"  # the same weights in another layout
MEASURED = "measurement.safetensors"  # numbers of `measurement.json`, which may be put beside them
CARRIED = frozenset(
    (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "spiece.model",
        "sentencepiece.bpe.model",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "README.md",
    )
)
TERMS = re.compile(r"(licen[cs]e|copying|notice|use_policy)[\w-]*(\.(txt|md|rst|pdf))?", re.I)
ORIGIN_KEYS = ("_name_or_path", "name_or_path")  # where transformers loaded the model from
FILE_KEYS = ("_file", "_path", "_dir")  # suffixes of keys whose value may be a path


def is_carried(name: str) -> bool:
    """Tell whether a file is copied: tokenizer, chat template, other configs, licence."""
    return name in CARRIED or TERMS.fullmatch(name) is not None


def is_second_copy(name: str) -> bool:
    """Tell whether a file repeats the weights in another layout, if there are others."""
    return fnmatchcase(name, SECOND_COPIES)


def is_weights(name: str) -> bool:
    """Tell whether a file at the top of the folder holds the weights, or is their index."""
    is_other = "/" in name or name == MEASURED or is_second_copy(name)
    return not is_other and any(fnmatchcase(name, pattern) for pattern in WEIGHTS)


def is_shard(name: str) -> bool:
    """Tell whether a file at the top of the folder holds weights."""
    return is_weights(name) and fnmatchcase(name, SHARDS)


def weight_files(folder: Path) -> list[Path]:
    """Return the files at the top of a folder that hold its model's weights, sorted.

    A second copy counts only if it is the only one; numbers of a measurement never do.
    """
    paths = sorted(path for path in folder.glob(SHARDS) if path.name != MEASURED)
    return [path for path in paths if is_weights(path.name)] or paths


def second_copies(folder: Path) -> list[Path]:
    """Return the files that repeat weights of a folder in another layout."""
    return sorted({*folder.glob(SHARDS)} - {*weight_files(folder), folder / MEASURED})


def weights_size(folder: Path) -> int:
    """Return the size of a model's weights on disk."""
    return sum(path.stat().st_size for path in weight_files(folder))


def is_of_model(name: str) -> bool:
    """Tell whether a file belongs to a model; files in subfolders never do."""
    return name == CONFIG_FILE or is_carried(name) or is_weights(name)


def has_only_tekken(folder: Path) -> bool:
    """Return whether Mistral's `tekken.json` is the only tokenizer of a folder."""
    others = (TOKENIZER_FILE, "tokenizer.model")
    is_there = (folder / TEKKEN_FILE).is_file()
    return is_there and not any((folder / name).is_file() for name in others)


def carried_files(folder: Path) -> list[Path]:
    """Return the files that accompany the weights (`is_carried`), sorted.

    Raises:
        SourceModelError: one of them, or `config.json`, is a link out of the model.
    """
    carried = [path for path in _files(folder) if is_carried(path.name)]
    check_links([folder / CONFIG_FILE, *carried])
    return carried


def left_out(folder: Path) -> list[str]:
    """Return the names of visible files that stay behind."""
    return [path.name for path in _files(folder) if not is_of_model(path.name)]


def _files(folder: Path) -> list[Path]:
    """Return the visible files at the top of a folder, sorted; none without the folder."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.is_file())


def check_links(paths: Iterable[Path]) -> None:
    """Refuse links to anything but another file of the same model.

    Allow links to the blobs of a Hub cache: its snapshots consist of them, and so do folders that
    older versions of its client made.

    Raises:
        SourceModelError: naming every such link.
    """
    problems = []
    for path in paths:
        target, folder = path.resolve(), path.parent.resolve()
        is_beside = target.parent == folder and is_of_model(target.name)
        if path.is_symlink() and not (is_beside or _is_blob(target, folder)):
            problems.append(
                f"`{path}` is a link to `{target}`, which is not a file of this model; "
                "replace the link with the file, or delete it"
            )
    if problems:
        raise SourceModelError("\n".join(problems))


def _is_blob(path: Path, folder: Path) -> bool:
    """Tell whether a file that a folder links to is that of a model in a Hub cache."""
    blobs, model = path.parent, path.parent.parent
    is_own = folder.parent == model / "snapshots"
    is_of_cache = model.name.startswith("models--") and (model / "snapshots").is_dir()
    return blobs.name == "blobs" and (is_own or is_of_cache)


def public_content(path: Path) -> bytes | None:
    """Return a config without paths of its author's machine; None if it has none.

    Raises:
        SourceModelError: the file cannot be read.
    """
    if not path.name.endswith(CONFIG_FILE):
        return None
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceModelError(f"cannot read `{path}`: {error.strerror}") from error
    except (ValueError, RecursionError):  # `resolve` says what is wrong with it
        return None
    public = without_origin(content)
    return None if public == content else f"{json.dumps(public, indent=2)}\n".encode()


def without_origin(value: Any) -> Any:
    """Return a JSON value without entries that say where a model was loaded from."""
    if isinstance(value, dict):
        return {k: without_origin(v) for k, v in value.items() if not _is_origin(k, v)}
    return [without_origin(entry) for entry in value] if isinstance(value, list) else value


def _is_origin(key: str, value: object) -> bool:
    is_absolute = isinstance(value, str) and re.match(r"[/~\\]|[A-Za-z]:[/\\]", value) is not None
    return key in ORIGIN_KEYS or (key.endswith(FILE_KEYS) and is_absolute)
