"""Find all problems that can be known before the first stage, and return the plan."""

import os
import shutil
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from exl2flow.core.errors import Exl2FlowError, PreflightFailed, StoreError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.memory import available_memory
from exl2flow.core.store.crew import places
from exl2flow.core.store.model_files import CONFIG_FILE, carried_files, left_out
from exl2flow.core.store.need import Need
from exl2flow.core.store.outline import Outline
from exl2flow.core.store.source import DIGESTS_FILE, WANTED
from exl2flow.core.store.stage import Stage
from exl2flow.core.words import size
from exl2flow.kernels import resolve_device, unused_gpu
from exl2flow.model import ModelSpec, expected_tensors, resolve
from exl2flow.model.files.source_tensors import (
    check_claimed,
    check_storable,
    check_tensors,
    has_all_layers,
    unused_tensors,
)
from exl2flow.quant.allocate.bit_range import BitRange, check_measurement
from exl2flow.quant.allocate.block import block_in_words, stored_spec
from exl2flow.quant.allocate.layout import carried_bytes, carried_tensors
from exl2flow.quant.compile.stage import check_output_folder
from exl2flow.quant.forecast.gpu_fit import check_gpu, gpu_fits
from exl2flow.quant.forecast.main_memory import beside_gpu
from exl2flow.quant.forecast.needs import stage_needs, work_bytes
from exl2flow.quant.forecast.plan import Plan, base_memory, calibration_in_words, what_is_left
from exl2flow.quant.tokenize.checks import check_files, check_rows, check_tokenizer
from exl2flow.quant.walk.needs import Card

T = TypeVar("T")

FEW_ROWS = 16  # of calibration, which are tried where memory does not suffice


def preflight(
    config: RunOptions,
    stages: Sequence[Stage[Any]],
    *,
    run: Sequence[Stage[Any]] | None = None,
    anew: bool = False,
) -> Plan:
    """Check the making of a model without doing any of it.

    Args:
        config: of one model.
        stages: of its making.
        run: what will run. Disk and memory must suffice for what is left of it. None: all.
        anew: nothing of them counts as finished.

    Raises:
        PreflightFailed: all problems, one per line.
    """
    problems: list[str] = []
    attempt = partial(_attempted, problems)
    device = attempt(lambda: resolve_device(config.device))
    used = (device and attempt(lambda: places(config.gpus, str(device)))) or []
    cards = [Card.of(torch.device(place), config.max_memory) for place in used if place != "cpu"]
    option = "--work-root" if config.work_root else "--out"  # whose parent is the default
    attempt(lambda: _check_writable(config.work_dir_root, option))
    attempt(lambda: _check_output(config))
    attempt(lambda: check_files(config))
    attempt(lambda: carried_files(config.source))
    spec, plan = attempt(lambda: resolve(config.source, wanted=WANTED)), None
    if spec is not None:
        has_layers = attempt(lambda: has_all_layers(spec))  # loops over others may take for ever
        attempt(lambda: check_tokenizer(config, spec))
        attempt(lambda: check_storable(spec))
        attempt(lambda: check_tensors(spec, lossy=config.accepts_lossy))
        if has_layers:
            attempt(lambda: check_claimed(spec))
        attempt(lambda: check_rows(config, spec))
        given = config.measurement_file
        if is_measured := given is None or given.is_file():  # else `check_files` says so
            attempt(lambda: check_measurement(config, spec))
        to_do = () if problems else run or stages
        if has_layers and is_measured:
            plan = attempt(
                lambda: _plan(config, stages, spec, cards, to_do, device=", ".join(used), anew=anew)
            )
        if plan is not None:
            attempt(lambda: check_disk([plan], stages))
            attempt(lambda: _check_memory(config, stages, plan, spec))
            if not problems:
                return plan
    failed = PreflightFailed("\n".join(problems))
    failed.plan = plan.rows() if plan is not None else ()
    raise failed


