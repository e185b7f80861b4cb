"""Try whole allocations end to end: the KL divergence of each on held-out rows.

One walk over the unquantized model tries all of them. Matrices are rounded without refinement, so
divergences are comparable with each other but higher than those of the final model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from exl2flow.core.options.config import RoundingOptions
from exl2flow.model import DenseLinear, Linear, Sublayer, SublayerSpec
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.allocate.layout import Choice
from exl2flow.quant.measure.projection import Projection
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.hessian import collect_hessians, head_hessian
from exl2flow.quant.sensitivity.fisher import shared_factor
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.walk.divergence import mean_divergence
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """divergences: nats per token of each allocation; without: those of the first allocation with
    a single block left unquantized, by its name (`SublayerSpec.block`)."""

    divergences: Mapping[str, float]
    without: Mapping[str, float]


class Trials:
    """Rounds matrices for several allocations and runs rows through each."""

    def __init__(
        self, model: SourceModel, factors: Path, options: RoundingOptions, rows: torch.Tensor
    ) -> None:
        """Prepare; `rows` int64 (rows, t) are those for the Hessians."""
        self.model = model
        self.factors = FactorFiles(factors, model.device)
        self.options = options
        self.rows = rows

    def judge(
        self,
        choices: Mapping[str, Choice],
        held_out: torch.Tensor,
        *,
        passed: Callable[[SublayerSpec], None] = lambda sublayer: None,
    ) -> Verdict:
        """Return the divergences of allocations on held-out rows.

        Args:
            choices: allocations by name; for the first, each sublayer's part is measured, too.
            held_out: the rows that judge, int64 (rows, t).
            passed: called after each sublayer; may raise to stop.
        """
        seen = self.model.initial_states(self.rows)
        reference = self.model.initial_states(held_out)
        states = {name: reference.clone() for name in choices}
        first = next(iter(choices))
        without: dict[str, torch.Tensor] = {}
        for sublayer in self.model.sublayers(self.model.spec.sublayers):
            spec = sublayer.spec
            seen, reference = (self.model.entering(x, spec) for x in (seen, reference))
            states, without = (
                {name: self.model.entering(x, spec) for name, x in streams.items()}
                for streams in (states, without)
            )
            coverage = Coverage.of(sublayer, seen, self.options.expert_tokens)
            hessians, _ = collect_hessians(sublayer, seen, move=True, coverage=coverage)
            advance(sublayer, reference)
            plain = without.pop(spec.block, None)  # begun with the first experts of a layer
            plain = states[first].clone() if plain is None else plain
            streams = list(without.values())
            without[spec.block] = plain
            advance(sublayer, plain)
            variants = self._variants(sublayer, hessians, choices)
            for name, choice in choices.items():
                for p in spec.projections:
                    sublayer.linears[p.name] = variants[p.name, choice[p.key]]
                for stream in [states[name], *(streams if name == first else [])]:
                    advance(sublayer, stream)
            passed(spec)
        seen, reference = (self.model.entering(x, None) for x in (seen, reference))
        return self._verdict(seen, reference, states, without, choices)

    def _variants(
        self,
        sublayer: Sublayer,
        hessians: Mapping[str, torch.Tensor],
        choices: Mapping[str, Choice],
    ) -> dict[tuple[str, QuantParams], Linear]:
        """Round each distinct matrix that some allocation needs."""
        factors = self.factors.read(sublayer.spec.index)
        variants: dict[tuple[str, QuantParams], Linear] = {}
        for capture, hessian in hessians.items():
            specs = sublayer.spec.reading(capture)
            item = shared_factor(specs[0], hessian, factors, self.options)
            for p in specs:
                linear = sublayer.linears[p.name]
                projection = Projection(p, linear, hessian, item, factors[p.name])
                wanted = dict.fromkeys(choice[p.key] for choice in choices.values())
                matrices = self._round(projection, linear, tuple(wanted))
                variants |= {(p.name, params): matrix for params, matrix in matrices.items()}
        return variants

    def _round(
        self, projection: Projection, linear: Linear, wanted: tuple[QuantParams, ...]
    ) -> dict[QuantParams, Linear]:
        rounded = projection.rounded(wanted, self.options.scale_search)
        return {
            params: DenseLinear(
                matrix.dequantize().to(linear.weight.dtype).T.contiguous(),
                linear.bias,
                out_features=len(linear.weight),
            )
            for params, matrix in zip(wanted, rounded, strict=True)
        }

    def _verdict(
        self,
        seen: torch.Tensor,
        reference: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        without: Mapping[str, torch.Tensor],
        choices: Mapping[str, Choice],
    ) -> Verdict:
        """Compare logits, each allocation with its own head."""
        head, projection = self.model.head(), self.model.spec.head
        wanted = tuple(dict.fromkeys(choice[projection.key] for choice in choices.values()))
        factors = self.factors.read("head")
        hessian = head_hessian(head, seen)
        item = shared_factor(projection, hessian, factors, self.options)
        source = Projection(projection, head.linear, hessian, item, factors[projection.name])
        heads = self._round(source, head.linear, wanted)

        def compare(final: torch.Tensor, choice: Choice) -> float:
            final = self.model.entering(final, None)
            rounded = head.with_linear(heads[choice[projection.key]])
            return mean_divergence(head, reference, rounded, final)

        first = next(iter(choices.values()))
        return Verdict(
            divergences={name: compare(states[name], choice) for name, choice in choices.items()},
            without={name: compare(stream, first) for name, stream in without.items()},
        )
