"""Time a model on two GPUs beside the same model on one: layers split, and tensor parallel.

    python benchmarks/parallel.py [--shape 7b | --model DIR] [--layers N] [--bpw 4]
        [--batch 1 4 16] [--context 512] [--prompt 2048 16384] [--gpu-split 20,24] [--ways WAY …]

Steps are recorded and greedy. Half of the layers are on each GPU, or what `--gpu-split` says; two
processes share each layer. Each way has a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from decode import add_model, model_of

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.loading.layer_split import Split
from exl2flow.inference import LoadedModel, load_model
from exl2flow.inference.bench import DecodeBatch, seconds
from exl2flow.model import Placement, resolve

WAYS = ("one GPU", "split", "tensor parallel")
GPUS = tuple(torch.device("cuda", index) for index in range(2))
PIECES, STEPS = 3, 20  # repeats of a prompt, and of steps
TOGETHER = 10  # steps that are launched one after the other, as a generator does
PATIENCE = 600  # seconds


def halves(layers: int) -> Placement:
    """Return a placement of half the layers on each of two GPUs."""
    first, second = GPUS
    of_layer = (first,) * (layers // 2) + (second,) * (layers - layers // 2)
    return Placement(embedding=first, layers=of_layer, head=second)


def repeat(work: Callable[[], object]) -> None:
    """Do something `TOGETHER` times."""
    for _ in range(TOGETHER):
        work()


@torch.inference_mode()
def measure(model: LoadedModel, arguments: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds by name of the work."""
    times = dict[str, float]()
    for rows in arguments.batch:
        timed = DecodeBatch(model, size=rows, context=arguments.context, cache="fp16")
        timed.read()
        timed.enter(SamplingSettings.greedy())
        times[f"step of {rows}"] = 1e3 * seconds(partial(repeat, timed.step), STEPS) / TOGETHER
        del timed
    for tokens in arguments.prompt:
        timed = DecodeBatch(model, size=1, context=tokens, cache="fp16")
        times[f"prompt of {tokens}"] = 1e3 * seconds(timed.read, PIECES)
        del timed
    return times


def run(way: str, source: Path, arguments: argparse.Namespace) -> None:
    """Load and time a model in one way, and print the result as JSON."""
    begun = time.perf_counter()
    placement: Placement | Split | None = None
    if way == "split":
        placement = Split.parse(arguments.gpu_split) or halves(resolve(source).num_layers)
    shared = 2 if way == "tensor parallel" else None
    model = load_model(source, device="cuda", placement=placement, tensor_parallel=shared)
    with torch.cuda.device(model.decoder.placement.head):  # where steps end
        for device in model.decoder.placement.devices:
            torch.cuda.synchronize(device)
        times = {"load": 1e3 * (time.perf_counter() - begun), **measure(model, arguments)}
    used = [total - free for free, total in map(torch.cuda.mem_get_info, GPUS)]
    print(json.dumps(times | {"GB": max(used) / 1e9}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model(parser)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", nargs="+", type=int, default=[2048, 16384])
    parser.add_argument("--gpu-split", help="sizes in GB instead of halves")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of a child
    arguments = parser.parse_args()
    if arguments.way:
        run(arguments.way, arguments.model, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, results = model_of(arguments, Path(folder)), dict[str, dict[str, float]]()
        for way in arguments.ways:
            command = [sys.executable, __file__, *sys.argv[1:]]
            command += ["--model", str(source), "--way", way]
            child = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
            results[way] = json.loads(child.stdout)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| ms; most GB on a GPU | " + " | ".join(results) + " |")
    print("|---" * (1 + len(results)) + "|")
    for name, one in results[arguments.ways[0]].items():
        figures = (f"{way[name]:.2f} ({one / way[name]:.2f} x)" for way in results.values())
        print(f"| {name} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
