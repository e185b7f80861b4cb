"""Stages of tiny conversions, and measurements that need no measuring."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from conversions import small_config
from tiny import TEXT, make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import ModelSpec, resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.measure.candidates import candidates_for
from exl2flow.quant.measure.measurement import candidate_bits


def text_parquet(path: Path) -> Path:
    """Write a calibration file that is tokenized in no time."""
    records = [" ".join(TEXT[i:] + TEXT[:i]) for i in range(len(TEXT))] * 20
    pq.write_table(pa.table({"text": records}), path)
    return path


def calibrated_on(
    text: Path | str, quantizing: tuple[int, int], measuring: tuple[int, int]
) -> dict[str, object]:
    """Return calibration options: a text, rows and tokens of each, to quantize and to measure."""
    names = ("rows", "row_tokens", "measure_rows", "measure_row_tokens")
    return {"text": text, **dict(zip(names, (*quantizing, *measuring), strict=True))}


def one_layer(
    folder: Path, *, hidden: int, intermediate: int, **values: object
) -> ConversionConfig:
    """Return the conversion of a model of one layer, with little text."""
    shape = {"num_hidden_layers": 1, "hidden_size": hidden, "intermediate_size": intermediate}
    source = make_tiny("llama", folder / "model", **shape)
    calibration = calibrated_on(text_parquet(folder / "text.parquet"), (2, 64), (1, 64))
    return small_config(source, folder / "out", calibration=calibration, **values)


def run_until(config: ConversionConfig, last: str, *, device: str = "cpu") -> Pipeline:
    """Run the stages of a conversion up to one of them."""
    pipeline = Pipeline(config, STAGES, device=device)
    names = [stage.name for stage in STAGES]
    for name in names[: names.index(last) + 1]:
        if name in pipeline.stages:
            pipeline.run(name, progress=silent)
    return pipeline


def foreign_measurement(path: Path, spec: ModelSpec) -> Path:
    """Write a measurement as exllamav2 does; errors fall with the bits, slots differ a little."""
    entries: dict[str, object] = {}
    for index, part in enumerate(part for s in spec.sublayers for part in s.parts):
        numel = sum(p.in_features * p.out_features for p in part.projections)
        rows = []
        for candidate in candidates_for(part):
            bits = candidate_bits(part.projections, candidate)
            error = (0.4 + 0.1 * math.sin(index)) * 2 ** (1 - bits / numel)
            params = {name: value.to_json() for name, value in candidate.items()}
            rows.append({"accuracy": 1 - error, "total_bits": bits, **params})
        entries[part.name] = rows
    content = {
        "measurement": {**entries, "model.norm.norm": None, "lm_head.linear": None},
        "last_module_idx": len(spec.sublayers) + 2,
    }
    path.write_text(json.dumps(content, indent=4))
    return path


def prepared(source: Path, **values: object) -> ConversionConfig:
    """Return a conversion that neither measures nor needs gradients."""
    root = source.parent
    calibration = calibrated_on(text_parquet(root / "text.parquet"), (2, 32), (1, 32))
    measurement = foreign_measurement(root / "measurement.json", resolve(source))
    defaults: dict[str, object] = {
        "calibration": calibration,
        "measurement": measurement,
        "quality": "exllamav2",
    }
    return small_config(source, root / "out", **{**defaults, **values})
