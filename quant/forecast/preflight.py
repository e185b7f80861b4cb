"""Everything that can be known to be wrong before the first stage, in one list; and the plan."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import (
    BudgetUnreachable,
    Exl2FlowError,
    NotEnoughRows,
    PreflightFailed,
    SourceModelError,
    StoreError,
    TensorShapeError,
)
from exl2flow.core.memory import available_memory
from exl2flow.core.source import WANTED
from exl2flow.kernels import resolve_device
from exl2flow.model import ModelSpec, TensorFiles, Tokenizer, expected_tensors, resolve
from exl2flow.model.exl2 import MAX_ROWS, ROW_MULTIPLE
from exl2flow.model.linear import is_packed
from exl2flow.quant.allocate.budget import check_measured, decoder_numel, total_target
from exl2flow.quant.allocate.layout import plain_tensors
from exl2flow.quant.compile.stage import check_output_folder
from exl2flow.quant.forecast.calibration import calibration_in_words, check_calibration
from exl2flow.quant.forecast.gpu import Card, gpu_needs
from exl2flow.quant.forecast.main_memory import memory_bytes, stage_needs, work_bytes
from exl2flow.quant.forecast.plan import BASE_MEMORY, Plan, megabytes
from exl2flow.quant.measure.candidates import (
    HEAD_OPTIONS,
    HEAD_PARAMS,
    PROJECTION_OPTIONS,
    candidates_for,
)
from exl2flow.quant.measure.measurement import (
    candidate_bits,
    projection_bits,
    read_measurement,
    slot_projections,
)
from exl2flow.quant.tokenize.parquet import check_parquet
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.walk.working_memory import working_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")


def preflight(config: ConversionConfig) -> Plan:
    """Check a conversion without doing any of it.

    Raises:
        PreflightFailed: all problems, one per line.
    """
    problems: list[str] = []

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except Exl2FlowError as error:
            problems.extend(line for line in str(error).splitlines() if line not in problems)
        except OSError as error:
            problems.append(f"cannot read `{error.filename}`: {error.strerror}")
        return None

    device = attempt(lambda: resolve_device(config.device))
    card = None
    if device is not None and device.type == "cuda":
        card = Card.of(device, config.max_memory)
    attempt(lambda: _check_writable(config.work_dir_root))
    attempt(lambda: _check_writable(config.out))
    attempt(lambda: check_output_folder(config.out, config.source))
    attempt(lambda: _check_text(config))
    spec = attempt(lambda: resolve(config.source, wanted=WANTED))
    plan = None
    if spec is not None:
        attempt(lambda: _check_tokenizer(spec))
        attempt(lambda: check_calibration(config, spec, device))
        attempt(lambda: _check_shapes(spec))
        attempt(lambda: _check_tensors(spec))
        attempt(lambda: _check_rows(config, spec))
        attempt(lambda: _check_measurement(config, spec))
        attempt(lambda: _check_tuning(config, spec, card))
        plan = attempt(lambda: _plan(config, spec, device, card))
    if plan is not None:
        attempt(lambda: check_disk([plan]))
        attempt(lambda: _check_memory(plan))
        _warn_of_card(plan, spec)
    if problems or plan is None:
        raise PreflightFailed("\n".join(problems))
    return plan


def _check_writable(folder: Path) -> None:
    """Find the nearest existing parent and ask whether it can be written."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise StoreError(
            f"`{existing}` is not a folder that can be written; choose another one for `{folder}`"
        )


def _check_text(config: ConversionConfig) -> None:
    """Ask that the files a user names exist, before hours are spent."""
    named = (config.calibration.file, config.measurement, config.validate_options.text)
    missing = [str(path) for path in named if path is not None and not path.is_file()]
    if missing:
        raise StoreError(f"no such file: {', '.join(f'`{name}`' for name in missing)}")
    if config.calibration.file is not None:
        check_parquet(config.calibration.file)


def _check_tokenizer(spec: ModelSpec) -> None:
    tokenizer = Tokenizer.load(spec.source_dir)
    if len(tokenizer.encode("The quick brown fox.")) == 0:
        raise NotEnoughRows(f"the tokenizer of `{spec.source_dir}` makes no tokens of plain text")


