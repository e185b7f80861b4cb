"""Which models convert on which GPUs, from shapes alone: no weights, no GPU.

    python benchmarks/small_cards.py [--shapes 7b 70b] [--sizes 8 24] [--quality standard]

The last column is the main memory that a conversion on the largest of these GPUs takes at most.
The verdicts are those of the row `GPU fit` of a plan (`quant/forecast/gpu_fit.py`).
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shapes import SHAPES, write_config

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.memory import usable
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.gpu_fit import fit_on
from exl2flow.quant.forecast.main_memory import beside_gpu
from exl2flow.quant.forecast.needs import stage_needs
from exl2flow.quant.forecast.plan import base_memory
from exl2flow.quant.walk.needs import Card

MODELS = ("1b", "3b", "7b", "8b", "13b", "14b", "24b", "32b", "70b", "gemma3-12b", "command-r7b")
SIZES = (8, 12, 16, 24, 32)  # GB
MARKS = {"fewer rows at a time": "r", "states in main memory": "s", "head in main memory": "h"}
MARKS["states and head in main memory"] = "sh"


def cells(shape: str, sizes: Sequence[int], quality: str) -> list[str]:
    """Return verdicts by size in GB, with marks for what is reduced, and the main memory."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / shape
        spec = write_config(source, shape)
        config = ConversionConfig.model_validate(
            {"source": source, "out": Path(folder) / "out", "bpw": 4, "quality": quality}
        )
        fits = [fit_on(config, STAGES, spec, gigabytes) for gigabytes in sizes]
    card = Card(name="", memory=usable(max(sizes) * 10**9))
    needs = beside_gpu(config, spec, card, stage_needs(config, STAGES, spec, card, packed=0))
    main = base_memory(card) + max(need.memory_bytes for need in needs.values())
    marks = ["".join(MARKS[each] for each in fit.reductions) for fit in fits]
    verdicts = [
        f"{fit.verdict} {mark}".strip() if fit.verdict != "no" else "no"
        for fit, mark in zip(fits, marks, strict=True)
    ]
    return [*verdicts, f"{main / 1e9:.0f} GB"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=MODELS, choices=SHAPES)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="GB")
    qualities = ("fast", "standard", "exllamav2")  # `best` tunes, which needs the files
    parser.add_argument("--quality", default="standard", choices=qualities)
    arguments = parser.parse_args()
    print("| model |", " | ".join(f"{gigabytes} GB" for gigabytes in arguments.sizes), "| RAM |")
    print("|---|" + "---|" * (len(arguments.sizes) + 1))
    for shape in arguments.shapes:
        found = cells(shape, arguments.sizes, arguments.quality)
        print(f"| {shape} |", " | ".join(found), "|")


if __name__ == "__main__":
    main()