def _attempted(problems: list[str], check: Callable[[], T]) -> T | None:
    """Return what a check returns; None if it refuses, and what it says is one of the problems."""
    try:
        return check()
    except Exl2FlowError as error:
        problems.extend(line for line in str(error).splitlines() if line not in problems)
    except OSError as error:
        problems.append(f"cannot read `{error.filename}`: {error.strerror}")
    return None


def _check_output(config: RunOptions) -> None:
    """Check that the output is, or can become, a folder of this conversion alone."""
    _check_writable(config.out, "--out")
    if config.work_dir_root.is_relative_to(config.out.resolve()):
        raise StoreError(
            f"the work root `{config.work_dir_root}` is in the output `{config.out}`, which holds "
            "nothing but the model; choose another `--work-root` (checkpoints can be moved there)"
        )
    check_output_folder(config.out, config.source, memory=config.work_dir_root / DIGESTS_FILE)


def _check_writable(folder: Path, option: str) -> None:
    existing = _existing(folder.resolve())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise StoreError(
            f"`{existing}` is not a folder that can be written; choose another `{option}`"
        )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _plan(
    config: RunOptions,
    stages: Sequence[Stage[Any]],
    spec: ModelSpec,
    cards: Sequence[Card],
    to_do: Sequence[Stage[Any]],
    *,
    device: str,
    anew: bool,
) -> Plan:
    """Forecast sizes; refuse an unreachable target."""
    card = min(cards, key=lambda card: card.memory, default=None)
    reach = BitRange.of(config, spec)
    packed = reach.packed_bytes(config, spec)
    needs = stage_needs(config, stages, spec, card, packed=packed)
    if card is not None:
        needs = beside_gpu(config, spec, card, needs)
    left, outlooks = what_is_left(config, to_do, needs, anew=anew)
    outline, stored = Outline.of(config.source), stored_spec(config, spec)
    return Plan(
        model=spec.source_dir.resolve().name,
        architecture=spec.family.architecture,
        layers=spec.num_layers,
        weights=sum(map(prod, expected_tensors(spec).values())),
        device=device,
        unused_gpu=unused_gpu() if config.device == "auto" else None,
        calibration=calibration_in_words(config, spec, card),
        target=config.target,
        prefer=config.allocation.prefer,
        reachable_bpw=reach.bpw,
        output_bytes=needs["compile"].output_bytes,
        work_bytes=work_bytes(needs.values()),
        memory_bytes=base_memory(card) + max(need.memory_bytes for need in needs.values()),
        needs=needs,
        left=left,
        finished=tuple(each.stage for each in outlooks if each.state == "finished"),
        stages=outlooks,
        card=card,
        cards=tuple(cards),
        dealt=tuple(stage.name for stage in stages if stage.is_dealt(config)),
        gpu_fits=gpu_fits(config, stages, spec),
        work_dir=str(config.work_dir_root),
        out=str(config.out.resolve()),
        carried=(CONFIG_FILE, *(path.name for path in carried_files(config.source))),
        left_out=tuple(left_out(config.source)),
        unused=unused_tensors(spec),
        not_quantized=(len(carried_tensors(stored)), carried_bytes(stored)),
        download_bytes=outline.download_bytes if outline else 0,
        block=block_in_words(config, spec),
    )


def check_disk(plans: Sequence[Plan], stages: Sequence[Stage[Any]]) -> None:
    """Check that the disks have room for what is left of conversions of one model.

    The download of its source counts, if it is still to come.

    Raises:
        StoreError: naming what they need and what is free.
    """
    work: dict[Hashable, Need] = {}
    shared = {stage.name for stage in stages if stage.is_shared}
    for plan in plans:
        for name, stage_need in plan.left.items():
            work[name if name in shared else (plan.out, name)] = stage_need
    sizes = [(plan.out, sum(n.output_bytes for n in plan.left.values())) for plan in plans]
    disks: dict[int, list[tuple[Path, int]]] = {}
    download = plans[0].download_bytes
    for folder, count in (*sizes, (plans[0].work_dir, work_bytes(work.values()) + download)):
        existing = _existing(Path(folder))
        disks.setdefault(existing.stat().st_dev, []).append((existing, count))
    for parts in disks.values():
        need, free = sum(count for _, count in parts), shutil.disk_usage(parts[0][0]).free
        if need > free:
            fetched = f" with the download of {size(download)}" if download else ""
            raise StoreError(
                f"the conversion may need {size(need)} of disk space{fetched}, {size(free)} "
                "is free; free some, or put `--out` and `--work-root` on other disks"
            )


