"""Distillation of the quantized model from the source: steps, judgements, and their state.

Every step's rows, rate and arithmetic depend only on the seed and the step's number, so a state
saved between two steps is all that a resume needs.
"""

import math
from collections.abc import Mapping

import torch

from exl2flow.core.errors import NonFiniteState
from exl2flow.core.options.config import TuneOptions
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.runtime.ranks import ALONE, WorkRanks
from exl2flow.model import Sublayer, TensorFiles, build_embedding
from exl2flow.model.files.gptq import is_gptq
from exl2flow.model.layers.experts import entering
from exl2flow.quant.training.descent import Descent
from exl2flow.quant.training.gradients import Gradients
from exl2flow.quant.training.judges import Judges, from_flat
from exl2flow.quant.training.kept import kept_room
from exl2flow.quant.training.row_order import RowOrder
from exl2flow.quant.training.trainable import FixedLinear
from exl2flow.quant.tune.tuned_model import TunedModel
from exl2flow.quant.walk.source_model import SourceModel

DECODED = torch.float16  # values of matrices in GPTQ form
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
RATED_KL = 0.25  # nats for which the rates are meant; they scale with the root of the divergence
ATTEMPTS = 2  # courses of steps, until one lowers the divergence
SLOWER = 1 / 3  # of the codes' rate in the next one


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
                built.linears[p.name] = FixedLinear(built.linears[p.name], stored_as)
            self.sublayers.append(built)
        head = source.head()
        in_gptq = is_gptq(spec.head.key, tensors)
        stored_as = _stored_as(tensors, spec.head.key, otherwise=DECODED if in_gptq else dtype)
        self.head = head.with_linear(FixedLinear(head.linear, stored_as))

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


