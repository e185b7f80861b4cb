"""The validate stage: compare the converted model with its source, on text and with a sample.

Two texts: held-out rows (for the verdict) and the calibration rows (a cross-check). The stage
completes whatever it finds, so a failed verdict is cached like any other; `check_verdict` raises.
The held-out score is also written to the output, where `exl2flow inspect` finds it.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import torch

from exl2flow import calibration_data
from exl2flow.core import words
from exl2flow.core.errors import ValidationFailed
from exl2flow.core.options.refine import ModelOptions
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.core.reports import Json, Report, Score
from exl2flow.core.store.files import (
    digest,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
    write_text,
)
from exl2flow.core.store.model_files import weights_size
from exl2flow.core.store.stage import (
    KINDS_FILE,
    RECORD_FILE,
    ROWS_FILE,
    SCORE_FILE,
    Stage,
    StageRun,
)
from exl2flow.core.store.store import StageFolder
from exl2flow.engine.loading.layer_split import SplitOptions
from exl2flow.inference.report.markdown import render_markdown
from exl2flow.inference.report.plots import render_plot
from exl2flow.inference.scoring.evaluate import RowKey, RowScores, evaluate_texts
from exl2flow.inference.scoring.sample import sample_text
from exl2flow.inference.scoring.text import text_rows
from exl2flow.kernels import get_ops
from exl2flow.model import Tokenizer, resolve

log = logging.getLogger(__name__)

REPORT_FILE, MARKDOWN_FILE, PLOT_FILE = "report.json", "report.md", "report.svg"
ROWS_PREFIX = "rows-"  # of files with scores per row, until the report is written
CALIBRATION_WARN, CALIBRATION_FAIL = 30.0, 1000.0  # perplexities on the calibration rows
CALIBRATION_RATIO = 1.5  # ... which count only above this multiple of the source's


def verdict(
    score: Score, calibration: Score | None, options: ValidateOptions
) -> tuple[list[str], list[str]]:
    """Return (warnings, failures) as sentences."""
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
        perplexity = calibration.perplexity
        text = f"calibration perplexity is {perplexity:.2f}"
        if perplexity > max(CALIBRATION_FAIL, limit) or not math.isfinite(perplexity):
            failures.append(text)
        elif perplexity > max(CALIBRATION_WARN, limit):
            warnings.append(text)
    return warnings, failures


def judge(scores: Sequence[Score], options: ValidateOptions) -> None:
    """Log warnings of models above the warning limit.

    Raises:
        ValidationFailed: listing the models above the failure limit.
    """
    failed = []
    for score in scores:
        warnings, failures = verdict(score, None, options)
        for text in warnings:
            log.warning("`%s`: %s", score.model, text)
        failed += [f"`{score.model}`: {text}" for text in failures]
    if failed:
        raise ValidationFailed("\n".join(failed))


def guessing(score: Score, vocab_size: int) -> list[str]:
    """Return a warning if the source gives every token equal probability, as zero weights do."""
    source = score.reference_perplexity
    if source is None or not math.isclose(source, vocab_size, rel_tol=1e-4):
        return []
    return [
        f"the source's perplexity equals its vocabulary size, {vocab_size}: its weights may be "
        "zero; fetch it again"
    ]


def report_in(folder: Path) -> Report:
    """Return the report of a finished validation, given the stage's folder."""
    return Report.from_json(read_json(folder / REPORT_FILE))


def check_verdict(folder: Path) -> list[str]:
    """Return the warnings of a finished validation.

    Raises:
        ValidationFailed: the model exceeds a limit.
    """
    report = read_json(folder / REPORT_FILE)
    if report["failures"]:
        raise ValidationFailed(
            "; ".join(report["failures"]) + f"; the report is in `{folder}`; raise `--bpw`, or "
            "the limit if this is expected"
        )
    warnings: list[str] = report["warnings"]
    return warnings


