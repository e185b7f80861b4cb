"""What filters and adapters cost: modes of `generation.py`."""

from pathlib import Path
from typing import Any

import torch
from generation_jobs import request, stepped

from exl2flow.engine.filters import GrammarFilter
from exl2flow.inference import Adapter, Generator, LoadedModel

ROWS = 16


def step(generator: Generator, *kinds: dict[str, Any]) -> float:
    """Return the seconds of a step of 16 jobs that take turns with some options of requests."""
    model = generator.model
    jobs = [
        generator.submit(request(model, 32, 300, seed, **kinds[seed % len(kinds)]))
        for seed in range(ROWS)
    ]
    for _ in range(60):
        generator.step()
    found = min(stepped(generator, 40) for _ in range(4))
    for job in jobs:
        job.cancel()
    generator.step()
    return found


def grammar(model: LoadedModel, form: str) -> None:
    """Compare 16 jobs under a JSON schema with 16 under none."""
    schema = {"type": "array", "items": {"type": "number"}, "minItems": 1000}
    answer = GrammarFilter(json_schema=schema)
    free, bound = (
        step(Generator(model, cache=form, tokens=ROWS * 512, slots=ROWS), {"filters": filters})
        for filters in ((), (answer,))
    )
    print(f"| 16 jobs | {1e3 * free:.3f} ms | {1e3 * bound:.3f} bound | {free / bound:.3f} |")


def adapters(model: LoadedModel, form: str) -> None:
    """Compare 16 jobs that use four adapters of rank 16 with 16 that use none."""
    made = [{"adapters": [random_adapter(model, 16, seed)]} for seed in range(4)]
    generator = Generator(model, cache=form, tokens=ROWS * 512, slots=ROWS)
    plain, used, idle = step(generator, {}), step(generator, *made), step(generator, {})
    print(
        f"| 16 jobs | {1e3 * plain:.3f} ms | {1e3 * used:.3f} with 4 adapters of rank 16 "
        f"| {plain / used:.3f} | {1e3 * idle:.3f} after them, without | {plain / idle:.3f} |"
    )


def random_adapter(model: LoadedModel, rank: int, seed: int) -> Adapter:
    """Return an adapter of all linears, without a folder."""
    source = torch.Generator().manual_seed(seed)
    dtype = model.decoder.embedding.weight.dtype

    def matrix(features: int) -> torch.Tensor:
        return (0.01 * torch.randn(rank, features, generator=source)).to(dtype)

    return Adapter(
        digest=bytes([seed]),
        folder=Path("random"),
        model=model.spec.source_dir,
        rank=rank,
        matrices={
            p.key: (matrix(p.in_features), matrix(p.out_features))
            for sublayer in model.spec.sublayers
            for p in sublayer.projections
        },
    )
