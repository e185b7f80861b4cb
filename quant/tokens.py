"""The tokenize stage: calibration text → token rows for measuring and for quantizing."""

import logging
from pathlib import Path
from typing import Literal

import torch

from exl2flow import calibration_data
from exl2flow.core.config import ConversionConfig
from exl2flow.core.files import digest, read_tensors, write_json, write_tensors
from exl2flow.core.stage import KINDS_FILE, ROWS_FILE, Stage, StageRun
from exl2flow.model import Tokenizer, resolve
from exl2flow.quant.calibration import RowRequest, calibration_rows

log = logging.getLogger(__name__)

Mix = Literal["measure", "quantize"]


def load_rows(folder: Path, mix: Mix) -> torch.Tensor:
    """Return calibration rows int64 (rows, t) from the stage folder of `tokenize`."""
    return read_tensors(folder / ROWS_FILE)[mix]


def tokenize(run: StageRun) -> None:
    """Write the rows of both mixes into the stage folder."""
    options = run.config.calibration
    tokenizer = Tokenizer.load(run.config.source)
    spec = resolve(run.config.source)
    sizes: dict[Mix, tuple[int, int]] = {
        "measure": (options.measure_rows, options.measure_row_tokens),
        "quantize": (options.rows, options.row_tokens),
    }
    tensors: dict[str, torch.Tensor] = {}
    kinds = {}
    for mix, (rows, row_tokens) in sizes.items():
        request = RowRequest(
            rows=rows,
            row_tokens=row_tokens,
            mix=mix,
            vocab_size=spec.vocab_size,
            noise=spec.family.noise_rows,
            seed=options.seed,
        )
        made = calibration_rows(options.file, tokenizer, request)
        tensors[mix] = made.ids
        kinds[mix] = {"kinds": list(made.kinds), "notes": list(made.notes)}
        for note in made.notes:
            run.folder.note(f"{mix} rows: {note}")
    write_json(run.folder.path / KINDS_FILE, kinds)
    run.folder.commit(KINDS_FILE, digest(run.folder.path / KINDS_FILE))
    sha256 = write_tensors(run.folder.path / ROWS_FILE, tensors)
    run.folder.commit(ROWS_FILE, sha256, cursor=1)
    run.tick(1, 1, f"rows={options.measure_rows}+{options.rows}")


def _options(config: ConversionConfig) -> dict[str, object]:
    calibration = config.calibration
    options = calibration.model_dump(mode="json", exclude={"file"})
    file = calibration.file or calibration_data.standard()
    return {**options, "file": digest(file), "own": calibration.file is not None}


TOKENIZE = Stage(name="tokenize", schema=1, inputs=(), options=_options, run=tokenize)
