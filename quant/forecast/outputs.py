"""The outputs that conversions of a model would make, a bitrate each, beside a GPU's memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exl2flow.core.errors import BudgetUnreachable
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.groups import FitOptions
from exl2flow.core.store.source import WANTED
from exl2flow.model import resolve
from exl2flow.model.files.source_tensors import check_storable, check_tensors, has_all_layers
from exl2flow.model.memory.on_card import OnCard, context_of, needs_of
from exl2flow.model.memory.plan import MemoryPlan
from exl2flow.quant.allocate.bit_range import BitRange
from exl2flow.quant.forecast.fit import (
    HEADER_BYTES,
    Fit,
    find_fit,
    output_host_bytes,
    running_block,
)

BITRATES = (8.0, 6.0, 5.0, 4.5, 4.0, 3.5, 3.0, 2.5)
OUT = Path("fits")  # a conversion needs the name of an output; nothing is written


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOutput:
    """What a conversion with `bpw` makes. size: about how many bytes, as its plan says."""

    bpw: float
    size: int
    card: OnCard


def outputs(source: Path, wanted: FitOptions) -> Iterator[PlannedOutput]:
    """Yield what conversions of a model make, by descending bits.

    Args:
        source: a folder with its config and the headers of its weights.
        wanted: the GPU's memory, and the context and the cache for which it must suffice.

    Raises:
        SourceModelError: the model cannot be converted.
        ConfigError: the context exceeds the model's positions.
    """
    spec = resolve(source, wanted=WANTED)
    has_all_layers(spec)
    check_storable(spec)
    check_tensors(spec)
    context = context_of(spec, wanted.context)
    configs = [ConversionConfig(source=source, out=OUT, bpw=bpw) for bpw in BITRATES]
    reach, host = BitRange.of(configs[0], spec), output_host_bytes(spec)
    needs = needs_of(spec, cache_format=wanted.cache, block=running_block(configs[0], spec))
    for config, bpw in zip(configs, BITRATES, strict=True):
        try:
            size = reach.plain + reach.packed_bytes(config, spec)
        except BudgetUnreachable:  # of a model whose matrices are small
            continue
        plan = MemoryPlan(weights=HEADER_BYTES + size, host=host, needs=needs(context))
        memory, positions = int(wanted.memory), spec.max_positions
        card = OnCard.of(plan, needs, memory=memory, positions=positions)
        yield PlannedOutput(bpw=bpw, size=size, card=card)


def largest_output(source: Path, wanted: FitOptions) -> Fit:
    """Return the output that `--fit` makes.

    Raises:
        BudgetUnreachable: not even the smallest one fits.
    """
    fit = find_fit(ConversionConfig(source=source, out=OUT, fit=wanted))
    assert fit is not None  # the options name a GPU
    return fit
