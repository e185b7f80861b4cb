"""Coverage: calibration for experts that a text seldom chooses.

An expert with fewer tokens than in-features has a singular Hessian. It also gets the tokens that
it scores highest of all that did not choose it, weighted by its score over that of the least
chosen expert. Its Hessian is then mixed with one that belongs to the layer: that of all tokens for
gate and up, for down that of a fixed sample of them sent through the expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from exl2flow.core.reports import ExpertTokens
from exl2flow.core.runtime.interrupt import look
from exl2flow.model import Sublayer
from exl2flow.model.layers.experts import ExpertsSublayer
from exl2flow.quant.walk.deal import Deal
from exl2flow.quant.walk.source_model import device_of, row_batches

LAYER = "layer.input"  # name of the Hessian of all tokens that enter a layer
SAMPLE = 2  # tokens of the sample, per in-feature of down


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Activations (n, k) as projections read them; weights: of the tokens, fp32 (n,), or None."""

    capture: str
    x: torch.Tensor
    weights: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Tokens of the experts of a group over all calibration rows.

    counts: by expert; least: tokens below which an expert is topped up; added: by such expert, the
    places of its additional tokens among all, int64 (n,) in order, and their weights, fp32 (n,),
    both in main memory; sampled: places of the sample.
    """

    sublayer: ExpertsSublayer
    counts: Mapping[int, int]
    least: int
    added: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    sampled: torch.Tensor

    @classmethod
    def of(
        cls,
        sublayer: Sublayer,
        states: torch.Tensor,
        expert_tokens: int,
        deal: Deal | None = None,
    ) -> Self | None:
        """Count tokens, and choose additional ones; None for sublayers without experts.

        Args:
            sublayer: of the source or with quantized matrices: routers are the same.
            states: fp32 (rows, t, hidden), or pairs, see `layers.experts`.
            expert_tokens: below which an expert is topped up; 0: its in-features.
            deal: whose rows these are; None: they are all there are.
        """
        if not isinstance(sublayer, ExpertsSublayer):
            return None
        first = sublayer.spec.projection("up")
        least = expert_tokens or first.in_features
        total = torch.zeros(sublayer.router.rule.experts, dtype=torch.int64)
        for rows in row_batches(sublayer, states, deal.pieces if deal else None):
            look()
            ids = sublayer.routes(states[rows].to(device_of(sublayer))).ids
            total += torch.bincount(ids.flatten(), minlength=len(total)).cpu()
        if deal:
            total = torch.stack(deal.ranks.told_by_all(total)).sum(dim=0)
        counts = {expert: int(total[expert]) for expert in sublayer.group.experts}
        starved = [expert for expert, count in counts.items() if count < least]
        tokens = (deal.rows if deal else states.shape[0]) * states.shape[1]
        wanted = min(tokens, SAMPLE * sublayer.spec.projection("down").in_features)
        return cls(
            sublayer=sublayer,
            counts=counts,
            least=least,
            added=_added(sublayer, states, {e: least - counts[e] for e in starved}, deal),
            sampled=torch.arange(0, tokens, max(1, tokens // max(1, wanted))),
        )

    def widths(self) -> dict[str, int]:
        """Return the in-features of what `reads` yields beyond what projections read."""
        width = self.sublayer.spec.widths
        samples = {f"{expert}.sample": width[f"{expert}.inner"] for expert in self.added}
        return {LAYER: width[f"{next(iter(self.added))}.input"], **samples} if samples else {}

    def reads(self, hidden: torch.Tensor, first: int) -> Iterator[Read]:
        """Yield what is read beyond the chosen experts' tokens, for experts that are topped up.

        Args:
            hidden: some rows of the states, on the device.
            first: place of their first token among all.
        """
        if not self.added:
            return
        x = self.sublayer.inputs(hidden)
        yield Read(capture=LAYER, x=x)
        sample = x[_within(self.sampled, first, len(x)).to(x.device)]
        for expert, (places, weights) in self.added.items():
            chosen = (places >= first) & (places < first + len(x))
            own = x[(places[chosen] - first).to(x.device)]
            by = weights[chosen].to(x.device)
            yield Read(capture=f"{expert}.input", x=own, weights=by)
            yield Read(capture=f"{expert}.inner", x=self.sublayer.inner(expert, own), weights=by)
            yield Read(capture=f"{expert}.sample", x=self.sublayer.inner(expert, sample))

    def mixed(self, hessians: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the Hessians of experts, those of topped up ones mixed with their layer's.

        Args:
            hessians: by capture, `LAYER` and the samples' included, means per token; consumed. A
                rank may lack some.
        """
        layer = hessians.pop(LAYER, None)
        for expert in self.added:
            for capture, other in (
                (f"{expert}.input", layer),
                (f"{expert}.inner", hessians.pop(f"{expert}.sample", None)),
            ):
                if capture in hessians:
                    assert other is not None
                    share = self.share(expert, len(other))
                    hessians[capture].mul_(share).add_(other, alpha=1 - share)
        return hessians

    def share(self, expert: int, in_features: int) -> float:
        """Return the share of an expert's own tokens in a Hessian of a number of in-features."""
        if expert not in self.added:
            return 1.0
        count = self.counts[expert]
        return count / (count + in_features)

    def share_of(self, capture: str, in_features: int) -> float:
        """Return `share` of the expert that reads an activation; 1 for the shared one."""
        expert = capture.partition(".")[0]
        return self.share(int(expert), in_features) if expert.isdecimal() else 1.0

    def report(self, changed_routes: float | None = None) -> ExpertTokens:
        """Return the tokens of each expert, which were topped up, and what was told of routes."""
        return ExpertTokens(
            tokens=dict(self.counts),
            topped_up=tuple(expert for expert in self.counts if expert in self.added),
            least_tokens=self.least,
            changed_routes=changed_routes,
        )


def mixed_into(capture: str) -> str:
    """Return the capture whose Hessian is mixed with this one's, which may be its own."""
    expert, _, what = capture.partition(".")
    return f"{expert}.inner" if what == "sample" else capture


def _within(places: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return the places from `first` on, of `count` tokens, counted from there."""
    return places[(places >= first) & (places < first + count)] - first


def _added(
    sublayer: ExpertsSublayer,
    states: torch.Tensor,
    wanted: Mapping[int, int],
    deal: Deal | None,
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return by expert the places and weights of the tokens that it scores highest, unchosen."""
    if not wanted:
        return {}
    experts, scores = list(wanted), list[torch.Tensor]()
    for rows in row_batches(sublayer, states, deal.pieces if deal else None):
        look()
        near = sublayer.nearly_chosen(states[rows].to(device_of(sublayer)))
        scores.append(near[:, experts].T.cpu())
    if deal:
        scores = [x for of_rank in deal.ranks.told_by_all(scores) for x in of_rank]
    by_expert = torch.cat(scores, dim=1)  # (experts, tokens)
    added = {}
    for expert, near in zip(experts, by_expert, strict=True):
        best = near.sort(descending=True, stable=True)
        places, order = best.indices[: wanted[expert]].sort()
        weights = best.values[: wanted[expert]][order]
        is_used = weights > 0
        added[expert] = places[is_used], weights[is_used]
    return added
