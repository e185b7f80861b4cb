"""Conversions that run in seconds, and what they left on disk."""

from pathlib import Path

from exl2flow.core.options.config import CalibrationOptions, ConversionConfig
from exl2flow.core.options.validation import ValidateOptions

FileIdentity = tuple[int, int, int]
_CALIBRATION = "--rows 2 --row-tokens 64 --measure-rows 1 --measure-row-tokens 64"
_VALIDATION = "--validate-rows 1 --validate-row-tokens 64 --sample-tokens 4 --fail-ratio 100"
# what `small_options` has, on the command line
QUICK = (*_CALIBRATION.split(), *_VALIDATION.split(), "--quality", "fast", "--device", "cpu")


def small_config(source: Path, out: Path, **values: object) -> ConversionConfig:
    """Return a configuration for a tiny model: all stages that are usual, with little work."""
    given = {"source": source, "out": out, **small_options(), **values}
    return ConversionConfig.model_validate(given)


def small_options() -> dict[str, object]:
    """Return the options of a conversion or a sweep that make for little work."""
    return {
        "device": "cpu",
        "quality": "fast",
        "calibration": CalibrationOptions(
            text="standard", rows=2, row_tokens=64, measure_rows=1, measure_row_tokens=64
        ),
        "validate_options": ValidateOptions(
            rows=1, row_tokens=64, sample_tokens=4, fail_perplexity_ratio=100
        ),
    }


def snapshot(root: Path) -> dict[str, FileIdentity]:
    """Return file name → (mtime, inode, size) of everything below a folder but lock files."""
    paths = (path for path in root.rglob("*") if path.parent.name != "locks" and path.is_file())
    stats = {str(path): path.stat() for path in paths}
    return {name: (stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in stats.items()}


def weights(out: Path) -> dict[str, bytes]:
    """Return bitrate → the bytes of its weights, of a sweep."""
    return {path.parent.name: path.read_bytes() for path in out.glob("*bpw/model.safetensors")}
