"""Time layers of experts alone, in turn so that none is in the L2 cache, on a GPU.

    python benchmarks/expert_layers.py [--shape qwen3-30b-a3b] [--layers 6] [--rows 1 4 16 32 2048]

Models have random codes as in `decode.py`. Up to 32 rows are replayed as a CUDA graph.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from decode import add_model, model_of

from exl2flow.inference import load_model
from exl2flow.inference.bench import seconds
from exl2flow.kernels import FEW_EXPERT_ROWS, ExpertBank, get_ops
from exl2flow.kernels.cuda.graphs import CudaGraph
from exl2flow.model.layers.experts import ExpertsSublayer


def through(banks: list[ExpertBank], hidden: torch.Tensor) -> torch.Tensor:
    """Pass hidden states through layers of experts."""
    for bank in banks:
        hidden = get_ops(hidden.device).experts(hidden, bank)
    return hidden


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model(parser)
    parser.set_defaults(shape="qwen3-30b-a3b", layers=6)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 32, 2048])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(model_of(arguments, Path(folder)), device="cuda")
        layers = [s for s in model.decoder.sublayers if isinstance(s, ExpertsSublayer)]
        banks = [layer.bank for layer in layers if layer.bank is not None]
        first, rule = banks[0].experts[0], banks[0].router.rule
        weights = sum(len(matrix.order) * matrix.columns for matrix in first)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
        print("| tokens | us of a layer | TFLOP/s of the chosen experts |")
        print("|---|---|---|")
        for rows in arguments.rows:
            hidden = torch.randn(rows, len(first.up.order), device="cuda").half()
            work = partial(through, banks, hidden)
            repeated = CudaGraph(work).replay if rows <= FEW_EXPERT_ROWS else work
            taken = seconds(repeated) / len(banks)
            speed = 2 * rows * rule.top * weights / taken / 1e12
            print(f"| {rows} | {1e6 * taken:.1f} | {speed:.1f} |", flush=True)


if __name__ == "__main__":
    main()
