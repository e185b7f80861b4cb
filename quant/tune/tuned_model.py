"""The quantized model with norms, scales, biases, embedding and codes as parameters.

Its forward pass computes what a reader of the written files would, in fp32.
"""

from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from exl2flow.core.options.config import TuneOptions
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.store.files import read_tensors
from exl2flow.model import Linear, ProjectionSpec, SublayerSpec
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.model.layers.decoder import Head, build_embedding, capped, divergence_terms, placed
from exl2flow.model.layers.experts import entering
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, sublayer_file
from exl2flow.quant.rounding.error_feedback import RoundedMatrix
from exl2flow.quant.training.trainable import (
    FixedLinear,
    Parameter,
    Rates,
    TrainedLinear,
    TrainedNorm,
    fits_half,
    leaf,
    sized,
    stored,
)
from exl2flow.quant.walk.source_model import DTYPE, SourceModel

LOGIT_BYTES = 1 << 26  # of one model's logits held at a time


class TunedSublayer:
    """A sublayer of trained linears and norms; experts stay as they are."""

    def __init__(
        self, source: SourceModel, spec: SublayerSpec, rates: Rates, quantized: Path
    ) -> None:
        """Read the quantized matrices of a sublayer from the folder of `quantize`."""
        built = source.sublayer(spec)
        self.spec = spec
        self.built = built
        tensors = read_tensors(quantized / sublayer_file(spec))
        weights = {} if spec.group else {name: each.weight for name, each in built.linears.items()}
        self.linears = {
            p.name: read_linear(p, tensors, rates, source.device, weights.get(p.name))
            for p in spec.projections
        }
        built.linears.update(self.linears)
        self.norms = {
            norm.role: TrainedNorm(norm, built.norms[norm.role], source.tensors, rates)
            for norm in spec.norms
            if spec.group is None
        }

    @property
    def parameters(self) -> list[Parameter]:
        """The trained parameters, in a fixed order."""
        if self.spec.group is not None:
            return []
        parameters = [norm.parameter for norm in self.norms.values()]
        return parameters + [p for linear in self.linears.values() for p in linear.parameters]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to the next hidden states, (b, t, hidden)."""
        look()
        self.built.norms.update({role: norm.current() for role, norm in self.norms.items()})
        return self.built(hidden)


class TunedModel:
    """The whole quantized model on one device, with the precision of its file."""

    def __init__(self, source: SourceModel, quantized: Path, options: TuneOptions) -> None:
        """Read the source's plain tensors and the matrices from the folder of `quantize`."""
        self.spec = source.spec
        rates = rates_of(options)
        embedding = build_embedding(source.spec, source.tensors, dtype=DTYPE, device=source.device)
        self.learned = embedding.learned
        rows = embedding.weight[: source.spec.vocab_size]
        rows = fits_half(rows, f"{self.spec.embedding_key}.weight")
        self.embedding = leaf(rows.float(), source.device)
        self.embedding_rate = options.embedding_rate
        self.embedding.requires_grad_(bool(options.embedding_rate))
        self.sublayers = [
            TunedSublayer(source, spec, rates, quantized) for spec in source.spec.sublayers
        ]
        head = source.head()
        self.final_norm = TrainedNorm(self.spec.final_norm, head.final_norm, source.tensors, rates)
        self.head = _read_head(source.spec.head, head.linear, rates, quantized / HEAD_FILE)

    @property
    def parameters(self) -> list[Parameter]:
        """The trained parameters, in a fixed order."""
        parameters = [p for sublayer in self.sublayers for p in sublayer.parameters]
        parameters.append(self.final_norm.parameter)
        if isinstance(self.head, TrainedLinear):
            parameters += self.head.parameters
        if self.embedding_rate:
            parameters.append(sized(self.embedding, self.embedding_rate))
        return parameters

    def bound(self) -> None:
        """Keep codes within what they can be."""
        for sublayer in self.sublayers:
            for linear in sublayer.linears.values():
                linear.bound()
        if isinstance(self.head, TrainedLinear):
            self.head.bound()

    def hidden(self, ids: torch.Tensor, *, checkpointed: bool = False) -> torch.Tensor:
        """Return the states before the final norm, (b, t, hidden), of token ids (b, t).

        Args:
            ids: token ids.
            checkpointed: whether to keep only the states between sublayers for the backward pass.
        """
        is_known = (ids >= 0) & (ids < len(self.embedding))
        # not by indexing, whose gradient is not deterministic on several threads
        hidden = stored(functional.embedding(torch.where(is_known, ids, 0), self.embedding))
        hidden = placed(hidden, self.spec.embedding_multiplier, self.learned)
        for sublayer in self.sublayers:
            hidden = entering(hidden, sublayer.spec, self.spec.hidden_size)
            if checkpointed:
                hidden = checkpoint(sublayer, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = sublayer(hidden)
        return hidden[..., : self.spec.hidden_size]

    def kept_bytes(self, tokens: int) -> int:
        """Forecast the bytes that a backward pass over `tokens` keeps unless checkpointed."""
        width = sum(p.in_features + 3 * p.out_features for p in self.spec.projections)
        weights = sum(p.numel for p in self.spec.projections)
        return 4 * (weights + tokens * width)

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Return embedding and norms as stored, fp16 on the CPU, by the source's names."""
        norms = [norm for sublayer in self.sublayers for norm in sublayer.norms.values()]
        values = {f"{self.spec.embedding_key}.weight": self.embedding}
        for norm in (*norms, self.final_norm):
            values |= norm.tensors()
        return {name: value.detach().half().cpu() for name, value in values.items()}

    def divergence(self, hidden: torch.Tensor, head: Head, reference: torch.Tensor) -> torch.Tensor:
        """Return the mean KL divergence in nats of one row from the source.

        Args:
            hidden: this model's states before the final norm, (t, hidden).
            head: the source's.
            reference: the source's states, (t, hidden).
        """
        normed = self.final_norm.current()(hidden)
        step = max(1, LOGIT_BYTES // (4 * self.spec.vocab_size))
        total = torch.zeros((), device=hidden.device)
        for begin in range(0, len(normed), step):
            span = slice(begin, begin + step)
            with torch.no_grad():
                expected = torch.log_softmax(head(reference[None, span])[0], dim=-1)
            total = total + checkpoint(
                self._divergence,
                normed[span],
                expected,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return total / len(normed)

    def _divergence(self, normed: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        logits = capped(self.head(normed).float(), self.spec.logit_softcap)
        log_probs = torch.log_softmax(logits, dim=-1)
        return divergence_terms(expected, log_probs).sum()


def _read_head(
    projection: ProjectionSpec, linear: Linear, rates: Rates, path: Path
) -> TrainedLinear | FixedLinear:
    """Return the head of a file; as it is if there is none, because it is not quantized."""
    if not path.exists():
        return FixedLinear(linear, torch.float16)
    weight = linear.weight
    return read_linear(projection, read_tensors(path), rates, weight.device, weight)


def rates_of(options: TuneOptions) -> Rates:
    """Return the rates of training a model."""
    code = options.code_rate / max(1, options.steps) ** 0.5
    return Rates(scale=options.scale_rate, norm=options.norm_rate, code=code)


def read_linear(
    projection: ProjectionSpec,
    tensors: dict[str, torch.Tensor],
    rates: Rates,
    device: torch.device,
    towards: torch.Tensor | None,
) -> TrainedLinear:
    """Build a trained projection from a file's tensors; `towards`: see `TrainedLinear`."""
    matrix = QuantizedMatrix.from_tensors(projection.key, tensors)
    return TrainedLinear(
        RoundedMatrix.of(matrix, device),
        rates,
        out_features=projection.out_features,
        bias=None if matrix.bias is None else matrix.bias.to(device),
        towards=towards,
    )
