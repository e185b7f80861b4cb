"""Distillation of the quantized model from the source: steps, judgements, and their state.

Every step's rows, rate and arithmetic depend only on the seed and the step's number, so a state
saved between two steps is all that a resume needs.
"""

import math

import numpy as np
import torch
from torch.nn import functional

from exl2flow.core.errors import NonFiniteState
from exl2flow.core.options.config import TuneOptions
from exl2flow.core.runtime.interrupt import look
from exl2flow.model import Linear, Sublayer, TensorFiles, build_embedding
from exl2flow.model.files.gptq import is_gptq
from exl2flow.model.layers.experts import entering
from exl2flow.quant.tune.tuned_model import TunedModel
from exl2flow.quant.walk.source_model import SourceModel

WARM_UP = 0.05  # share of the steps in which the rates rise
LEAST_RATE = 0.02  # share of the rates at the last step
DECODED = torch.float16  # values of matrices in GPTQ form
KEPT_BYTES = 1 << 30  # of activations kept for the backward pass; more are recomputed
BETAS = (0.9, 0.99)
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
RATED_KL = 0.25  # nats for which the rates are meant; they scale with the root of the divergence
EPSILON = 1e-12  # gradients of single embedding entries are tiny


class NarrowLinear:
    """A fixed linear map kept in the dtype of its file and widened on each use."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        self._weight = linear.weight.to(dtype)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight fp32 (n, k)."""
        return self._weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        return functional.linear(x, self.weight, self.bias)


class Reference:
    """The whole source model, frozen; computes in fp32."""

    def __init__(self, source: SourceModel) -> None:
        spec, tensors = source.spec, source.tensors
        dtype = tensors.dtype(f"{spec.embedding_key}.weight")
        self.embedding = build_embedding(spec, tensors, dtype=dtype, device=source.device)
        self.hidden_size = spec.hidden_size
        self.sublayers: list[Sublayer] = []
        for sublayer in spec.sublayers:
            built = source.sublayer(sublayer)
            for p in sublayer.projections:
                stored_as = _stored_as(tensors, p.key, otherwise=DECODED)
                built.linears[p.name] = NarrowLinear(built.linears[p.name], stored_as)
            self.sublayers.append(built)
        head = source.head()
        in_gptq = is_gptq(spec.head.key, tensors)
        stored_as = _stored_as(tensors, spec.head.key, otherwise=DECODED if in_gptq else dtype)
        self.head = head.with_linear(NarrowLinear(head.linear, stored_as))

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the states before the final norm, (b, t, hidden), of token ids (b, t)."""
        hidden = self.embedding(ids, dtype=torch.float32)
        for sublayer in self.sublayers:
            look()
            hidden = sublayer(entering(hidden, sublayer.spec, self.hidden_size))
        return hidden[..., : self.hidden_size]


def _stored_as(tensors: TensorFiles, key: str, *, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype that a file stores a weight in; `otherwise`: if it has none of that name."""
    name = f"{key}.weight"
    return tensors.dtype(name) if name in tensors else otherwise


