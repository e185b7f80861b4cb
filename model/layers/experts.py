"""Experts: each token passes the ones that a router chooses, and the shared one if there is one.

A sublayer has some or all experts of its layer. If some, its states are pairs side by side, the
hidden state that entered the layer's experts and the sum of what those before it computed. Each
group evaluates the router anew, from the same state, and adds its experts in order, so the result
does not depend on how a layer is divided. Of processes that share a model, each evaluates the whole
router and has the sum of its own experts, which is added to those of the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from exl2flow.kernels import (
    Boxes,
    ExpertBank,
    ExpertMatrices,
    RouterArgs,
    Routes,
    get_ops,
    tensor_cores,
)
from exl2flow.model.config.spec import ModelSpec, router_tensors
from exl2flow.model.config.sublayer_spec import ExpertGroup, SublayerSpec
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.cache import LayerCache
from exl2flow.model.layers.fuse import Products
from exl2flow.model.layers.linear import Linear, PackedLinear, read_shaped
from exl2flow.model.layers.mlp import activated
from exl2flow.model.layers.norms import Norm
from exl2flow.model.layers.rope import RopeTable
from exl2flow.model.layers.sublayer import Sublayer

SHARED = "shared"


class Total(NamedTuple):
    """The way processes add up the sums of their experts; see `Ranks` for `sum`, `added`, `guard`.

    boxes: through which a launch does it; or None.
    """

    sum: Callable[[torch.Tensor], torch.Tensor]
    added: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    boxes: Boxes | None = None
    guard: Callable[[], None] | None = None


class RoutedReads(dict[str, torch.Tensor]):
    """Inputs of experts by capture: the tokens of each, (n, k), in order.

    entered, total: what entered the layer's experts, and their sum so far, (b · t, hidden) each;
    routes: of all tokens; tokens, weights: of each expert, int64 and fp32 (n,).
    """

    def __init__(self, entered: torch.Tensor, total: torch.Tensor, routes: Routes) -> None:
        super().__init__()
        self.entered, self.total, self.routes = entered, total, routes
        self.tokens: dict[int, torch.Tensor] = {}
        self.weights: dict[int, torch.Tensor] = {}


class ExpertsSublayer(Sublayer):
    """A `Sublayer` that ignores positions and cache.

    shared_gate: fp32 (1, hidden), or None. bank: all of it for `Ops.experts`, if packed.
    total: adds up what this process and others have; None: it has all experts.
    """

    def __init__(
        self,
        spec: SublayerSpec,
        *,
        norms: dict[str, Norm],
        linears: dict[str, Linear],
        router: RouterArgs,
        shared_gate: torch.Tensor | None,
        activation: str,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(spec, norms=norms, linears=linears, multiplier=multiplier)
        assert spec.group is not None
        self.group: ExpertGroup = spec.group
        self.router, self.shared_gate, self.activation = router, shared_gate, activation
        self.total: Total | None = None
        self.bank = self._bank()

    def reads(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> RoutedReads:
        """Return what each expert reads, (n, k) of its n tokens."""
        entered, total = self._halves(hidden)
        with torch.no_grad():
            x = self.normed("before", entered)
            routes = self._route(x)
        return self._reads(RoutedReads(entered, total, routes), x)

    @torch.no_grad()
    def routes(self, hidden: torch.Tensor) -> Routes:
        """Return the experts that tokens (b, t, hidden), or pairs, choose among their layer's."""
        return self._route(self.inputs(hidden))

    @torch.no_grad()
    def nearly_chosen(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the score of each expert over that of the least chosen one, fp32 (b · t, experts).

        At most 1; 0 where the expert is chosen.
        """
        with tensor_cores(False):
            return get_ops(hidden.device).nearly_chosen(self.inputs(hidden), self.router)

    def inputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what router and experts read, (b · t, hidden)."""
        return self.normed("before", self._halves(hidden)[0])

    def inner(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return what an expert's down reads where it reads x (n, hidden) itself."""
        return activated(self.apply_linears(f"{expert}.input", x), self.activation)

    def reads_like(self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor]) -> RoutedReads:
        """See `Sublayer`: the tokens of each expert are those of `reads`."""
        assert isinstance(reads, RoutedReads)
        entered, total = self._halves(hidden)
        x = self.normed("before", entered)
        return self._reads(RoutedReads(entered, total, reads.routes), x)

    def of_rows(
        self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor], places: Sequence[int]
    ) -> Mapping[str, torch.Tensor]:
        """See `Sublayer`: computed again, unless these are all rows."""
        if len(places) == len(hidden):
            return reads
        return self.reads(torch.stack([hidden[place] for place in places]))

    def contributions(
        self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """See `Sublayer`: the outputs of each expert, (n, hidden)."""
        experts = dict.fromkeys(capture.partition(".")[0] for capture in reads)
        return {e: self._expert(reads, e) for e in experts}

    def output(self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the next hidden states, (b, t, hidden), or pairs of them; see the module."""
        assert isinstance(reads, RoutedReads)
        if self.total is None:
            total = self._added(reads, reads.total)
        else:
            own = self._added(reads, torch.zeros_like(reads.total, dtype=torch.float32))
            total = reads.total + self.total.sum(own).to(reads.total.dtype)
        return self._states(reads.entered, total).view(hidden.shape)

    def _added(self, reads: RoutedReads, total: torch.Tensor) -> torch.Tensor:
        """Add up what the experts return, after `total` (b · t, hidden) and in its dtype."""
        for expert in self.group.experts:
            y = self._expert(reads, str(expert))
            if not self.router.rule.scales_input:
                y = y * reads.weights[expert][:, None].to(y.dtype)
            total = total.index_add(0, reads.tokens[expert], y.to(total.dtype))
        if self.group.has_shared:
            y = self._expert(reads, SHARED)
            total = total + (y if self.shared_gate is None else y * self._share(reads))
        return total

    def products(self) -> Products:
        """See `Sublayer.products`."""
        return (None,)

    def __call__(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """See `Sublayer`."""
        if self.bank is None or self.together or hidden.dtype != torch.float16:
            return super().__call__(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return run_experts(flat, self.bank, self.total).view(hidden.shape)

    @property
    def is_fused(self) -> bool:
        """Whether the device finds the experts of tokens by itself."""
        bank = None if self.together else self.bank
        return bank is not None and get_ops(self.router.weight.device).runs_experts(bank)

    def _bank(self) -> ExpertBank | None:
        """Return the layer's experts; None unless they are one group, packed, and add their sum."""
        if not self.group.is_whole or "after" in self.norms:
            return None
        found = [self._matrices(str(expert)) for expert in self.group.experts]
        shared = self._matrices(SHARED) if self.group.has_shared else None
        experts = tuple(expert for expert in found if expert is not None)
        if len(experts) < len(found) or (shared is None and self.group.has_shared):
            return None
        return ExpertBank(
            norm=self.norms.get("before"),
            router=self.router,
            experts=experts,
            places=self._places(),
            shared=shared,
            shared_gate=self.shared_gate,
            activation=self.activation,
            multiplier=self.multiplier,
        )

    def _places(self) -> torch.Tensor | None:
        """Return where experts are, see `ExpertBank`."""
        ids, count = self.group.experts, self.router.rule.experts
        if len(ids) == count:
            return None
        places = torch.full((count,), -1)
        places[list(ids)] = torch.arange(len(ids))
        return places.to(self.router.weight.device)

    def _matrices(self, expert: str) -> ExpertMatrices | None:
        """Return an expert's matrices if they are packed: gate, up and down."""
        names = [*self._readers[f"{expert}.input"], *self._readers[f"{expert}.inner"]]
        linears = [self.linears[name] for name in names]
        matrices = [linear.matrix for linear in linears if isinstance(linear, PackedLinear)]
        return ExpertMatrices(*matrices) if len(matrices) == len(ExpertMatrices._fields) else None

    def _halves(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what entered the layer's experts, and their sum so far, (b · t, hidden) each."""
        if not self.spec.is_paired:
            entered = hidden.reshape(-1, hidden.shape[-1])
            return entered, torch.zeros_like(entered)
        entered, total = hidden.reshape(-1, 2, hidden.shape[-1] // 2).unbind(1)
        return entered, total

    def _states(self, entered: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return the states after the group's experts."""
        if not self.group.is_last:
            return torch.cat([entered, total], dim=-1)
        result = self._ended(entered, total)
        return result if self.group.is_whole else torch.cat([result, torch.zeros_like(result)], -1)

    def _ended(self, entered: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that a layer returns whose experts add up to this sum."""
        update = self.normed("after", total)
        return entered + (update if self.multiplier == 1.0 else update * self.multiplier)

    def settled(self, states: torch.Tensor) -> torch.Tensor:
        """See `Sublayer`."""
        if not self.spec.is_paired:
            return states
        entered, total = self._halves(states)
        result = entered if self.group.is_last else self._ended(entered, total)
        return result.view(*states.shape[:-1], -1)

    def _reads(self, reads: RoutedReads, x: torch.Tensor) -> RoutedReads:
        """Compute what each expert reads; x: what entered, normalized, without gradients.

        Where gradients are wanted, each expert normalizes and weighs its tokens by itself, so that
        its gradients are added to those by `entered` in turn, however a layer is divided.
        """
        entered, routes = reads.entered, reads.routes
        with_gradients = entered.requires_grad
        for expert, tokens, weights in self._assigned(routes):
            own = x[tokens]
            if with_gradients:
                own = self.normed("before", entered[tokens])
                weights = self._weights(own, routes, expert, tokens)
            reads.tokens[expert], reads.weights[expert] = tokens, weights
            if self.router.rule.scales_input:
                own = own * weights[:, None].to(x.dtype)
            self._read(reads, str(expert), own)
        if self.group.has_shared:
            self._read(reads, SHARED, self.normed("before", entered) if with_gradients else x)
        return reads

    def _weights(
        self, x: torch.Tensor, routes: Routes, expert: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the weights of an expert's tokens x (n, hidden) with their gradients, (n,)."""
        ids = routes.ids[tokens]
        weights = self._route(x, ids).weights
        return weights.masked_fill(ids != expert, 0.0).sum(-1)

    def _route(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> Routes:
        """Choose experts, or weigh chosen ones, in full fp32: TF32 would change some choices."""
        with tensor_cores(False):
            return get_ops(x.device).route(x, self.router, ids)

    def _read(self, reads: RoutedReads, expert: str, x: torch.Tensor) -> None:
        reads[f"{expert}.input"] = x
        outputs = self.apply_linears(f"{expert}.input", x)
        reads[f"{expert}.inner"] = activated(outputs, self.activation)

    def _expert(self, reads: Mapping[str, torch.Tensor], expert: str) -> torch.Tensor:
        """Return an expert's outputs, (n, hidden), without weights."""
        capture = f"{expert}.inner"
        [y] = self.apply_linears(capture, reads[capture])
        return y

    def _assigned(self, routes: Routes) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield each expert of the group with its tokens in order, and their weights, (n,)."""
        ids = routes.ids.flatten()
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=self.router.rule.experts).tolist()
        chosen = torch.split(order, counts)
        weights = routes.weights.flatten()
        for expert in self.group.experts:
            places = chosen[expert]
            yield expert, places // routes.ids.shape[1], weights[places]

    def _share(self, reads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight of the shared expert for each token, (b · t, 1)."""
        assert self.shared_gate is not None
        x = reads[f"{SHARED}.input"]
        return torch.nn.functional.linear(x.float(), self.shared_gate).sigmoid().to(x.dtype)


def run_experts(hidden: torch.Tensor, bank: ExpertBank, total: Total | None = None) -> torch.Tensor:
    """Return hidden states fp16 (rows, hidden) after a layer's experts, of all processes.

    Routes are computed in full fp32. total: as in `ExpertsSublayer`.
    """
    ops = get_ops(hidden.device)
    if total is not None and total.boxes is not None:
        if total.guard is not None:
            total.guard()
        at_once = ops.experts_at_once(hidden, bank, total.boxes)
        if at_once is not None:
            return at_once
    with tensor_cores(False):
        result = ops.experts(hidden, bank)
    return result if total is None else total.added(result, hidden, bank.multiplier)


def load_router(
    spec: ModelSpec, group: ExpertGroup, tensors: TensorFiles, *, device: torch.device | str
) -> tuple[RouterArgs, torch.Tensor | None]:
    """Load a router, and the weight of the shared expert's gate if there is one, in fp32.

    Raises:
        MissingTensor: one of the tensors is absent.
        TensorShapeError: one has another shape than the config implies.
    """
    loaded = {
        name: read_shaped(tensors, name, shape).to(device, torch.float32)
        for name, shape in router_tensors(spec, group).items()
    }
    router, gate = group.router, group.shared_gate
    correction = None if router.correction is None else loaded[router.correction].flatten()
    args = RouterArgs(
        rule=router.rule,
        weight=loaded[f"{router.key}.weight"],
        bias=loaded.get(f"{router.key}.bias"),
        correction=correction,
    )
    return args, None if gate is None else loaded[f"{gate}.weight"]


def entering(states: torch.Tensor, spec: SublayerSpec, hidden_size: int) -> torch.Tensor:
    """Return states, or gradients by them, as a sublayer takes and returns them.

    Args:
        states: (…, hidden), or pairs (…, 2 · hidden) beside a sum of experts.
        spec: of the sublayer; states become pairs with a sum of zero, or lose their sum.
        hidden_size: of a state.
    """
    width = hidden_size * (2 if spec.is_paired else 1)
    if states.shape[-1] == width:
        return states
    if states.shape[-1] > width:
        return states[..., :width].contiguous()
    return torch.nn.functional.pad(states, (0, width - states.shape[-1]))