def _check_memory(
    config: RunOptions, stages: Sequence[Stage[Any]], plan: Plan, spec: ModelSpec
) -> None:
    """Check that main memory and the GPU's suffice for every stage that is left."""
    card, free = plan.card, available_memory()
    main = {name: need.memory_bytes for name, need in plan.left.items() if need.memory_bytes}
    stage = max(main, key=main.__getitem__, default="")
    base = base_memory(card)
    if stage and free is not None and base + main[stage] > free:
        advice = _memory_advice(config, stages, plan, spec, stage, free - base)
        raise StoreError(
            f"the stage `{stage}` may need {size(base + main[stage])} of memory, {size(free)} may "
            f"be used; {advice}"
        )
    if card is None:
        return
    on_gpu = {
        name: need.gpu_memory_bytes for name, need in plan.left.items() if need.holds != "shards"
    }
    stage = max(on_gpu, key=on_gpu.__getitem__, default="")
    if stage and on_gpu[stage] > card.memory:
        raise StoreError(
            f"the stage `{stage}` may need {size(on_gpu[stage])} of the GPU's memory, "
            f"{size(card.memory)} may be used; choose another `--quality`, `--calibration` or "
            "`--device`"
        )
    check_gpu(config, stages, spec, card.memory, plan.left)


def _memory_advice(
    config: RunOptions,
    stages: Sequence[Stage[Any]],
    plan: Plan,
    spec: ModelSpec,
    stage: str,
    room: int,
) -> str:
    """Return what most of the memory is for, and which options leave so little that it suffices."""
    parts = {s.name: sum(p.numel for p in s.projections) for s in spec.sublayers}
    parts[spec.head.key] = spec.head.numel
    part = max(parts, key=parts.__getitem__)
    helpful = [
        option
        for option, changed in _smaller(config)
        if _memory(changed, stages, plan, spec) <= room
    ]
    largest = f"the largest part of the model, `{part}`, has {parts[part] / 1e6:,.1f} M weights"
    if plan.left[stage].holds in ("model", "shards"):
        largest = f"it holds the whole model, {plan.weights / 1e6:,.1f} M weights"
    if not helpful:
        return f"{largest}, and no option lowers that enough: use a machine with more memory"
    return f"{largest}; {' or '.join(helpful)} would lower it enough"


def _smaller(config: RunOptions) -> Iterator[tuple[str, RunOptions]]:
    """Yield options that may lower the memory of a run, and the run with them."""
    rows = config.calibration
    for option, values in (
        ("--rows", {"rows": min(FEW_ROWS, rows.rows), "measure_rows": FEW_ROWS // 6}),
        ("--row-tokens", {"row_tokens": 512, "measure_row_tokens": 512}),
    ):
        changed = rows.model_copy(update=values)
        value = next(iter(values.values()))
        yield f"`{option} {value}`", config.model_copy(update={"calibration": changed})
    given = config.model_dump(exclude_unset=True)
    for quality in ("fast", "exllamav2"):
        with suppress(ValueError):
            yield f"`--quality {quality}`", type(config)(**given | {"quality": quality})


def _memory(config: RunOptions, stages: Sequence[Stage[Any]], plan: Plan, spec: ModelSpec) -> int:
    """Return the most memory that a stage of a run needs beside the process itself."""
    needs = stage_needs(config, stages, spec, plan.card, packed=plan.output_bytes)
    if plan.card is not None:
        needs = beside_gpu(config, spec, plan.card, needs)
    return max(need.memory_bytes for need in needs.values())
