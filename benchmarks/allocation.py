"""Bits for very many matrices: a measurement is written, read and allocated, and names are found.

    python benchmarks/allocation.py [--layers 2633] [--bpw 4] [--seed 0]

The model is a Llama with matrices of 2048 x 768 and attention of 32 heads, seven matrices a layer;
only its config is written. Costs are lognormal over matrices and fall fourfold with every bit.
Prints the seconds of each step and the sizes of files.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import digest_of, read_json
from exl2flow.core.store.stage import StageRun
from exl2flow.core.store.store import WorkDir
from exl2flow.model import ModelSpec, expected_tensors, resolve
from exl2flow.model.config import resolution
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.model.files.measured import measurement_files
from exl2flow.quant.allocate.bit_range import BitRange, check_measurement
from exl2flow.quant.allocate.budget import ALLOCATION_FILE
from exl2flow.quant.allocate.stage import ALLOCATE, allocate
from exl2flow.quant.compile.stage import stored_names
from exl2flow.quant.measure.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS
from exl2flow.quant.measure.compact import bits_by_shape, write_compact
from exl2flow.quant.measure.measurement import read_measurement
from exl2flow.quant.measure.results import Results

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def synthetic(spec: ModelSpec, seed: int) -> dict[str, Results]:
    """Return results of all matrices and the head that need no measuring."""
    rng = np.random.default_rng(seed)
    matrices = [(p, PROJECTION_OPTIONS) for p in spec.projections] + [(spec.head, HEAD_OPTIONS)]
    bits = [*bits_by_shape(spec.projections, PROJECTION_OPTIONS)]
    bits += bits_by_shape([spec.head], HEAD_OPTIONS)
    slots = {}
    for (p, options), listed in zip(matrices, bits, strict=True):
        stored = np.array(listed, np.int64)
        error = 4.0 ** (-stored / p.numel) * rng.uniform(0.9, 1.1, len(options))
        slots[p.key] = Results(
            candidates=tuple({p.name: params} for params in options),
            bits=stored,
            accuracy=1 - np.sqrt(error) / 2,
            nats=1e-4 * rng.lognormal(0, 1.5) * error,
        )
    return slots


def allocated(config: ConversionConfig, folder: Path, name: str) -> dict[str, Any]:
    """Run the stage `allocate` from a finished measurement, and return what it wrote."""
    work = WorkDir(folder)
    ref = work.ref("allocate", digest_of(name))
    stage = work.open(ref, schema=ALLOCATE.schema, inputs={}, options={}, device="cpu")
    run = StageRun(
        config=config, folder=stage, inputs={}, device="cpu", progress=silent, stop=StopRequest()
    )
    allocate(run)
    content: dict[str, Any] = read_json(stage.path / ALLOCATION_FILE)
    return content


def rows(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, float, str]]:
    """Yield (step, seconds, what came of it)."""
    source, path = folder / "model", folder / "measurement.json"
    source.mkdir()
    content = CONFIG | {"num_hidden_layers": arguments.layers}
    (source / "config.json").write_text(json.dumps(content))
    resolution.MOST_LAYERS = arguments.layers  # a config may ask for 2,048 at most
    spec = resolve(source)
    slots = synthetic(spec, arguments.seed)
    further = {"measurement": {}, "last_module_idx": len(spec.sublayers) + 2}
    seconds, _ = timed(lambda: write_compact(path, slots, further))
    sizes = [file.stat().st_size for file in measurement_files(path)]
    count = sum(map(len, slots.values()))
    yield "write the measurement", seconds, f"{len(slots):,} slots, {count:,} candidates"
    seconds, _ = timed(lambda: read_measurement(path, spec))
    yield "read it", seconds, " + ".join(f"{size / 1e6:.1f} MB" for size in sizes)
    shared = {"source": source, "out": folder / "out", "measurement": path, "device": "cpu"}
    weights = sum(p.numel for p in (*spec.projections, spec.head))
    targets = {
        f"`--bpw {arguments.bpw:g}`": {"bpw": arguments.bpw},
        "`--target-bytes`": {"target_bytes": int(weights * arguments.bpw / 8 * 1.1)},
    }
    for name, target in targets.items():
        config = ConversionConfig(**shared, **target, allocate={"rounds": 0})
        seconds, made = timed(lambda c=config, n=name: allocated(c, folder / "work", n))
        if made["used_bits"] > made["budget_bits"]:
            raise AssertionError(f"{name}: {made['used_bits']} bits of {made['budget_bits']}")
        yield f"allocate, {name}", seconds, f"{made['status']}, {made['bpw']:.4f} bpw"
    seconds, _ = timed(
        lambda: (
            check_measurement(config, spec),
            BitRange.of(config, spec).packed_bytes(config, spec),
        )
    )
    yield "its part of the checks before", seconds, ""
    names = dict.fromkeys(expected_tensors(spec))
    for p in spec.projections:
        names |= dict.fromkeys(tensor_names(p.key))
    seconds, found = timed(lambda: [stored_names(names, p.key) for p in spec.projections])
    yield "names of all matrices", seconds, f"{sum(map(len, found)):,} among {len(names):,}"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2633, help="of seven matrices each")
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| step | seconds | |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for step, seconds, result in rows(arguments, Path(folder)):
            print(f"| {step} | {seconds:.2f} | {result} |", flush=True)


if __name__ == "__main__":
    main()