def _check_shapes(spec: ModelSpec) -> None:
    """Ask that every matrix can be packed."""
    projections = [p for s in spec.sublayers for p in s.projections] + [spec.head]
    bad = [p for p in projections if p.in_features % ROW_MULTIPLE or p.in_features > MAX_ROWS]
    if bad:
        names = ", ".join(f"`{p.key}` ({p.in_features})" for p in bad[:4])
        raise TensorShapeError(
            f"in-features must be a multiple of {ROW_MULTIPLE} and at most {MAX_ROWS}: {names}"
            f"{' …' if len(bad) > 4 else ''}; EXL2 cannot store this model"
        )


def _check_tensors(spec: ModelSpec) -> None:
    """Compare names and shapes in the files with the config; list everything that differs."""
    tensors = TensorFiles(spec.source_dir)
    projections = [p.key for s in spec.sublayers for p in s.projections]
    stored = [key for key in projections if is_packed(key, tensors)]
    if stored:
        raise SourceModelError(
            f"`{spec.source_dir}` is quantized already (`{stored[0]}`, {len(stored)} matrices in "
            "all); convert the model that it was made from"
        )
    lines = []
    for name, shape in expected_tensors(spec).items():
        if name not in tensors:
            lines.append(f"`{name}` {shape} is missing in `{spec.source_dir}`")
        elif not _fits(tensors.shape(name), shape, spec):
            lines.append(f"`{name}` has shape {tensors.shape(name)}, the config implies {shape}")
    if lines:
        shown = lines[:8] + ([f"… and {len(lines) - 8} more"] if len(lines) > 8 else [])
        raise TensorShapeError("\n".join(shown) + "; get the model's files again, complete")


def _fits(found: tuple[int, ...], expected: tuple[int, ...], spec: ModelSpec) -> bool:
    """Embedding and head may have more rows than the vocabulary."""
    if len(found) == len(expected) == 2 and expected[0] == spec.vocab_size:
        return found[0] >= expected[0] and found[1] == expected[1]
    return tuple(found) == expected


def _check_measurement(config: ConversionConfig, spec: ModelSpec) -> None:
    """Ask that what is to be allotted will have been measured."""
    in_nats = with_head = config.sensitivity.kind == "fisher"
    if config.measurement is not None:
        given = read_measurement(config.measurement, spec)
        costs = [result.nats for results in given.decoder.values() for result in results]
        in_nats, with_head = in_nats and None not in costs, bool(given.head)
    check_measured(config, in_nats=in_nats, with_head=with_head)


def _check_rows(config: ConversionConfig, spec: ModelSpec) -> None:
    """Warn of rows that are too long for the model.

    Raises:
        NotEnoughRows: no row can be set aside to judge.
    """
    calibration = config.calibration
    judging = [
        name
        for name, needed in (("tuning", config.tune.steps), ("allocation", config.allocate.rounds))
        if needed
    ]
    if judging and calibration.rows < 2:
        raise NotEnoughRows(
            f"{' and '.join(judging)} set rows of text aside to judge by, and there is one row; "
            "ask for more with `--rows`, or for another `--quality`"
        )
    longest = max(calibration.row_tokens, calibration.measure_row_tokens)
    if longest > spec.max_positions:
        log.warning("rows of %d tokens exceed the model's %d", longest, spec.max_positions)


def _check_tuning(config: ConversionConfig, spec: ModelSpec, card: Card | None) -> None:
    """Ask that a GPU can hold what tuning needs: the whole source, and the quantized model."""
    if card is None or not config.tune.steps:
        return
    if (need := tune_memory(spec, config.tune)) > card.memory:
        raise StoreError(
            f"the stage `tune` may need {megabytes(need)} of the GPU's memory, "
            f"{megabytes(card.memory)} may be used; choose another `--quality`, or `--device cpu`"
        )


