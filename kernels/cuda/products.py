"""Fused linears at small batch size on a GPU: kernels that read packed codes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from exl2flow.core.options.environment import tuning_file, virtual_architecture
from exl2flow.core.store.files import digest_of
from exl2flow.kernels.cuda import prompts as cuda_prompts
from exl2flow.kernels.cuda.compiler import (
    EXCHANGE_CTAS,
    LaunchRefused,
    launch,
    limits,
    options_of,
    tell_refusal,
)
from exl2flow.kernels.cuda.graphs import bucket
from exl2flow.kernels.cuda.steps import activated, norm
from exl2flow.kernels.interface.facts import PlanFacts
from exl2flow.kernels.interface.packed import FEW_ROWS, FusedLinear
from exl2flow.kernels.plans import batched
from exl2flow.kernels.plans.fill import facts_of
from exl2flow.kernels.plans.product import (
    MOST_ROWS,
    LaunchPlan,
    begins_apart,
    fuses_all,
    plan_of,
    splits_epilogue,
)
from exl2flow.kernels.plans.shares import WARPS
from exl2flow.kernels.plans.sources import filled, source
from exl2flow.kernels.plans.tuning import (
    APART,
    BATCHED,
    DECODED,
    HALVED,
    Choice,
    Tuning,
    candidates,
    fastest,
    key_of,
)
from exl2flow.kernels.streams import elapsed

KERNELS = "product.cu", "batched.cu", "decode.cu"
PASSES = 16  # reads of other memory before measured work: the host has launched it by their end
OF_CACHE = 2  # a pass reads this many times the cache size
MANY_ROWS = 17  # from here on, decoded matrices may be faster
GATHERED = 8  # columns of a rank are a multiple
WHOLE_ROWS = 32  # more rows of a chain without a launch are halved, not multiplied one by one


def multiply(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """See `Ops.multiply`.

    If a launch is impossible or refused, more than `WHOLE_ROWS` rows run half of them at a time.
    Otherwise the products of a chain run one by one, more than `MOST_ROWS` rows half of them at a
    time, and fewer rows with decoded matrices.
    """
    is_one_form = len({matrix.has_zeros for p in products for matrix in p.matrices}) == 1
    if len(x) > FEW_ROWS or not is_one_form:
        return cuda_prompts.multiply(x, products, hidden)
    runs = [*_runs(products, len(x))]
    if len(runs) == 1 and fuses_all(products, len(x)):
        plan = _plan(tuple(products), bucket(len(x)))
        if plan == DECODED:
            return cuda_prompts.multiply(x, products, hidden)
        if isinstance(plan, LaunchPlan):
            try:
                return _launched(plan, x, products, hidden)
            except LaunchRefused as refusal:
                _forget(plan, tuple(products), bucket(len(x)), refusal.reason)
        if _halves(products, len(x)):
            return _halved(x, products, hidden)
        if len(products) == 1:
            return cuda_prompts.multiply(x, products, hidden)
        runs = [[product] for product in products]
    return _by_turns(runs, x, hidden)


def multiply_at_once(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor] | None:
    """See `Ops.multiply_at_once`."""
    is_one_form = len({matrix.has_zeros for p in products for matrix in p.matrices}) == 1
    rows, runs = len(x), [*_runs(products, len(x))]
    is_one_launch = len(runs) == 1 and is_one_form and fuses_all(products, rows)
    if rows > batched.EXCHANGED_ROWS or not is_one_launch:
        return None
    if any(p.boxes and rows * p.matrices[0].columns > p.boxes.room for p in products):
        return None
    gathers = products[0].gathers
    if gathers and (x.shape[1] % GATHERED or rows * x.shape[1] > 2 * gathers.room):
        return None
    plan = _plan(tuple(products), bucket(rows))
    if not isinstance(plan, LaunchPlan) or plan.ctas > EXCHANGE_CTAS:
        return None
    if not plan.meets and gathers is None:
        return None
    try:
        return _launched(plan, x, products, hidden)
    except LaunchRefused as refusal:
        _PLANS[products[0]][bucket(rows), *products[1:]] = None
        tell_refusal(plan.file, refusal.reason, "its products between exchanges")
        return None


def _by_turns(
    runs: Iterable[Sequence[FusedLinear]], x: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Multiply runs of a chain, each with launches of its own."""
    results, beside = [x], list[torch.Tensor]()
    for run in runs:
        results, hidden = _run(results[0], run, hidden)
        count = len(results) - sum(len(product.beside) for product in run)
        results, beside = results[:count], [*beside, *results[count:]]
    return [*results, *beside], results[0] if hidden is None else hidden


