"""EXL2 models to refine: roughly converted, and disguised as another program's work."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from stage_runs import foreign_measurement, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.stage import RECORD_FILE, Pipeline
from exl2flow.kernels import Group
from exl2flow.model import QuantizedMatrix, resolve
from exl2flow.model.files.exl2 import tensor_names
from exl2flow.pipeline.stages import REFINE_STAGES

CALIBRATION = {"rows": 10, "row_tokens": 64, "measure_rows": 1, "measure_row_tokens": 64}
VALIDATION = {"rows": 1, "row_tokens": 64, "sample_tokens": 0, "fail_perplexity_ratio": 100}


def rough_model(root: Path, family: str = "qwen2", **overrides: object) -> tuple[Path, Path]:
    """Make a tiny source and convert it as exllamav2 would; return both folders."""
    source = make_tiny(family, root / "source", **overrides)  # type: ignore[arg-type]  # config keys
    config = ConversionConfig(
        source=source,
        out=root / "rough",
        quality="exllamav2",
        bpw=4.0,
        head_bits=3,
        device="cpu",
        measurement=foreign_measurement(root / "measurement.json", resolve(source)),
        calibration={"text": text_parquet(root / "text.parquet"), **CALIBRATION, "rows": 2},
        validate_options=VALIDATION,
    )
    run_until(config, "compile")
    return source, config.out


def disguise(model: Path, *, shards: int = 2) -> None:
    """Leave what exllamav2 would: a permutation both ways, several files, no record of ours."""
    (model / RECORD_FILE).unlink()
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for name, tensor in list(tensors.items()):
        if name.endswith(tensor_names("")[-1]):
            key = name.removesuffix(tensor_names("")[-1])
            tensors[f"{key}.q_perm"] = torch.argsort(tensor).to(torch.int16)
    names = sorted(tensors)
    for index in range(shards):
        part = {name: tensors[name] for name in names[index::shards]}
        save_file(part, model / f"output-{index + 1:05d}-of-{shards:05d}.safetensors")


def with_rising_bits(model: Path, key: str, weight: torch.Tensor) -> None:
    """Store a weight (n, k) in groups of 3, 5 and 4 bits and a permutation of no Hessian."""
    path = model / "model.safetensors"
    matrix = weight.T.float()  # (k, n), n a multiple of 32
    k, n = matrix.shape
    perm = (5 * torch.arange(k) + 1) % k
    sizes = ((3, 32), (5, 32), (4, k - 64))
    starts = (0, 32, 64)
    groups = tuple(
        Group(bits=bits, start=start, rows=rows)
        for (bits, rows), start in zip(sizes, starts, strict=True)
    )
    codes = torch.empty(k, n, dtype=torch.uint8)
    maxima = torch.empty(len(groups), dtype=torch.float16)
    for index, group in enumerate(groups):
        rows = matrix[perm[group.start : group.start + group.rows]]
        half = 2 ** (group.bits - 1)
        maxima[index] = rows.abs().max() / half
        found = (rows / maxima[index] + half).round().clamp(0, 2 * half - 1)
        codes[group.start : group.start + group.rows] = found.to(torch.uint8)
    stored = QuantizedMatrix.encode(
        codes=codes,
        groups=groups,
        scale_codes=torch.full((len(groups), n), 15, dtype=torch.uint8),  # the maximum itself
        max_scales=maxima,
        perm=perm,
    )
    save_file(load_file(path) | stored.to_tensors(key), path)


def refinement(source: Path, model: Path, out: Path, **values: object) -> RefinementConfig:
    """Return a refinement that takes a second."""
    defaults: dict[str, object] = {
        "calibration": {"text": text_parquet(out.parent / "text.parquet"), **CALIBRATION},
        "validate_options": VALIDATION,
        "sensitivity": {"rows": 4},
        "held_out_rows": 3,
        "device": "cpu",
    }
    return RefinementConfig.model_validate(
        {"source": source, "model": model, "out": out, **defaults, **values}
    )


def refine_until(config: RefinementConfig, last: str) -> Pipeline:
    """Run the stages of a refinement up to one of them."""
    pipeline = Pipeline(config, REFINE_STAGES, device="cpu")
    names = list(pipeline.stages)
    for name in names[: names.index(last) + 1]:
        pipeline.run(name, progress=silent)
    return pipeline
