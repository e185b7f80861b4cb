"""The validate stage: compare the converted model with its source, on text and by a sample.

Two texts: held-out rows (the verdict) and the calibration rows (a cross-check). The stage completes
whatever it finds, so that a failed verdict is cached like any other; `check_verdict` raises. The
score on held-out rows goes into the output, too, where `exl2flow inspect` finds it.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from exl2flow import calibration_data
from exl2flow.core.config import ConversionConfig, ValidateOptions
from exl2flow.core.errors import ValidationFailed
from exl2flow.core.files import digest, read_json, read_tensors, write_json, write_text
from exl2flow.core.stage import KINDS_FILE, RECORD_FILE, ROWS_FILE, SCORE_FILE, Stage, StageRun
from exl2flow.inference.evaluate import Score, evaluate
from exl2flow.inference.generate import BaseGenerator
from exl2flow.inference.load import load_model
from exl2flow.inference.report.markdown import render_markdown
from exl2flow.inference.report.plots import render_plot
from exl2flow.inference.sampling import SamplingSettings
from exl2flow.inference.text import text_rows
from exl2flow.model import Tokenizer, resolve

log = logging.getLogger(__name__)

REPORT_FILE, MARKDOWN_FILE, PLOT_FILE = "report.json", "report.md", "report.svg"
CALIBRATION_WARN, CALIBRATION_FAIL = 30.0, 1000.0  # perplexities on the calibration rows
CALIBRATION_RATIO = 1.5  # ... that count only above this times the source's


def verdict(
    score: Score, calibration: Score | None, options: ValidateOptions
) -> tuple[list[str], list[str]]:
    """Return (warnings, failures) in words."""
    warnings: list[str] = []
    failures: list[str] = []
    source = score.reference_perplexity
    if not math.isfinite(score.perplexity):
        failures.append("perplexity is not finite")
    elif source is not None:
        ratio = score.perplexity / source
        text = f"perplexity {score.perplexity:.2f} is {ratio:.2f} x the source's {source:.2f}"
        if ratio > options.fail_perplexity_ratio:
            failures.append(f"{text}, above {options.fail_perplexity_ratio:g} x")
        elif ratio > options.warn_perplexity_ratio:
            warnings.append(f"{text}, above {options.warn_perplexity_ratio:g} x")
    if calibration is not None and calibration.reference_perplexity is not None:
        limit = CALIBRATION_RATIO * calibration.reference_perplexity
        found = calibration.perplexity
        text = f"calibration perplexity is {found:.2f}"
        if found > max(CALIBRATION_FAIL, limit) or not math.isfinite(found):
            failures.append(text)
        elif found > max(CALIBRATION_WARN, limit):
            warnings.append(text)
    return warnings, failures


def check_verdict(folder: Path) -> list[str]:
    """Return the warnings of a finished validation.

    Raises:
        ValidationFailed: the model is above a limit.
    """
    report = read_json(folder / REPORT_FILE)
    if report["failures"]:
        raise ValidationFailed(
            "; ".join(report["failures"]) + f"; the report lies in `{folder}`; raise `--bpw`, or "
            "the limit if this is expected"
        )
    warnings: list[str] = report["warnings"]
    return warnings


def calibration_text_rows(ids: torch.Tensor, kinds: Sequence[str]) -> torch.Tensor:
    """Return the calibration rows that hold text: no random tokens, no noise."""
    keep = [i for i, kind in enumerate(kinds) if kind not in ("random", "noise")]
    return ids[keep]


def generate_sample(folder: Path, options: ValidateOptions, device: str) -> str:
    """Return prompt and greedy-ish continuation by the model, one sublayer in memory at a time."""
    model = load_model(folder, device=device, streamed=True)
    made = BaseGenerator(model).generate(
        options.sample_prompt,
        max_new_tokens=min(options.sample_tokens, model.spec.max_positions // 2),
        settings=SamplingSettings(),
        seed=options.sample_seed,
    )
    return made.prompt + made.text


def validate(run: StageRun) -> None:
    """Write the report in its three forms into the stage folder, and the score into the output."""
    config, options = run.config, run.config.validate_options
    out = config.out.resolve()
    held_out = text_rows(
        options.text,
        Tokenizer.load(config.source),
        rows=options.rows,
        row_tokens=min(options.row_tokens, resolve(config.source).max_positions),
    )
    calibration = _calibration_rows(run.inputs["tokenize"])
    run.folder.manifest.total = len(held_out) + len(calibration) + 1
    score = _scored(run, held_out, done=0)
    cross_check = _scored(run, calibration, done=len(held_out)) if len(calibration) else None
    sample = generate_sample(out, options, run.device) if options.sample_tokens else ""
    warnings, failures = verdict(score, cross_check, options)
    for text in (*warnings, *failures):
        log.warning(text)
    record = read_json(out / RECORD_FILE)
    report: dict[str, object] = {
        "model": str(out),
        "source": str(config.source.resolve()),
        "target": config.target,
        "bpw": record["allocation"]["bpw"],
        "predicted_kl": record.get("predicted_kl"),
        "tuning": record.get("tuning"),
        "calibration_rows": record.get("calibration"),
        "source_bytes": sum(p.stat().st_size for p in config.source.glob("*.safetensors")),
        "score": asdict(score),
        "calibration": None if cross_check is None else asdict(cross_check),
        "layers": record["layers"],
        "sample": sample,
        "warnings": warnings,
        "failures": failures,
    }
    _write(run, report)
    _write_scores(run, record["fingerprint"], {"score": score, "calibration": cross_check})
    total = run.folder.manifest.total
    run.tick(total, total, f"kl_divergence={score.kl_divergence:.5f}")


def _calibration_rows(folder: Path) -> torch.Tensor:
    """Return the rows that were measured on, as far as they hold text."""
    kinds = read_json(folder / KINDS_FILE)["measure"]["kinds"]
    return calibration_text_rows(read_tensors(folder / ROWS_FILE)["measure"], kinds)


def _scored(run: StageRun, rows: torch.Tensor, *, done: int) -> Score:
    """Score the output on rows, of which `done` others came before."""
    config, total = run.config, run.folder.manifest.total
    (score,) = evaluate(
        [config.out.resolve()],
        rows,
        reference=config.source,
        device=run.device,
        advance=lambda rows_done, _, detail: run.tick(done + rows_done, total, detail),
    )
    run.stop_if_asked()
    return score


def _write(run: StageRun, report: dict[str, object]) -> None:
    folder = run.folder.path
    plot = render_plot(report)
    write_json(folder / REPORT_FILE, report)
    write_text(folder / MARKDOWN_FILE, render_markdown(report))
    write_text(folder / PLOT_FILE, plot)
    for name in (REPORT_FILE, MARKDOWN_FILE, PLOT_FILE):
        run.folder.commit(name, digest(folder / name), cursor=run.folder.manifest.total)


def _write_scores(run: StageRun, fingerprint: str, scores: Mapping[str, Score | None]) -> None:
    """Write what was found into the output, with the fingerprint of the files that it holds for."""
    content: dict[str, object] = {"fingerprint": fingerprint}
    for name, score in scores.items():
        found = {} if score is None else asdict(score)
        content[name] = {key: value for key, value in found.items() if key != "model"} or None
    path = run.config.out.resolve() / SCORE_FILE
    write_json(path, content)
    run.folder.commit(str(path), digest(path))


def _options(config: ConversionConfig) -> dict[str, object]:
    options = config.validate_options
    text = options.text or calibration_data.heldout()
    return {**options.model_dump(mode="json", exclude={"text"}), "text": digest(text)}


VALIDATE = Stage(
    name="validate", schema=2, inputs=("tokenize", "compile"), options=_options, run=validate
)