def held_out_rows(models: Sequence[Path], options: ValidateOptions) -> torch.Tensor:
    """Return rows of the text, int64 (rows, t), that are short enough for all of these models.

    The first model's tokenizer encodes the text. For errors see `text_rows`.
    """
    longest = min(resolve(model).max_positions for model in models)
    return text_rows(
        options.text,
        Tokenizer.load(models[0]),
        rows=options.rows,
        row_tokens=min(options.row_tokens, longest),
    )


def calibration_text_rows(ids: torch.Tensor, kinds: Sequence[str]) -> torch.Tensor:
    """Return the calibration rows with text: no random tokens, no noise."""
    keep = [i for i, kind in enumerate(kinds) if kind not in ("random", "noise")]
    return ids[keep]


def generate_sample(
    folder: Path, options: ValidateOptions, device: str, split: SplitOptions | None = None
) -> str:
    """Return the prompt and the model's seeded continuation; see `sample_text`."""
    tokens = min(options.sample_tokens, resolve(folder).max_positions // 2)
    prompt = options.sample_prompt
    return prompt + sample_text(
        folder, prompt, tokens=tokens, seed=options.sample_seed, device=device, split=split
    )


def validate(run: StageRun[ModelOptions]) -> None:
    """Write the report in its three forms to the stage folder, and the score to the output.

    If all of these are there and unchanged, only what a resume would need is deleted.
    """
    folder, out = run.folder, run.config.out.resolve()
    if not all(map(folder.valid, (REPORT_FILE, MARKDOWN_FILE, PLOT_FILE, str(out / SCORE_FILE)))):
        _report(run)
    if run.ranks.rank:
        return
    folder.remove(path.name for path in folder.path.glob(f"{ROWS_PREFIX}*"))
    total, score = folder.manifest.total, report_in(folder.path).score
    run.tick(total, total, f"kl_divergence={words.divergence(score.kl_divergence)}")


def _report(run: StageRun[ModelOptions]) -> None:
    """Score the output, and write what was found; ranks share the rows."""
    config, options = run.config, run.config.validate_options
    out = config.out.resolve()
    held_out = held_out_rows([config.source], options)
    calibration = _calibration_rows(run.inputs["tokenize"])
    if options.sample_tokens and run.ranks.rank == 0:
        get_ops(run.device).prepare()
    scores = _scores(run, held_out, calibration)
    if scores is None:
        return
    score, cross_check = scores
    run.stop_if_asked()
    sample = ""
    if options.sample_tokens:
        sample = generate_sample(out, options, run.device, config)
    warnings, failures = verdict(score, cross_check, options)
    warnings += guessing(score, resolve(config.source).vocab_size)
    for text in (*warnings, *failures):
        log.warning(text)
    record = read_json(out / RECORD_FILE)
    experts = record.get("experts")
    warnings += experts["warnings"] if experts else []  # `compile` logged them
    report: Json = {
        "model": str(out),
        "source": str(config.source.resolve()),
        "target": config.target,
        "prefer": record.get("options", {}).get("allocate", {}).get("prefer"),
        "bpw": record["allocation"]["bpw"],
        "predicted_kl": record.get("predicted_kl"),
        "tuning": record.get("tuning"),
        "calibration_rows": record.get("calibration"),
        "not_quantized": record.get("not_quantized"),
        **({"mtp_bpw": record["mtp"]["bpw"]} if "mtp" in record else {}),
        "source_bytes": weights_size(config.source),
        "score": asdict(score),
        "calibration": None if cross_check is None else asdict(cross_check),
        "experts": experts,
        "layers": record["layers"],
        "sample": sample,
        "warnings": warnings,
        "failures": failures,
    }
    _write(run, report)
    _write_scores(run, record["fingerprint"], {"score": score, "calibration": cross_check})


def _calibration_rows(folder: Path) -> torch.Tensor:
    """Return the rows used by the measurement that hold text."""
    kinds = read_json(folder / KINDS_FILE)["measure"]["kinds"]
    return calibration_text_rows(read_tensors(folder / ROWS_FILE)["measure"], kinds)


def _scores(
    run: StageRun[ModelOptions], held_out: torch.Tensor, calibration: torch.Tensor
) -> tuple[Score, Score | None] | None:
    """Score the output on both texts in one pass over it and its source; None: rank 0 does it."""
    manifest = run.folder.manifest

    def advance(done: int, total: int, detail: str) -> None:
        is_new = (done, total + 1) != (manifest.cursor, manifest.total)
        manifest.cursor, manifest.total = done, total + 1  # the sample comes last
        run.stop_if_asked()
        if is_new:
            run.tick(done, manifest.total, detail)

    texts = [held_out, calibration] if len(calibration) else [held_out]
    scored = evaluate_texts(
        [run.config.out.resolve()],
        texts,
        reference=run.config.source,
        device=run.device,
        advance=advance,
        known=_read_rows(run.folder),
        save=partial(_write_rows, run.folder),
        ranks=run.ranks,
    )
    written = run.ranks.told_by_all(_row_files(run.folder))
    run.settle({name for names in written for name in names})  # before they are removed
    if run.ranks.rank:
        return None
    [(score, *others)] = scored
    return score, others[0] if others else None


def _row_files(folder: StageFolder) -> list[str]:
    """Return the files with row scores, from which an interrupted validation resumes."""
    return [name for name in folder.manifest.files if name.startswith(ROWS_PREFIX)]


def _read_rows(folder: StageFolder) -> dict[RowKey, RowScores]:
    fields_of: dict[RowKey, dict[str, torch.Tensor]] = {}
    for name in filter(folder.valid, _row_files(folder)):
        for key, tensor in read_tensors(folder.path / name).items():
            text, row, field = key.split(".")
            fields_of.setdefault((int(text), int(row)), {})[field] = tensor
    return {key: RowScores(**tensors) for key, tensors in fields_of.items()}


def _write_rows(folder: StageFolder, scores: Mapping[RowKey, RowScores]) -> None:
    name = "{}{}-{:05d}.safetensors".format(ROWS_PREFIX, *min(scores))
    tensors = {
        f"{text}.{row}.{field.name}": getattr(row_scores, field.name)
        for (text, row), row_scores in scores.items()
        for field in fields(row_scores)
    }
    folder.commit(name, write_tensors(folder.path / name, tensors))


def _write(run: StageRun[ModelOptions], content: Json) -> None:
    """Write the report in its three forms; the entries of the record stay as they are there."""
    folder, report = run.folder.path, Report.from_json(content)
    plot = render_plot(report.layers, report.score.kl_divergence, report.predicted_kl)
    write_json(folder / REPORT_FILE, content)
    write_text(folder / MARKDOWN_FILE, render_markdown(report))
    write_text(folder / PLOT_FILE, plot)
    for name in (REPORT_FILE, MARKDOWN_FILE, PLOT_FILE):
        run.folder.commit(name, digest(folder / name), cursor=run.folder.manifest.total)


def _write_scores(
    run: StageRun[ModelOptions], fingerprint: str, scores: Mapping[str, Score | None]
) -> None:
    """Write the scores to the output, with the fingerprint of the files they apply to."""
    options = run.folder.manifest.options  # of the text they are from
    content: Json = {"fingerprint": fingerprint, "options": options}
    for name, score in scores.items():
        values = {} if score is None else asdict(score)
        content[name] = {key: value for key, value in values.items() if key != "model"} or None
    path = run.config.out.resolve() / SCORE_FILE
    write_json(path, content)
    run.folder.commit(str(path), digest(path))


def _options(config: ModelOptions) -> Json:
    options = config.validate_options
    text = options.text or calibration_data.heldout()
    return {**options.model_dump(mode="json", exclude={"text"}), "text": digest(text)}


VALIDATE: Stage[ModelOptions] = Stage(
    name="validate",
    schema=4,
    inputs=("tokenize", "compile"),
    options=_options,
    run=validate,
    files=lambda config: filter(None, [config.validate_options.text]),
    is_dealt=lambda config: True,
)
