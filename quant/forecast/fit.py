"""The largest model that fits a GPU: from the memory to a target in bytes."""

from dataclasses import dataclass

import torch

from exl2flow.core.config import CACHES, ConversionConfig, FitOptions
from exl2flow.core.errors import BudgetUnreachable, ConfigError
from exl2flow.core.source import WANTED
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.footprint import Footprint
from exl2flow.quant.allocate.budget import decoder_numel
from exl2flow.quant.allocate.layout import plain_tensors
from exl2flow.quant.forecast.plan import megabytes
from exl2flow.quant.forecast.preflight import reachable_bits

HEADER_BYTES = 2**20  # names and shapes in all files together, with room


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a GPU's memory is divided. `weights`: what is left for the files, in bytes."""

    memory: int
    needs: Footprint
    weights: int
    bpw: float

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, value) for people, the sum at the end."""
        needs = self.needs
        return [
            ("weights at most", f"{megabytes(self.weights)}, about {self.bpw:.2f} bpw"),
            (f"cache {needs.cache_format}", f"{megabytes(needs.cache)}, {needs.context:,} tokens"),
            ("laid out", f"{megabytes(needs.layout)} more than in the files, at most"),
            ("work", f"{megabytes(needs.work)}, activations and one layer's cache as fp16"),
            ("device", f"{megabytes(needs.device)}, CUDA itself and what splinters"),
            ("sum", f"{megabytes(self.weights + needs.total)} of {megabytes(self.memory)}"),
        ]

    def to_json(self) -> dict[str, object]:
        """Return the sum's parts in bytes."""
        needs = {name: getattr(self.needs, name) for name in self.needs.__slots__}
        return {"memory": self.memory, **needs, "weights": self.weights, "bpw": self.bpw}


def find_fit(config: ConversionConfig) -> Fit | None:
    """Return how the memory that the options name is divided; None if they name none.

    Raises:
        ConfigError: the context exceeds the model's positions.
        BudgetUnreachable: not even the smallest model fits; says what would.
        SourceModelError: the source cannot be used.
    """
    options = config.fit
    if options is None:
        return None
    spec = resolve(config.source, wanted=WANTED)
    if options.context > spec.max_positions:
        raise ConfigError(
            f"`--context {options.context}` exceeds the model's {spec.max_positions} positions"
        )
    needs = Footprint.of(spec, context=options.context, cache_format=options.cache)
    (least, most), (least_head, most_head) = reachable_bits(config, spec)
    plain = sum(2 * torch.Size(shape).numel() for shape in plain_tensors(spec).values())
    smallest = plain + HEADER_BYTES + (least + least_head) // 8
    left = int(options.memory) - needs.total
    if left < smallest:
        raise BudgetUnreachable(_what_would(options, spec, needs, smallest))
    weights = min(left, plain + HEADER_BYTES + (most + most_head) // 8)
    bits = 8 * (weights - plain - HEADER_BYTES) - most_head
    bpw = max(least, min(most, bits)) / decoder_numel(spec)
    return Fit(memory=int(options.memory), needs=needs, weights=weights, bpw=bpw)


def fitted(config: ConversionConfig, fit: Fit | None) -> ConversionConfig:
    """Return the configuration with the memory that it must fit turned into a target in bytes."""
    if fit is None:
        return config
    return config.model_copy(update={"target_bytes": fit.weights, "fit": None})


def _what_would(options: FitOptions, spec: ModelSpec, needs: Footprint, smallest: int) -> str:
    """Say what does not fit, and what would."""
    others = []
    for name in CACHES:
        if longest := _longest(spec, int(options.memory) - smallest, name):
            others.append(f"`--cache {name} --context {longest}`")
    ways = [f"`--fit {smallest + needs.total}`", *others]
    return (
        f"nothing fits {megabytes(options.memory)}: the smallest model takes {megabytes(smallest)},"
        f" the {options.cache} cache of {options.context:,} tokens {megabytes(needs.cache)}, all "
        f"else {megabytes(needs.total - needs.cache)}; what would: {' or '.join(ways)}"
    )


def _longest(spec: ModelSpec, room: int, cache: str) -> int:
    """Return the longest context that fits the room with a cache, in whole pages."""
    low, high = 0, spec.max_positions // PAGE_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        needs = Footprint.of(spec, context=middle * PAGE_TOKENS, cache_format=cache)
        low, high = (middle, high) if needs.total <= room else (low, middle - 1)
    return low * PAGE_TOKENS
