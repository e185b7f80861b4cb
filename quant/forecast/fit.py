"""The largest model that fits a GPU: turn its memory into a target in bytes."""

from dataclasses import asdict, dataclass

import torch

from exl2flow.core.errors import BudgetUnreachable
from exl2flow.core.options.config import RunOptions
from exl2flow.core.store.source import WANTED
from exl2flow.core.words import size, size_to_ask_for
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.config.mtp import MtpSpec
from exl2flow.model.layers.mtp import block_in
from exl2flow.model.memory.footprint import Footprint
from exl2flow.model.memory.host_embedding import host_bytes
from exl2flow.model.memory.on_card import context_of
from exl2flow.quant.allocate.bit_range import BitRange

HEADER_BYTES = 2**20  # generous, for names and shapes in all files together


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Division of a GPU's memory; weights: bytes of the model's files, of which `host` stay out."""

    memory: int
    needs: Footprint
    weights: int
    host: int
    bpw: float

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, value) for people, the total last."""
        needs, host = self.needs, list[tuple[str, str]]()
        if self.host:
            host = [("embedding", f"{size(self.host)} of the weights, in host memory")]
        return [
            ("weights at most", f"{size(self.weights)}, about {self.bpw:.2f} bpw"),
            *host,
            (f"cache {needs.cache_format}", f"{size(needs.cache)}, {needs.context:,} tokens"),
            ("laid out", f"{size(needs.layout)} more than in the files, at most"),
            ("work", f"{size(needs.work)}, activations and one layer's cache as fp16"),
            ("device", f"{size(needs.device)}, CUDA itself and fragmentation"),
            ("to run", f"`--cache {needs.cache_format} --max-tokens {needs.context}`"),
            ("sum", f"{size(self.weights - self.host + needs.total)} of {size(self.memory)}"),
        ]

    @property
    def target(self) -> dict[str, int | None]:
        """The options that make the largest model that fits."""
        return {"target_bytes": self.weights, "fit": None}

    def to_json(self) -> dict[str, object]:
        """Return the parts in bytes."""
        parts = asdict(self)
        return {"memory": self.memory, **parts.pop("needs"), **parts}


def find_fit(config: RunOptions) -> Fit | None:
    """Divide the memory given in the options; return None if none is given.

    Raises:
        ConfigError: the context exceeds the model's positions.
        BudgetUnreachable: not even the smallest model fits; the message says what needs how much.
        SourceModelError: the source cannot be used.
    """
    options = config.gpu_to_fit
    if options is None:
        return None
    spec = resolve(config.source, wanted=WANTED)
    context = context_of(spec, options.context)
    needs = Footprint.of(
        spec, context=context, cache_format=options.cache, block=running_block(config, spec)
    )
    reach = BitRange.of(config, spec)
    smallest, largest = (HEADER_BYTES + size for size in reach.output_bytes)
    host = output_host_bytes(spec)
    left = int(options.memory) + host - needs.total
    if left < smallest:
        raise BudgetUnreachable(
            f"nothing fits {size(options.memory)}: the smallest model takes "
            f"{size(smallest)}, the {options.cache} cache of {context:,} tokens "
            f"{size(needs.cache)}, all else {size(needs.total - needs.cache)}; use "
            f"`--fit {size_to_ask_for(smallest - host + needs.total)}`, a "
            "shorter `--context` or a smaller `--cache`"
        )
    weights = min(left, largest)
    bits = 8 * (weights - reach.plain - HEADER_BYTES) - reach.head[1]
    bpw = max(reach.decoder[0], min(reach.decoder[1], bits)) / reach.numel
    return Fit(memory=int(options.memory), needs=needs, weights=weights, host=host, bpw=bpw)


def running_block(config: RunOptions, spec: ModelSpec) -> MtpSpec | None:
    """Return the block of an output that drafts tokens, None if there is none."""
    is_kept = config.block is not None and config.block.block != "drop"
    return block_in(spec) if is_kept else None


def output_host_bytes(spec: ModelSpec) -> int:
    """Return the bytes of an output's embedding that a GPU leaves in host memory."""
    return host_bytes(spec, [f"{spec.head.key}."], wanted="auto", device=torch.device("cuda"))
