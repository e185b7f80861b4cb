"""The range of targets that the candidates can reach, in bits and in bytes of the output."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

from exl2flow.core.errors import BudgetUnreachable
from exl2flow.core.options.config import ConversionConfig
from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.quant.allocate.budget import check_measured, decoder_numel, total_target
from exl2flow.quant.allocate.layout import carried_bytes, plain_tensors
from exl2flow.quant.measure.candidates import (
    HEAD_OPTIONS,
    HEAD_PARAMS,
    PROJECTION_OPTIONS,
    SUPPLEMENT_OPTIONS,
    candidates_for,
)
from exl2flow.quant.measure.measurement import (
    Candidate,
    candidate_bits,
    projection_bits,
    read_measurement,
)
from exl2flow.quant.supplement.stage import is_allowed, read_candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class BitRange:
    """Least and most bits of decoder and head; numel: the decoder's weights.

    plain: bytes of the tensors that are stored as fp16, and of those that are carried.
    """

    numel: int
    decoder: tuple[int, int]
    head: tuple[int, int]
    plain: int

    @classmethod
    def of(cls, config: ConversionConfig, spec: ModelSpec) -> Self:
        """Sum over all slots; a given measurement decides which candidates there are."""
        if config.measurement is not None:
            measured = read_candidates(config, spec, config.measurement).decoder
            bits = [[result.total_bits for result in results] for results in measured.values()]
        else:
            bits = [
                [candidate_bits(projections, c) for c in candidates if is_allowed(config, c)]
                for projections, candidates in _slots(config, spec)
            ]
        fixed = config.fixed_head_bits
        options = HEAD_OPTIONS if fixed is None else [HEAD_PARAMS[fixed]]
        head = [projection_bits(spec.head, params) for params in options]
        return cls(
            numel=decoder_numel(spec),
            decoder=(sum(map(min, bits)), sum(map(max, bits))),
            head=(min(head), max(head)),
            plain=2 * sum(map(prod, plain_tensors(spec).values())) + carried_bytes(spec),
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

    def packed_bytes(self, config: ConversionConfig, spec: ModelSpec) -> int:
        """Return about how many bytes all quantized matrices will take.

        Raises:
            BudgetUnreachable: the target is below what can be reached.
        """
        low, high = self.bpw
        if config.bpw is not None:
            if config.bpw < low:
                raise BudgetUnreachable(
                    f"{config.bpw:g} bits per weight are out of reach: this model's candidates "
                    f"span {low:.3f} to {high:.3f}; raise `--bpw`" + _way_out(config)
                )
            return int((self.numel * min(config.bpw, high) + self.head[0]) / 8)
        target, (least, most) = total_target(config, spec), self.output_bytes
        if target < least:
            raise BudgetUnreachable(
                f"a total of {target:,} bytes is out of reach: the smallest output has about "
                f"{least:,}; raise the target" + _way_out(config)
            )
        return min(target, most) - self.plain


def _way_out(config: ConversionConfig) -> str:
    """Return what else helps if the preference is why a target is out of reach."""
    if config.allocate.prefer == "quality":
        return ""
    given = ", or `--measurement`, so that 2 bits are measured in groups of 128 rows"
    return " or leave out `--prefer speed`" + given * (config.measurement is not None)


def _slots(
    config: ConversionConfig, spec: ModelSpec
) -> Iterator[tuple[Sequence[ProjectionSpec], Sequence[Candidate]]]:
    """Yield the projections of every slot and the candidates that would be measured."""
    if config.sensitivity.kind == "error":
        yield from (
            (part.projections, candidates_for(part)) for s in spec.sublayers for part in s.parts
        )
        return
    options = (
        *PROJECTION_OPTIONS,
        *(SUPPLEMENT_OPTIONS if config.allocate.prefer == "speed" else ()),
    )
    for projection in (p for s in spec.sublayers for p in s.projections):
        yield (projection,), [{projection.name: params} for params in options]


def check_measurement(config: ConversionConfig, spec: ModelSpec) -> None:
    """Check that the measurement, given or still to be made, has what the allocation reads.

    Raises:
        ConfigError: it lacks costs in nats or the head, or belongs to another model.
    """
    in_nats = with_head = config.sensitivity.kind == "fisher"
    if config.measurement is not None:
        given = read_measurement(config.measurement, spec)
        costs = [result.nats for results in given.decoder.values() for result in results]
        in_nats, with_head = in_nats and None not in costs, bool(given.head)
    check_measured(config, in_nats=in_nats, with_head=with_head)
