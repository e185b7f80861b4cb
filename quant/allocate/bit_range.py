"""The range of targets that the candidates can reach, in bits and in bytes of the output."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Self

from exl2flow.core.options.config import (
    MOST_BPW,
    ConversionConfig,
    RunOptions,
)
from exl2flow.model import ModelSpec
from exl2flow.quant.allocate.block import block_bytes, stored_spec
from exl2flow.quant.allocate.budget import (
    bitrate_unreachable,
    check_measured,
    decoder_numel,
    projection_params,
    read_candidates,
    size_unreachable,
    smallest,
    total_target,
)
from exl2flow.quant.allocate.layout import Choice, carried_bytes, output_bytes, plain_tensors
from exl2flow.quant.measure.candidates import (
    HEAD_OPTIONS,
    HEAD_PARAMS,
    PROJECTION_OPTIONS,
    candidates_for,
    is_allowed,
)
from exl2flow.quant.measure.compact import bits_by_shape
from exl2flow.quant.measure.measurement import (
    candidate_bits,
    projection_bits,
    read_measurement,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitRange:
    """Least and most bits of decoder and head; numel: the decoder's weights.

    plain: bytes of the tensors that are stored as fp16, and of the carried ones.
    """

    numel: int
    decoder: tuple[int, int]
    head: tuple[int, int]
    plain: int

    @classmethod
    def of(cls, config: RunOptions, spec: ModelSpec) -> Self:
        """Sum over all slots; a given measurement decides which candidates there are.

        A refinement keeps whichever candidates its model has.
        """
        prefer, fixed = config.allocation.prefer, config.fixed_head_bits
        if config.measurement_file is not None:
            measured = read_candidates(config, spec, config.measurement_file).decoder
            bits = [results.bits.tolist() for results in measured.values()]
        elif config.sensitivity.kind == "error":
            bits = [
                [
                    candidate_bits(part.projections, candidate)
                    for candidate in candidates_for(part)
                    if is_allowed(prefer, candidate.values())
                ]
                for sublayer in spec.sublayers
                for part in sublayer.parts
            ]
        else:
            allowed = [params for params in PROJECTION_OPTIONS if is_allowed(prefer, [params])]
            bits = list(bits_by_shape(spec.projections, allowed))
        options = HEAD_OPTIONS if fixed is None else [HEAD_PARAMS[fixed]]
        head = [projection_bits(spec.head, params) for params in options]
        apart = carried_bytes(stored_spec(config, spec)) + block_bytes(config, spec)
        return cls(
            numel=decoder_numel(spec),
            decoder=(sum(map(min, bits)), sum(map(max, bits))),
            head=(min(head), max(head)),
            plain=2 * sum(map(prod, plain_tensors(spec).values())) + apart,
        )

    @property
    def bpw(self) -> tuple[float, float]:
        """Least and most bits per weight of the decoder."""
        return self.decoder[0] / self.numel, self.decoder[1] / self.numel

    @property
    def output_bytes(self) -> tuple[int, int]:
        """Bytes of the smallest and of the largest output, without headers."""
        low, high = ((d + h) // 8 for d, h in zip(self.decoder, self.head, strict=True))
        return self.plain + low, self.plain + high

    def packed_bytes(self, config: RunOptions, spec: ModelSpec) -> int:
        """Return about how many bytes all quantized matrices will take.

        Raises:
            BudgetUnreachable: the target is below what can be reached.
        """
        low, high = self.bpw
        if not isinstance(config, ConversionConfig):
            return int((self.numel * min(MOST_BPW, high) + self.head[0]) / 8)
        if config.bpw is not None:
            if config.bpw < low:
                raise bitrate_unreachable(config.bpw, low, high, config.allocate)
            return int((self.numel * min(config.bpw, high) + self.head[0]) / 8)
        target = total_target(config, spec)
        choice, stored = smallest_choice(config, spec), stored_spec(config, spec)
        least = output_bytes(stored, choice, config.shard_size_mb) + block_bytes(config, spec)
        if target < least:
            raise size_unreachable(target, least, config.allocate)
        return min(target, self.output_bytes[1]) - self.plain


def smallest_choice(config: ConversionConfig, spec: ModelSpec) -> Choice:
    """Return the parameters with the fewest bits that the allocation of a total can choose."""
    prefer, fixed = config.allocate.prefer, config.fixed_head_bits
    head = min(HEAD_OPTIONS, key=partial(projection_bits, spec.head))
    choice = {spec.head.key: head if fixed is None else HEAD_PARAMS[fixed]}
    if config.measurement is not None:
        measured = read_candidates(config, spec, config.measurement)
        slots = dict(measured.decoder)
        if fixed is None and measured.head:
            slots[spec.head.key] = measured.head
        return choice | projection_params(spec, smallest(slots))
    if config.sensitivity.kind == "fisher":
        allowed = [params for params in PROJECTION_OPTIONS if is_allowed(prefer, [params])]
        return choice | {
            p.key: min(allowed, key=partial(projection_bits, p)) for p in spec.projections
        }
    for part in (part for sublayer in spec.sublayers for part in sublayer.parts):
        candidates = [c for c in candidates_for(part) if is_allowed(prefer, c.values())]
        least = min(candidates, key=partial(candidate_bits, part.projections))
        choice |= {p.key: least[p.name] for p in part.projections}
    return choice


def check_measurement(config: RunOptions, spec: ModelSpec) -> None:
    """Check that a conversion's measurement, given or to be made, has what its allocation reads.

    Raises:
        ConfigError: it lacks costs in nats or the head, or belongs to another model.
    """
    given = config.measurement_file
    check_measured(config, None if given is None else read_measurement(given, spec))
