"""Time a model on two GPUs beside the same model on one: layers split among them.

    python benchmarks/parallel.py [--shape 7b | --model DIR] [--layers N] [--bpw 4]
        [--batch 1 16] [--context 512] [--prompt 2048 16384]

Steps are recorded and greedy. Half of the layers are on each GPU, or what `--gpu-split` says. The
memory is what each GPU has taken at the end, of which the tensors of the process, and the forecast.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from decode import add_model, model_of

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.inference import LoadedModel, load_model
from exl2flow.inference.bench import DecodeBatch, seconds
from exl2flow.inference.loading.layer_split import Split
from exl2flow.model import Placement

PIECES = 3  # repeats of a prompt


def halves(layers: int) -> Placement:
    """Return a placement of half the layers on each of two GPUs."""
    first, second = (torch.device("cuda", index) for index in range(2))
    of_layer = (first,) * (layers // 2) + (second,) * (layers - layers // 2)
    return Placement(embedding=first, layers=of_layer, head=second)


@torch.inference_mode()
def measure(model: LoadedModel, arguments: argparse.Namespace) -> dict[str, float]:
    """Return seconds by name of the work."""
    times = dict[str, float]()
    with torch.cuda.device(model.decoder.placement.head):
        for rows in arguments.batch:
            timed = DecodeBatch(model, size=rows, context=arguments.context, cache="fp16")
            timed.read()
            timed.enter(SamplingSettings.greedy())
            times[f"step of {rows}"] = seconds(timed.step, 50)
            del timed
        for tokens in arguments.prompt:
            timed = DecodeBatch(model, size=1, context=tokens, cache="fp16")
            times[f"prompt of {tokens}"] = seconds(timed.read, PIECES)
            del timed
    return times


def used(devices: list[torch.device]) -> list[int]:
    """Return the bytes that this process has taken of each GPU: the machine has no other one."""
    return [
        torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0]
        for device in devices
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model(parser)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", nargs="+", type=int, default=[2048, 16384])
    parser.add_argument("--gpu-split", help="sizes in GB instead of halves")
    arguments = parser.parse_args()
    devices = [torch.device("cuda", index) for index in range(2)]
    before = used(devices)
    with tempfile.TemporaryDirectory() as folder:
        source = model_of(arguments, Path(folder))
        results = list[dict[str, float]]()
        for is_split in (False, True):
            begun = time.perf_counter()
            if not is_split:
                model = load_model(source, device="cuda:0")
            elif arguments.gpu_split:
                model = load_model(source, placement=Split.parse(arguments.gpu_split))
            else:
                model = load_model(source, placement=halves(results[0]["layers"]))
            for device in devices:
                torch.cuda.synchronize(device)
            taken = time.perf_counter() - begun
            results.append(
                {"layers": model.spec.num_layers, "load": taken, **measure(model, arguments)}
            )
            held = [torch.cuda.max_memory_allocated(device) / 1e9 for device in devices]
            print(
                model,
                f"GB of tensors at most {held[0]:.2f} {held[1]:.2f}",
                *(f"{(x - y) / 1e9:.2f}" for x, y in zip(used(devices), before, strict=True)),
            )
            del model
            torch.cuda.empty_cache()
    one, two = results
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| work | one GPU, ms | two GPUs, ms | ratio |\n|---|---|---|---|")
    for name in [*one][1:]:
        figures = f"{1e3 * one[name]:.2f} | {1e3 * two[name]:.2f} | {one[name] / two[name]:.2f}"
        print(f"| {name} | {figures} |")


if __name__ == "__main__":
    main()
