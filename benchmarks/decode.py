"""Time inference with a quantized model: loading, prompts, steps with and without a recording.

Recorded steps end with a sampled id: the likeliest, or one drawn with default settings.

    python benchmarks/decode.py [--shape 7b | --model DIR] [--layers N] [--bpw 4] [--uniform]
        [--batch 1 4 16] [--context 512] [--cache fp16] [--limits 132 99]

"Of copies" is the rate at which a recorded step reads all matrices, over that of a large copy.
`--limits` plans products for a card with that many multiprocessors and KB of shared memory. Unless
a model is given, writes one of random codes to a temporary folder: with the bit widths and groups
of `allocations.json`, or with `--uniform` of one width in groups of 128 with a 6-bit head.
"""

import argparse
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from allocations import Allocation, add_allocation, allocation_of
from shapes import SHAPES, plain, write_config

from exl2flow.core.store.files import write_tensors
from exl2flow.core.store.model_files import weights_size
from exl2flow.inference import LoadedModel, SamplingSettings, load_model
from exl2flow.inference.bench import DecodeBatch, copy_rate, seconds
from exl2flow.kernels.cuda import products
from exl2flow.model import QuantizedMatrix, QuantParams
from exl2flow.model.files.group_table import first_words


def random_matrix(n: int, k: int, params: QuantParams) -> QuantizedMatrix:
    """Return random codes whose values are about as large as a model's."""
    groups = params.groups(k)
    words = sum(group.rows * group.bits for group in groups) // 32
    integers = {"dtype": torch.int32, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    starts = zip(groups, first_words(groups), strict=True)
    return QuantizedMatrix(
        packed=torch.randint(-(2**31), 2**31, (words, n), **integers),
        scale_codes=torch.randint(-(2**31), 2**31, (len(groups), n // 8), **integers),
        max_scales=torch.tensor([8 * k**-0.5 / 2**group.bits for group in groups]).half(),
        group_table=torch.tensor(
            [x for group, start in starts for x in (group.bits, start)], dtype=torch.int16
        ),
        inverse_perm=torch.randperm(k, generator=torch.Generator().manual_seed(k)).int(),
    ).to("cpu")


def write_model(folder: Path, shape: str, layers: int | None, allocation: Allocation) -> None:
    """Write an EXL2 model of random codes, and print its size."""
    spec = write_config(folder, shape, layers)
    matrices = [
        (p, random_matrix(p.out_features, p.in_features, params))
        for p, params in allocation.of(spec)
    ]
    tensors = plain(spec)
    for p, matrix in matrices:
        tensors |= matrix.to_tensors(p.key)
    write_tensors(folder / "model.safetensors", tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    layer_bits, head_bits = (
        sum(matrix.total_bits for _, matrix in part)
        / sum(p.in_features * p.out_features for p, _ in part)
        for part in (matrices[:-1], matrices[-1:])
    )
    print(
        f"{shape} {allocation.name}: {layer_bits:.3f} bits per weight in the layers, "
        f"{head_bits:.2f} in the head, {size / 1e9:.2f} GB\n"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model is timed."""
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--model", type=Path, help="a model's folder instead of random codes")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--bpw", type=float, default=4.0)
    add_allocation(parser)


def model_of(arguments: argparse.Namespace, folder: Path) -> Path:
    """Return the model's folder; without one, write a model of random codes below `folder`."""
    if arguments.model is not None:
        return Path(arguments.model)
    allocation = allocation_of(arguments.bpw, arguments)
    write_model(folder / "model", arguments.shape, arguments.layers, allocation)
    return folder / "model"


def read_bytes(model: LoadedModel, folder: Path) -> int:
    """Return the bytes of a model's files that every step reads: all but the embedding."""
    return weights_size(folder) - model.decoder.embedding.weight.nbytes


@torch.inference_mode()
def measure(model: LoadedModel, rows: int, context: int, form: str) -> list[float]:
    """Return the seconds of a prompt for each row, a step, and recorded steps, greedy and drawn."""
    timed = DecodeBatch(model, size=rows, context=context, cache=form)
    times = [seconds(timed.read, 3)]
    timed.enter(SamplingSettings.greedy())
    times.append(seconds(timed.launch, 5))
    for settings in (SamplingSettings.greedy(), SamplingSettings()):
        timed.enter(settings)
        times.append(seconds(timed.step))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model(parser)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--context", nargs="+", type=int, default=[512])
    parser.add_argument("--cache", nargs="+", default=["fp16"])
    parser.add_argument(
        "--limits", nargs=2, type=int, help="multiprocessors, and KB of shared memory for a CTA"
    )
    arguments = parser.parse_args()
    if arguments.limits:
        processors, kilobytes = arguments.limits
        patch.object(products, "limits", lambda _device: (processors, kilobytes << 10)).start()
    with tempfile.TemporaryDirectory() as folder:
        source = model_of(arguments, Path(folder))
        begun = time.perf_counter()
        model = load_model(source, device="cuda")
        torch.cuda.synchronize()
        taken = time.perf_counter() - begun
        held = torch.cuda.memory_allocated() / 1e9
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: loaded in {taken:.1f} s")
        print(f"{held:.2f} GB, at most {torch.cuda.max_memory_allocated() / 1e9:.2f}\n")
        print(
            "| batch | context | cache | prompt tokens/s | step ms | recorded ms | tokens/s "
            "| of copies | drawn ms |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        least = 1e-9 * read_bytes(model, source) / copy_rate()  # seconds of a step
        for form in arguments.cache:
            for context in arguments.context:
                for batch in arguments.batch:
                    prompt, step, recorded, drawn = measure(model, batch, context, form)
                    print(
                        f"| {batch} | {context} | {form} | {batch * context / prompt:.0f} "
                        f"| {1e3 * step:.2f} | {1e3 * recorded:.3f} | {batch / recorded:.0f} "
                        f"| {least / recorded:.0%} | {1e3 * drawn:.3f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
