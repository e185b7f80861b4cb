"""Time and GPU memory of each stage, on layers shaped like a large model's, or on a model.

    python benchmarks/layers.py [--shape 7b | --model DIR] [--layers 2] [--quality standard]
        [--device cuda] [--until validate] [--profile measure] [--rows N] [--max-memory 24GB]

Builds a model of random weights in a temporary folder unless one is given, runs each stage without
Prefect, and prints seconds per stage, seconds per layer (the median, from the end of the previous
layer to its own, results stored), and peak GPU memory next to the forecast of `--dry-run`.
`--profile` adds the kernels that took longest in a stage.
"""

import argparse
import json
import logging
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from exl2flow.core.config import ConversionConfig
from exl2flow.core.files import write_tensors
from exl2flow.core.progress import report
from exl2flow.flows.conversion import choose_allocator, open_pipeline
from exl2flow.quant.forecast.needs import Need
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.tasks.stages import STAGES

TOKENIZER = Path(__file__).parent.parent / "demo" / "model"
SHAPES = {  # hidden, intermediate, heads, key-value heads, vocabulary
    "tiny": (128, 352, 4, 2, 4096),
    "small": (512, 1408, 8, 4, 4096),
    "7b": (4096, 11008, 32, 32, 32000),
    "8b": (4096, 14336, 32, 8, 128256),
    "70b": (8192, 28672, 64, 8, 32000),
    "head": (8192, 1024, 64, 8, 152064),
}
SHARD_BYTES = 5_000_000_000
LAYER = re.compile(r"model\.layers\.\d+")


def write_config(folder: Path, shape: str, layers: int) -> None:
    """Write the files of a model folder other than its weights."""
    hidden, intermediate, heads, kv_heads, vocab = SHAPES[shape]
    config = json.loads((TOKENIZER / "config.json").read_bytes()) | {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
        "vocab_size": vocab, "tie_word_embeddings": False, "max_position_embeddings": 65536,
    }  # fmt: skip
    folder.mkdir()
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))


def linear_shapes(shape: str, layers: int) -> dict[str, tuple[int, int]]:
    """Return the out- and in-features of all linears, the head last."""
    hidden, intermediate, heads, kv_heads, vocab = SHAPES[shape]
    rows = {"q_proj": hidden, "k_proj": kv_heads * (hidden // heads), "o_proj": hidden}
    rows |= {"v_proj": rows["k_proj"], "gate_proj": intermediate, "up_proj": intermediate}
    shapes = {}
    for layer in range(layers):
        for name, count in rows.items():
            part = "mlp" if name in ("gate_proj", "up_proj") else "self_attn"
            shapes[f"model.layers.{layer}.{part}.{name}"] = (count, hidden)
        shapes[f"model.layers.{layer}.mlp.down_proj"] = (hidden, intermediate)
    return shapes | {"lm_head": (vocab, hidden)}


def norms(shape: str, layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of all norms, which are ones."""
    names = ["model.norm"]
    names += [f"model.layers.{i}.input_layernorm" for i in range(layers)]
    names += [f"model.layers.{i}.post_attention_layernorm" for i in range(layers)]
    return {f"{key}.weight": torch.ones(SHAPES[shape][0]).half() for key in names}


def make_model(folder: Path, shape: str, layers: int) -> None:
    """Write a Llama of random fp16 weights."""
    write_config(folder, shape, layers)
    shapes = linear_shapes(shape, layers)
    shapes["model.embed_tokens"] = shapes["lm_head"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tensors = {
        f"{key}.weight": (torch.randn(size, device=device) * size[1] ** -0.5).half().cpu()
        for key, size in shapes.items()
    }
    for number, shard in enumerate(shards(tensors | norms(shape, layers))):
        write_tensors(folder / f"model-{number:05d}.safetensors", shard)


def shards(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Split tensors into files of the size usual on the Hub."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


class LayerTimes(logging.Handler):
    """Records when the log reports a finished sublayer."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if match := LAYER.search(record.getMessage()):
            self.ends[match[0]] = record.created

    def median(self) -> float:
        """Return the median seconds per layer, without the first."""
        seconds = [after - before for before, after in pairwise(self.ends.values())]
        return statistics.median(seconds) if seconds else 0.0


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """Print the kernels that took longest."""
    if not wanted:
        yield
        return
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        yield
        torch.cuda.synchronize()
    averages = profile.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))


def run(config: ConversionConfig, last: str, profile: list[str]) -> None:
    """Run the stages and print a line for each."""
    forecast = preflight(config).needs
    pipeline = open_pipeline(config, STAGES)
    on_gpu = config.device == "cuda"
    log = logging.getLogger("exl2flow")
    log.setLevel(logging.INFO)
    print("| stage | seconds | per layer | peak GB | forecast |")
    print("|---|---|---|---|---|")
    all_seconds = 0.0
    for name in pipeline.stages:
        times = LayerTimes()
        log.addHandler(times)
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begun = time.monotonic()
        with profiled(name in profile):
            pipeline.run(name, progress=report)
        seconds = time.monotonic() - begun
        log.removeHandler(times)
        peak = torch.cuda.max_memory_reserved() / 1e9 if on_gpu else 0.0
        all_seconds += seconds
        need = forecast.get(name, Need()).gpu_memory_bytes
        print(
            f"| {name} | {seconds:.2f} | {times.median():.2f} | {peak:.1f} | {need / 1e9:.1f} |",
            flush=True,
        )
        if name == last:
            break
    print(f"| all | {all_seconds:.2f} | | | |")


def main() -> None:
    """Build the model and run the stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--model", type=Path, help="a model folder instead of random weights")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--quality", nargs="+", default=["standard"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--until", default="validate", help="the last stage to run")
    parser.add_argument("--profile", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--max-memory", help="limit for the GPU, such as 24GB")
    parser.add_argument("--rows", type=int, help="calibration rows, a sixth to measure; else all")
    arguments = parser.parse_args()
    choose_allocator()  # before the model is created
    logging.getLogger("exl2flow.core.background").addHandler(logging.StreamHandler())
    rows = arguments.rows
    few = {"rows": rows, "measure_rows": max(1, rows // 6)} if rows else {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = arguments.model or root / "source"
        if not arguments.model:
            make_model(source, arguments.shape, arguments.layers)
        for quality in arguments.quality:
            config = ConversionConfig(
                source=source, out=root / quality, work_root=root / f"work-{quality}",
                bpw=arguments.bpw, quality=quality, device=arguments.device, calibration=few,
                max_memory=arguments.max_memory,
            )  # fmt: skip
            what = arguments.model or f"{arguments.shape}, {arguments.layers} layers"
            print(f"\n{what}, {quality}, torch {torch.__version__}\n")
            run(config, arguments.until, arguments.profile)


if __name__ == "__main__":
    main()