def _halves(products: Sequence[FusedLinear], rows: int) -> bool:
    """Return whether rows for which no launch is possible run half of them at a time."""
    return rows > (MOST_ROWS if len(products) == 1 else WHOLE_ROWS)


def _halved(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Multiply rows for which no launch is possible, half of them at a time."""
    half = bucket(len(x)) // 2
    states = [None, None] if hidden is None else [hidden[:half], hidden[half:]]
    parts = [
        multiply(rows, products, state)
        for rows, state in zip((x[:half], x[half:]), states, strict=True)
    ]
    results = [torch.cat(same) for same in zip(*(part[0] for part in parts), strict=True)]
    return results, torch.cat([part[1] for part in parts])


def _runs(products: Sequence[FusedLinear], rows: int) -> Iterator[list[FusedLinear]]:
    """Split a chain before products that begin with launches of their own, and after epilogues."""
    run: list[FusedLinear] = []
    for product in products:
        if run and (splits_epilogue(run[-1], product, rows) or begins_apart(product, rows)):
            yield run
            run = []
        run.append(product)
    yield run


def _run(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Multiply a chain, with launches for what the kernel does not compute.

    Returns the results as `Ops.multiply` does, and the last hidden state, or None if there is none.
    """
    first, last, beside = products[0], products[-1], list[torch.Tensor]()
    if begins_apart(first, len(x)):
        x = x if first.norm is None else norm(x, first.norm)
        beside = multiply(x, [_beside(first)])[0] if first.beside else []
    cores = _cores(products, len(x))
    results, states = multiply(x, cores, hidden)
    if any(core.adds for core in cores):
        hidden = states
    if not splits_epilogue(last, None, len(x)):
        return [*results, *beside], hidden
    [y] = results
    if last.activation is not None and not last.is_gated:
        y = activated(y, last.activation)
    results = cuda_prompts.finished(last, [y], hidden if last.adds else None)
    return [*results, *beside], results[0] if last.adds else hidden


def launches(products: Sequence[FusedLinear], rows: int) -> list[PlanFacts]:
    """See `Ops.launches`: those of `multiply`, whose plans they are."""
    if rows > FEW_ROWS or len({matrix.has_zeros for p in products for matrix in p.matrices}) > 1:
        return []
    runs = [*_runs(products, rows)]
    if len(runs) == 1 and fuses_all(products, rows):
        plan = _plan(tuple(products), bucket(rows))
        if plan == DECODED:
            return []
        if isinstance(plan, LaunchPlan):
            processors, _ = limits(_device(products).index)
            return [facts_of(plan, products=len(products), processors=processors)]
        if _halves(products, rows):
            half = bucket(rows) // 2
            return launches(products, half) + launches(products, rows - half)
        if len(products) == 1:
            return []
        runs = [[product] for product in products]
    parts: list[Sequence[FusedLinear]] = []
    for run in runs:
        if run[0].beside and begins_apart(run[0], rows):
            parts.append([_beside(run[0])])
        parts.append(_cores(run, rows))
    return [facts for part in parts for facts in launches(part, rows)]


# parts of products that have launches of their own: one object each, as plans key on it
_PARTS: WeakKeyDictionary[FusedLinear, dict[object, FusedLinear]] = WeakKeyDictionary()


def _cores(run: Sequence[FusedLinear], rows: int) -> list[FusedLinear]:
    """Return the parts of products that the kernel computes."""
    return [_core(product, rows, is_last=product is run[-1]) for product in run]


def _core(product: FusedLinear, rows: int, *, is_last: bool) -> FusedLinear:
    drops_first = begins_apart(product, rows)
    drops_rest = is_last and splits_epilogue(product, None, 1)
    if not drops_first and not drops_rest:
        return product
    parts, key = _PARTS.setdefault(product, {}), (drops_first, is_last)
    if key not in parts:
        core = replace(product, norm=None, matrices=product.main) if drops_first else product
        if drops_rest:
            activation = product.activation if product.is_gated else None
            core = replace(core, activation=activation, after=None, multiplier=1.0, adds=False)
        parts[key] = core
    return parts[key]


def _beside(product: FusedLinear) -> FusedLinear:
    """Return the product of the matrices beside others, without its norm."""
    parts = _PARTS.setdefault(product, {})
    if "beside" not in parts:
        parts["beside"] = FusedLinear(matrices=product.beside)
    return parts["beside"]


def _launched(
    plan: LaunchPlan, x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    argument, x = filled(plan.argument.copy(), rows=len(x)), x.contiguous()
    by = products[0].norm
    if by is not None and not argument["stages"][0]["norm"]:
        x = norm(x, by)
    results, beside = list[torch.Tensor](), list[torch.Tensor]()
    used = [x]  # kept until the launch: stages must not share memory
    used.append(x := _gathering(argument, x, products[0]))
    before: FusedLinear | None = None
    for of_product, product in zip(plan.stages, products, strict=True):
        stages = argument["stages"][of_product]  # all rounds of the product
        filled(stages, x=x)
        if plan.adds_normed and product.after is not None:
            y, total, x = (x.new_empty(len(x), product.matrices[0].columns) for _ in range(3))
            filled(stages["of"][:, 0], y=y)
            filled(stages, hidden=0 if hidden is None else hidden, sum=total, next=x)
            hidden = total
            used += [y, total, x]
            continue
        if before is not None and before.after is not None and not plan.adds_normed:
            total = torch.empty_like(x)
            filled(stages, sum=total, hidden=0 if hidden is None else hidden)
            hidden = total
            used.append(total)
        before = product
        first = 1 if product.activation else 0  # a gate has no result of its own
        matrices, entries = product.main[first:], stages["of"][:, first:].T
        adds = product.adds and product.after is None
        if adds and hidden is not None:
            filled(entries[0], residual=hidden)
        used += _adding_up(argument, entries[0], len(x), product)
        if adds or product is products[-1]:
            dtype = torch.float32 if product.exact else x.dtype
            results = [x.new_empty(len(x), matrix.columns, dtype=dtype) for matrix in matrices]
            for entry, result in zip(entries, results, strict=False):
                filled(entry, **{"exact" if product.exact else "y": result})
            used += results
        for entry, matrix in zip(entries[len(matrices) :], product.beside, strict=False):
            beside.append(x.new_empty(len(x), matrix.columns))
            filled(entry, y=beside[-1])
        if adds:
            hidden = results[0]
        if product is not products[-1]:
            x = x.new_empty(len(x), matrices[0].columns)
            used.append(x)
            filled(entries[0], copy=x)
    launch(
        plan.file,
        plan.name,
        (plan.ctas,),
        argument,
        threads=32 * WARPS,
        shared=plan.shared,
        device=x.device,
        together=plan.meets,
    )
    return [*results, *beside], results[0] if hidden is None else hidden


def _gathering(argument: np.void, x: torch.Tensor, first: FusedLinear) -> torch.Tensor:
    """Return what a chain reads; a launch that gathers gives each CTA its own, or all one."""
    if first.gathers is None:
        return x
    filled(argument["gather"], own=x, words=x.shape[1] // 2)
    argument["peers"] = first.gathers.peers
    if not argument["gather"]["to"]:
        return x
    whole = x.new_empty(len(x), len(first.order))
    filled(argument["gather"], all=whole)
    return whole


def _adding_up(
    argument: np.void, entry: np.ndarray, rows: int, product: FusedLinear
) -> list[torch.Tensor]:
    """Fill what a launch needs to add up the results of ranks; return the tensors."""
    if product.boxes is None:
        return []
    matrix = product.matrices[0]
    part = torch.empty(rows, matrix.columns, device=matrix.words.device)
    filled(entry, exact=part)
    argument["peers"] = product.boxes.peers
    return [part]


# None: no launch runs all of them or it shall not; or `DECODED`
_PLANS: WeakKeyDictionary[FusedLinear, dict[object, LaunchPlan | str | None]] = WeakKeyDictionary()


def _plan(products: tuple[FusedLinear, ...], rows: int) -> LaunchPlan | str | None:
    """Return the launch plan for up to this many rows; computed once."""
    plans = _PLANS.setdefault(products[0], {})
    key = (rows, *products[1:])  # holds the others, so no later product reuses their address
    if key not in plans:
        is_shared = any(product.boxes or product.gathers for product in products)
        choice = None if is_shared else _choice(products, rows)  # ranks would measure apart
        plans[key] = _planned(products, rows, choice)
    return plans[key]


def _planned(
    products: Sequence[FusedLinear], rows: int, choice: Choice | None
) -> LaunchPlan | str | None:
    """Return the plan of a choice; None: a chain in one launch if it fits, else batched."""
    of_device = limits(_device(products).index)
    if choice == DECODED:
        return DECODED
    if choice in {APART, HALVED}:
        return None
    if rows <= MOST_ROWS and not isinstance(choice, str):
        plan = plan_of(products, rows, of_device, choice)
        if plan is not None or rows == 1 or len(products) == 1:
            return plan
    return batched.plan_of(products, max(rows, MOST_ROWS + 1), of_device)


def _forget(plan: LaunchPlan, products: tuple[FusedLinear, ...], rows: int, reason: str) -> None:
    """Drop a plan whose launch was refused, for good: launches by turns would change last bits."""
    _PLANS[products[0]][rows, *products[1:]] = None
    whole = "decoded matrices" if len(products) == 1 else "its products one by one"
    tell_refusal(plan.file, reason, "half the rows at a time" if _halves(products, rows) else whole)


def _choice(products: Sequence[FusedLinear], rows: int) -> Choice | None:
    """Return how products run, measured at the next power of two of `rows`; None: the default."""
    file = tuning_file()
    if file is None or MOST_ROWS < rows < MANY_ROWS:
        return None
    rows, device = 1 << (rows - 1).bit_length(), _device(products)
    key = key_of(
        products,
        rows,
        gpu=torch.cuda.get_device_name(device),
        kernel=[_kernel(), limits(device.index)],
    )
    return _tuning(file).choice(key, len(products), lambda: _measured(products, rows))


@cache
def _kernel() -> str:
    sources = [(source(file), options_of(file)) for file in KERNELS]
    return digest_of([sources, virtual_architecture()])


_tuning = cache(Tuning)


def _measured(products: Sequence[FusedLinear], rows: int) -> Choice | None:
    """Return the fastest way; None during capture, when memory is short or a launch refused."""
    device = _device(products)
    with torch.cuda.device(device), suppress(torch.OutOfMemoryError, LaunchRefused):
        if torch.cuda.is_current_stream_capturing():
            return None
        draws = torch.Generator(device).manual_seed(0)  # leaves the user's random draws unchanged
        x = torch.randn(rows, len(products[0].order), generator=draws, device=device).half()
        sums = [x.new_zeros(rows, p.matrices[0].columns) for p in products if p.adds]
        works = _ways(x, products, sums[0] if sums else None)
        if len(works) < 2:
            return next(iter(works), None)
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        other = torch.zeros(OF_CACHE * cache_bytes // 4, device=device)
        return fastest([*works], lambda choice: _milliseconds(works[choice], other))
    return None


def _ways(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None
) -> dict[Choice, Callable[[], object]]:
    """Return the ways to multiply that are worth measuring, the default first."""
    rows, of_device = len(x), limits(x.device.index)
    few, several = rows <= MOST_ROWS, len(products) > 1
    works: dict[Choice, Callable[[], object]] = {}
    if few:
        for plan in candidates(products, rows, of_device):
            works[plan.parts] = partial(_launched, plan, x, products, hidden)
    if not few or (several and rows > 1):
        wide = batched.plan_of(products, max(rows, MOST_ROWS + 1), of_device)
        if wide is not None:
            works[BATCHED] = partial(_launched, wide, x, products, hidden)
    if few and several:
        works[APART] = partial(_by_turns, [[one] for one in products], x, hidden)
    if rows > WHOLE_ROWS:
        works[HALVED] = partial(_halved, x, products, hidden)
    if not few and works:
        works[DECODED] = partial(cuda_prompts.multiply, x, products, hidden)
    return works


def _milliseconds(work: Callable[[], object], other: torch.Tensor) -> float:
    """Time work while the L2 cache holds other data, as between a model's layers; waits for it."""
    for _ in range(PASSES):
        other.sum()  # reads only, so no write-back remains during the work
    return elapsed(work)


def _device(products: Sequence[FusedLinear]) -> torch.device:
    return products[0].matrices[0].words.device