def _plan(
    config: ConversionConfig, spec: ModelSpec, device: torch.device | None, card: Card | None
) -> Plan:
    """Forecast sizes; refuse a target that the candidates cannot reach.

    Raises:
        BudgetUnreachable: naming the reachable range.
    """
    numel = decoder_numel(spec)
    decoder, head = reachable_bits(config, spec)
    plain = sum(2 * torch.Size(shape).numel() for shape in plain_tensors(spec).values())
    low, high = decoder[0] / numel, decoder[1] / numel
    if config.bpw is not None:
        if config.bpw < low:
            raise BudgetUnreachable(
                f"{config.bpw:g} bits per weight are out of reach: this model's candidates span "
                f"{low:.3f} to {high:.3f}; ask for more with `--bpw`"
            )
        packed = int((numel * min(config.bpw, high) + head[0]) / 8)
    else:
        target, least = total_target(config, spec), plain + (decoder[0] + head[0]) // 8
        if target < least:
            raise BudgetUnreachable(
                f"a total of {target:,} bytes is out of reach: the smallest output has about "
                f"{least:,}; raise the target"
            )
        packed = min(target - plain, (decoder[1] + head[1]) // 8)
    needs = stage_needs(config, spec, device, packed=packed)
    return Plan(
        model=spec.source_dir.resolve().name,
        architecture=spec.family.architecture,
        layers=spec.num_layers,
        weights=sum(torch.Size(shape).numel() for shape in expected_tensors(spec).values()),
        device=str(device),
        calibration=calibration_in_words(config, spec),
        target=config.target,
        reachable_bpw=(low, high),
        output_bytes=plain + packed,
        work_bytes=work_bytes(needs),
        memory_bytes=BASE_MEMORY + memory_bytes(needs),
        needs=needs,
        card=card,
        gpu_needs=gpu_needs(config, spec, card, output=plain + packed) if card else {},
        work_dir=str(config.work_dir_root),
        out=str(config.out.resolve()),
    )


def reachable_bits(
    config: ConversionConfig, spec: ModelSpec
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the least and the most bits that the candidates allow: of the decoder, of the head."""
    slots = slot_projections(spec)
    if config.measurement is not None:
        measured = read_measurement(config.measurement, spec).decoder
        bits = [[result.total_bits for result in results] for results in measured.values()]
    elif config.sensitivity.kind == "fisher":
        decoder = [p for s in spec.sublayers for p in s.projections]
        bits = [[projection_bits(p, params) for params in PROJECTION_OPTIONS] for p in decoder]
    else:
        bits = [
            [candidate_bits(slots[s.name], c) for c in candidates_for(s)] for s in spec.sublayers
        ]
    fixed = config.fixed_head_bits
    options = HEAD_OPTIONS if fixed is None else [HEAD_PARAMS[fixed]]
    head = [projection_bits(spec.head, params) for params in options]
    return (sum(map(min, bits)), sum(map(max, bits))), (min(head), max(head))


def check_disk(plans: Sequence[Plan]) -> None:
    """Ask that the disks hold what conversions of one model leave behind.

    Raises:
        StoreError: saying how much there is, and how much it takes.
    """
    need: dict[int, int] = {}
    free: dict[int, int] = {}
    work = max(plans, key=lambda plan: plan.work_bytes)
    sizes = [(plan.out, plan.output_bytes) for plan in plans]
    # what stages keep is about their output; all else of the checkpoints is shared
    kept = work.work_bytes + sum(plan.output_bytes for plan in plans) - work.output_bytes
    for folder, size in (*sizes, (work.work_dir, kept)):
        existing = Path(folder)
        while not existing.exists():
            existing = existing.parent
        disk = existing.stat().st_dev
        need[disk] = need.get(disk, 0) + size
        free[disk] = shutil.disk_usage(existing).free
    for disk, size in need.items():
        if size > free[disk]:
            raise StoreError(
                f"the conversion may need {megabytes(size)} of disk, {megabytes(free[disk])} are "
                "free; free some, or put `--out` and `--work-root` on other disks"
            )


def _check_memory(plan: Plan) -> None:
    available = available_memory()
    if available is not None and plan.memory_bytes > available:
        most = max(plan.needs, key=lambda name: plan.needs[name].memory)
        raise StoreError(
            f"the stage `{most}` may need {megabytes(plan.memory_bytes)} of memory, "
            f"{megabytes(available)} are available; reduce `--rows` or `--row-tokens`, or choose "
            "another `--quality`"
        )


def _warn_of_card(plan: Plan, spec: ModelSpec | None) -> None:
    """Warn of a model whose sublayers may not fit a GPU even if worked on piece by piece."""
    if not (plan.card and spec):
        return
    least = working_bytes(spec, plan.card.memory)
    if least > plan.card.memory:
        log.warning(
            "the largest sublayer may need %s of the GPU's memory, %s may be used; if it ends for "
            "lack of memory, raise `--max-memory` or use `--device cpu`: it goes on where it was",
            megabytes(least),
            megabytes(plan.card.memory),
        )
