"""Which models convert on which GPUs, from shapes alone: no weights, no GPU.

    python benchmarks/small_cards.py [--shapes 7b 70b] [--sizes 8 24] [--quality standard]

The verdicts are those of the row `GPU fit` of a plan (`quant/forecast/gpu_fit.py`).
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shapes import SHAPES, write_config

from exl2flow.core.options.config import ConversionConfig
from exl2flow.quant.forecast.gpu_fit import fit_on

MODELS = ("1b", "3b", "7b", "8b", "13b", "14b", "32b", "70b", "gemma3-12b", "command-r7b")
SIZES = (8, 12, 16, 24, 32)  # GB
MARKS = {"fewer rows at a time": "r", "states in main memory": "s", "head in main memory": "h"}
MARKS["states and head in main memory"] = "sh"


def cells(shape: str, sizes: Sequence[int], quality: str) -> list[str]:
    """Return a model's verdict for each size in GB, with marks for what is reduced."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / shape
        spec = write_config(source, shape)
        config = ConversionConfig.model_validate(
            {"source": source, "out": Path(folder) / "out", "bpw": 4, "quality": quality}
        )
        fits = [fit_on(config, spec, gigabytes) for gigabytes in sizes]
    marks = ["".join(MARKS[each] for each in fit.reductions) for fit in fits]
    return [
        f"{fit.verdict} {mark}".strip() if fit.verdict != "no" else "no"
        for fit, mark in zip(fits, marks, strict=True)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=MODELS, choices=SHAPES)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="GB")
    qualities = ("fast", "standard", "exllamav2")  # `best` tunes, which needs the files
    parser.add_argument("--quality", default="standard", choices=qualities)
    arguments = parser.parse_args()
    print("| model |", " | ".join(f"{gigabytes} GB" for gigabytes in arguments.sizes), "|")
    print("|---|" + "---|" * len(arguments.sizes))
    for shape in arguments.shapes:
        found = cells(shape, arguments.sizes, arguments.quality)
        print(f"| {shape} |", " | ".join(found), "|")


if __name__ == "__main__":
    main()