class Batches:
    """The rows of each step: all rows in turn, in a new order each round."""

    def __init__(self, rows: torch.Tensor, *, tokens: int, seed: int) -> None:
        """Take rows int64 (rows, t), as many at a time as have `tokens` tokens, at least one."""
        self.rows = rows
        self.count = max(1, tokens // rows.shape[1])
        self.seed = seed

    def __call__(self, step: int) -> torch.Tensor:
        """Return the rows of a step, int64 (count, t)."""
        places = range(step * self.count, (step + 1) * self.count)
        return self.rows[[self._row(place) for place in places]]

    def _row(self, place: int) -> int:
        lap, index = divmod(place, len(self.rows))
        return int(np.random.default_rng((self.seed, lap)).permutation(len(self.rows))[index])


class Distillation:
    """A training run: its step, Adam's moments, the judgements, and the best values so far."""

    def __init__(
        self,
        source: SourceModel,
        model: TunedModel,
        options: TuneOptions,
        *,
        training: torch.Tensor,
        held_out: torch.Tensor,
    ) -> None:
        """Begin at step 0; rows are int64 (rows, t)."""
        self.model = model
        self.options = options
        self.device = source.device
        self.reference = Reference(source)
        tokens = options.tokens or STEP_TOKENS[self.device.type]
        self.batches = Batches(training, tokens=tokens, seed=options.seed)
        self.held_out = held_out.to(self.device)
        self.held_out_states = [self.reference.hidden(row[None])[0] for row in self.held_out]
        self.parameters = model.parameters
        self.values = [p.value for p in self.parameters]
        self.optimizer = torch.optim.Adam(
            [{"params": [p.value], "lr": p.rate} for p in self.parameters],
            betas=BETAS,
            eps=EPSILON,
        )
        for value in self.values:  # allocated now, for `restore`
            self.optimizer.state[value] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(value, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(value, requires_grad=False),
            }
        self.step = 0
        self.judgements: list[float] = []
        self.best = [value.detach().clone() for value in self.values]
        row = training.shape[1]
        self.checkpointed = model.kept_bytes(row) > KEPT_BYTES
        self.together = max(1, KEPT_BYTES // model.kept_bytes(row))  # rows of a backward pass

    @property
    def finished(self) -> bool:
        """Tell whether all steps are done, or `patience` judgements brought no improvement."""
        return self.step >= self.options.steps or self._stale >= self.options.patience

    @property
    def _stale(self) -> int:
        """The judgements since the best one."""
        return len(self.judgements) - 1 - self.judgements.index(min(self.judgements))

    @property
    def summary(self) -> str:
        """The divergence on the held-out rows: first, latest, best."""
        first, now, best = self.judgements[0], self.judgements[-1], min(self.judgements)
        return f"KL on rows set aside {first:.4f} -> {now:.4f}, best {best:.4f}"

    def report(self) -> dict[str, object]:
        """Return the judgements as JSON: nats per token on the held-out rows."""
        interval = self.options.interval
        steps = [min(i * interval, self.step) for i in range(len(self.judgements))]
        best = self.judgements.index(min(self.judgements))
        return {
            "steps": self.step,
            "best_step": steps[best],
            "first_kl": self.judgements[0],
            "best_kl": self.judgements[best],
            "judgements": [list(pair) for pair in zip(steps, self.judgements, strict=True)],
        }

    def advance(self) -> None:
        """Do one step, after the first judgement."""
        share = rate_share(self.step, self.options.steps)
        distance = math.sqrt(self.judgements[0] / RATED_KL)
        for group, parameter in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["lr"] = parameter.rate * share * (1.0 if parameter.is_code else distance)
        self.optimizer.zero_grad(set_to_none=True)
        rows = self.batches(self.step).to(self.device)
        for ids in torch.split(rows, self.together):
            look()
            targets = self.reference.hidden(ids)
            states = self.model.hidden(ids, checkpointed=self.checkpointed)
            loss = torch.zeros((), device=self.device)
            for hidden, target in zip(states, targets, strict=True):
                loss = loss + self.model.divergence(hidden, self.reference.head, target)
            (loss / len(rows)).backward()  # type: ignore[no-untyped-call]  # torch's own
        self.optimizer.step()
        self.model.bound()
        self.step += 1

    def judge_when_due(self) -> bool:
        """Judge at every interval and after the last step; return whether it did."""
        is_due = self.step % self.options.interval == 0 or self.step >= self.options.steps
        if is_due:
            self.judge()
        return is_due

    @torch.no_grad()
    def judge(self) -> None:
        """Compute the divergence on the held-out rows, and keep the values if it is the lowest.

        Raises:
            NonFiniteState: the first divergence is NaN or infinite.
        """
        total = torch.zeros((), device=self.device)
        for row, target in zip(self.held_out, self.held_out_states, strict=True):
            hidden = self.model.hidden(row[None])[0]
            total += self.model.divergence(hidden, self.reference.head, target)
        divergence = float(total / len(self.held_out))
        if not self.judgements and not math.isfinite(divergence):
            raise NonFiniteState(
                "the divergence of the quantized model from its source is not finite on the "
                "rows set aside; check the source, or try other calibration data"
            )
        self.judgements.append(divergence)
        if self._stale == 0:
            for best, value in zip(self.best, self.values, strict=True):
                best.copy_(value)

    @torch.no_grad()
    def recall_best(self) -> None:
        """Put the best values back into the model."""
        for best, value in zip(self.best, self.values, strict=True):
            value.copy_(best)

    def state(self) -> torch.Tensor:
        """Return everything that a step changes except `step` itself, fp32 on the CPU."""
        flat = [tensor.detach().reshape(-1).cpu() for tensor in self._changing()]
        return torch.cat([*flat, torch.tensor(self.judgements)])  # judgements are fp32 already

    @torch.no_grad()
    def restore(self, step: int, state: torch.Tensor) -> None:
        """Continue from a `state` saved after a step."""
        begin = 0
        for tensor in self._changing():
            tensor.copy_(state[begin : begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()
        for value in self.values:
            self.optimizer.state[value]["step"].fill_(step)
        self.judgements = state[begin:].tolist()
        self.step = step

    def _changing(self) -> list[torch.Tensor]:
        """Return the tensors of a saved state, in order."""
        moments = [
            self.optimizer.state[v][m] for m in ("exp_avg", "exp_avg_sq") for v in self.values
        ]
        return [*self.values, *moments, *self.best]


def rate_share(step: int, steps: int) -> float:
    """Return the multiplier of the rates at a step: linear warm-up, then half a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    angle = math.pi * (step - warm) / max(1, steps - warm)
    return LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(angle)) / 2
