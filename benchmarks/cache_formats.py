"""The cost of each cache format: perplexity and divergence of tokens that read it one by one.

    python benchmarks/cache_formats.py --model DIR [--text FILE] [--rows 10] [--row-tokens 512]
        [--step-tokens 1] [--device cpu] [--formats fp16 fp8 q8 q8/q6 q6 q6/q4 q4]

The tokens of a row are appended in steps, so each reads all earlier ones as they are stored.
The reference is the same model with full forward passes.
"""

import argparse
import math
from pathlib import Path

import torch

from exl2flow.engine.cache.paged import PagedCache, cache_format, pages_of
from exl2flow.engine.cache.views import StepView
from exl2flow.inference import LoadedModel, load_model
from exl2flow.inference.scoring.text import text_rows
from exl2flow.kernels import CACHE_FORMATS
from exl2flow.model import RopeTables

FORMATS = ["fp16", "fp8", "q8", "q8/q6", "q6", "q6/q4", "q4"]


@torch.inference_mode()
def full_passes(model: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities fp32 (rows, t, v) without a cache."""
    logits = [model.decoder.forward(row[None])[0] for row in ids]
    return torch.log_softmax(torch.stack(logits).float(), dim=-1)


@torch.inference_mode()
def in_steps(
    model: LoadedModel, ids: torch.Tensor, name: str, count: int
) -> tuple[torch.Tensor, int]:
    """Return log-probabilities fp32 (rows, t, v) with a cache, and the bytes of its pages.

    count: tokens of a step.
    """
    rows, device = len(ids), ids.device
    pages = rows * pages_of(ids.shape[1])
    cache = PagedCache(model.spec, pages=pages, form=cache_format(name, device), device=device)
    tables = torch.arange(pages, dtype=torch.int32, device=device).view(rows, -1)
    lengths = torch.zeros(rows, dtype=torch.int32, device=device)
    angles, logits = RopeTables.of(model.spec, ids.shape[1], device), []
    for new in ids.split(count, dim=1):
        view = StepView(cache, tables, lengths, count=new.shape[1])
        logits.append(model.decoder.forward(new, view, angles.at(view.positions)))
        lengths += new.shape[1]
    nbytes = cache.nbytes * pages // (pages + 1)  # without the spare one
    return torch.log_softmax(torch.cat(logits, dim=1).float(), dim=-1), nbytes


def row_of(name: str, ids: torch.Tensor, expected: torch.Tensor, found: torch.Tensor) -> str:
    """Return a format's table line without its size."""
    losses = -found[:, :-1].gather(-1, ids[:, 1:, None])
    divergence = (expected.exp() * (expected - found)).sum(-1)[:, 1:].mean()
    same = (expected.argmax(-1) == found.argmax(-1))[:, 1:].float().mean()
    perplexity = math.exp(float(losses.double().mean()))
    return f"| {name} | {perplexity:.3f} | {float(divergence):.6f} | {float(same):.4f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=CACHE_FORMATS)
    arguments = parser.parse_args()
    model = load_model(arguments.model, device=arguments.device, max_tokens=arguments.row_tokens)
    ids = text_rows(
        arguments.text, model.tokenizer, rows=arguments.rows, row_tokens=arguments.row_tokens
    ).to(arguments.device)
    expected = full_passes(model, ids)
    print("| cache | perplexity | KL divergence | top-1 | MB |")
    print("|---|---|---|---|---|")
    print(f"{row_of('none', ids, expected, expected)} |")
    for name in arguments.formats:
        found, nbytes = in_steps(model, ids, name, arguments.step_tokens)
        print(f"{row_of(name, ids, expected, found)} {nbytes / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