class Distillation:
    """A training run: its steps, the judgements, and the best values so far."""

    def __init__(
        self,
        source: SourceModel,
        model: TunedModel,
        options: TuneOptions,
        *,
        training: torch.Tensor,
        judging: Mapping[str, torch.Tensor],
        ranks: WorkRanks = ALONE,
    ) -> None:
        """Begin at step 0.

        Args:
            source: the source.
            model: to be trained.
            options: of training.
            training: rows to train on, int64 (rows, t).
            judging: text → rows that only judge, int64 (rows, t).
            ranks: that share the rows of steps and of judgements.
        """
        self.model, self.ranks = model, ranks
        self.options = options
        self.device = source.device
        self.reference = Reference(source)
        tokens = options.tokens or STEP_TOKENS[self.device.type]
        self.training = training
        together = max(1, tokens // training.shape[1])
        self.order = RowOrder([range(len(training))], together, seed=options.seed)
        self.judges = Judges(judging)
        own = [row for piece in ranks.own(len(self.judges.rows)) for row in piece]
        self.judging = self.judges.rows[own].to(self.device)
        self.judging_states = [self.reference.hidden(row[None])[0] for row in self.judging]
        self.attempt, self.descent = 0, Descent(model.parameters, options.steps)
        self.gradients = Gradients(self.descent.values, ranks)
        room, row = kept_room(self.device), training.shape[1]
        self.checkpointed = model.kept_bytes(row) > room
        self.together = max(1, room // model.kept_bytes(row))  # rows of a backward pass

    @property
    def step(self) -> int:
        """The steps that are done, of all attempts."""
        return self.attempt * self.options.steps + self.descent.done

    @property
    def total(self) -> int:
        """The steps up to the end of this attempt."""
        return (self.attempt + 1) * self.options.steps

    @property
    def finished(self) -> bool:
        """Tell whether all steps are done, or `patience` judgements brought no improvement.

        If all steps brought none, and codes are trained, another attempt follows.
        """
        is_last = self.judges.best > 0 or self.attempt == ATTEMPTS - 1
        is_over = self.step >= self.total and (is_last or not self.options.code_rate)
        return is_over or self._stale >= self.options.patience

    @property
    def _stale(self) -> int:
        """The judgements since the best one."""
        return len(self.judges.judgements) - 1 - self.judges.best

    @property
    def summary(self) -> str:
        """The divergence on the rows that judge: first, latest, best."""
        first, now, best = (self.judges.mean(i) for i in (0, -1, self.judges.best))
        return f"KL on rows set aside {first:.4f} -> {now:.4f}, best {best:.4f}"

    def report(self) -> dict[str, object]:
        """Return the judgements as JSON: nats per token on the rows that judge."""
        steps, interval = self.options.steps, self.options.interval
        of_attempt = [min(step, steps) for step in range(interval, steps + interval, interval)]
        places = [attempt * steps + step for attempt in range(ATTEMPTS) for step in of_attempt]
        return self.judges.report([0, *places][: len(self.judges.judgements)])

    def advance(self) -> None:
        """Do one step, after the first judgement; begin again if all steps were in vain."""
        if self.step >= self.total:
            self.attempt += 1
            self.descent.begin_again()
        self.descent.forget_gradients()
        rows = self.training[self.order(self.step)].to(self.device)
        for piece in self.ranks.own(len(rows)):
            for ids in torch.split(rows[piece.start : piece.stop], self.together):
                look()
                self.gradients.add(self._divergences(ids).sum() / len(rows))
            self.gradients.take()
        counts = [len(self.ranks.own(len(rows), rank)) for rank in range(self.ranks.count)]
        self.gradients.share(counts)
        distance = math.sqrt(self.judges.mean(0) / RATED_KL)
        self.descent.step(distance=distance, codes=SLOWER**self.attempt)
        self.model.bound()

    def _divergences(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each of some rows (rows, t), (rows,)."""
        targets = self.reference.hidden(ids)
        states = self.model.hidden(ids, checkpointed=self.checkpointed)
        head = self.reference.head
        pairs = zip(states, targets, strict=True)
        return torch.stack([self.model.divergence(own, head, target) for own, target in pairs])

    def judge_when_due(self) -> bool:
        """Judge at every interval and after the last step; return whether it did."""
        is_due = self.descent.done % self.options.interval == 0 or self.step >= self.total
        if is_due:
            self.judge()
        return is_due

    @torch.no_grad()
    def judge(self) -> None:
        """Compute the divergence on the rows that judge, and keep the values if they are the best.

        Raises:
            NonFiniteState: the first divergence is NaN or infinite.
        """
        found = list[float]()
        for row, target in zip(self.judging, self.judging_states, strict=True):
            hidden = self.model.hidden(row[None])[0]
            found.append(float(self.model.divergence(hidden, self.reference.head, target)))
        of_all = self.ranks.told_by_all(found)
        self.judges.judgements.append([value for of_rank in of_all for value in of_rank])
        if not math.isfinite(self.judges.mean(0)):
            raise NonFiniteState(
                "the divergence of the quantized model from its source is not finite on the "
                "rows set aside; check the source, or try other calibration data"
            )
        if self._stale == 0:
            self.descent.keep()

    def state(self) -> torch.Tensor:
        """Return everything that a step changes except `step` itself, fp32 on the CPU."""
        flat = [tensor.detach().reshape(-1).cpu() for tensor in self.descent.changing]
        judged = [kl for judgement in self.judges.judgements for kl in judgement]
        return torch.cat([*flat, torch.tensor(judged)])  # they are fp32 already

    @torch.no_grad()
    def restore(self, step: int, state: torch.Tensor) -> None:
        """Continue from a `state` saved after a step."""
        begin = 0
        for tensor in self.descent.changing:
            tensor.copy_(state[begin : begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()
        self.attempt = max(0, step - 1) // self.options.steps
        self.descent.resume(step - self.attempt * self.options.steps)
        self.judges = from_flat(self.judges.texts, state[begin:].tolist())
