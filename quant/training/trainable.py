"""Quantized linear maps and norms whose codes and continuous parts are parameters.

Their forward pass uses what the written file decodes to: every parameter is rounded as stored, and
gradients pass the rounding unchanged. A group's maximum scale is `exp(p)` times its initial value,
so rates are relative. Scaling a group scales its in-features, hence the gradient of `p` needs no
gradient of the matrix. A code begins half way from its centre to the source's weight, but inside
its cell, so that the file that is trained first decodes to what it was.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from exl2flow.core.errors import NonFiniteState
from exl2flow.kernels import get_ops
from exl2flow.model import Linear
from exl2flow.model.config.sublayer_spec import NormSpec
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.norms import Norm, in_memory, read_norm
from exl2flow.quant.rounding.error_feedback import RoundedMatrix, padded


class _Rounded(torch.autograd.Function):
    """Round to the nearest fp16 number, as fp32; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Round."""
        return x.half().float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Pass the gradient."""
        return grad


def stored(x: torch.Tensor) -> torch.Tensor:
    """Return `x` rounded to fp16, as fp32; differentiable."""
    rounded: torch.Tensor = _Rounded.apply(x)  # type: ignore[no-untyped-call]  # torch's own
    return rounded


class _Product(torch.autograd.Function):
    """y = x Q; gradients for x, for the logarithms of the groups' factors, and for the codes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        factors: torch.Tensor,
        codes: torch.Tensor | None,
        matrix: torch.Tensor,
        steps: torch.Tensor,
        members: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply x (b, t, k) by the decoded matrix (k, n)."""
        ctx.save_for_backward(x, matrix, members, *([] if codes is None else [steps]))
        return x @ matrix

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; that of a factor sums x · dL/dx over its group's features."""
        x, matrix, members, *steps = ctx.saved_tensors
        towards = grad @ matrix.T
        features = (x * towards).flatten(0, -2).sum(0)  # (k,)
        factors = functional.pad(features, (0, 1))[members].sum(1)
        codes = None
        if ctx.needs_input_grad[2]:
            codes = (x.flatten(0, -2).T @ grad.flatten(0, -2)).mul_(*steps)
        return towards, factors, codes, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A tensor to train, fp32; `rate` is its learning rate in its own units.

    `is_code`: it is rounded to integers, so its rate does not scale with the size of the error.
    """

    value: torch.Tensor
    rate: float
    is_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Adam's rates: of groups' scales, relative; of norms and biases, in units of their root mean
    square; of codes, in code units, 0: they stay.
    """

    scale: float
    norm: float
    code: float


HALF_WAY = 0.5  # of the way from a code's centre to the source's weight
CELL = 0.49  # from a centre to where rounding gives another code


class TrainedLinear:
    """A rounded linear map whose maximum scales, bias and codes can be trained.

    Tensors with one entry per in-feature are in the order of the in-features, not of the file.
    """

    def __init__(
        self,
        rounded: RoundedMatrix,
        rates: Rates,
        *,
        out_features: int,
        bias: torch.Tensor | None = None,
        towards: torch.Tensor | None = None,
    ) -> None:
        """Take a matrix; only its first `out_features` columns are used.

        Args:
            rounded: the matrix, where it is to be trained.
            rates: of training.
            out_features: columns.
            bias: (n,), of which the first `out_features` are used, or None.
            towards: the source's weight (n, k), for codes that are trained; None: they stay.
        """
        self.start, self.out_features, self.rates = rounded, out_features, rates
        self.device = device = rounded.codes.device
        groups, place = rounded.groups, torch.argsort(rounded.perm)
        sizes = torch.tensor([group.rows for group in groups])
        half = torch.tensor([2 ** (group.bits - 1) for group in groups])
        rows = torch.repeat_interleave(torch.arange(len(groups)), sizes)[place.cpu()]  # (k,) groups
        codes = rounded.codes[place, :out_features]
        self.group = rows.to(device)
        self.half = half[rows].to(device, torch.float32)[:, None]  # (k, 1)
        self.codes = (codes.to(torch.int16) - self.half.to(torch.int16)).to(torch.int8)  # signed
        self.scale_codes = rounded.scale_codes[:, :out_features].contiguous()
        self.members = _members(place.cpu(), sizes).to(device)
        self.maxima = rounded.max_scales.float()
        self.factors = leaf(torch.zeros(len(groups)), device)
        self.codes_moved: torch.Tensor | None = None
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        if towards is not None and rates.code:
            steps = self.decode()[1]
            aim = (towards.T.float() / torch.where(steps > 0, steps, torch.inf)).sub_(self.codes)
            self.codes_moved = leaf(aim.clamp_(-CELL, CELL).mul_(HALF_WAY), device)
        self.start_bias = None if bias is None else leaf(bias[:out_features].float(), device)

    @property
    def parameters(self) -> list[Parameter]:
        """The trained parameters."""
        parameters = [Parameter(value=self.factors, rate=self.rates.scale)]
        if self.start_bias is not None:
            parameters.append(sized(self.start_bias, self.rates.norm))
        if self.codes_moved is not None:
            moved = Parameter(value=self.codes_moved, rate=self.rates.code, is_code=True)
            parameters.append(moved)
        return parameters

    @property
    def max_scales(self) -> torch.Tensor:
        """The groups' maxima as they are stored, fp16 (g,)."""
        return (self.maxima * self.factors.detach().exp()).half()

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias as it is stored, (n,)."""
        return None if self.start_bias is None else stored(self.start_bias)

    @property
    def weight(self) -> torch.Tensor:
        """The decoded weight (n, k), without gradients."""
        return self.decode()[0].T

    @torch.no_grad()
    def signed_codes(self) -> torch.Tensor:
        """Return the codes minus their zero point, (k, n)."""
        if self.codes_moved is None:
            return self.codes
        moved = (self.codes + self.codes_moved).round_()
        return torch.minimum(torch.maximum(moved, -self.half), self.half - 1)

    def hold(self) -> None:
        """Keep what the current values decode to until `bound`."""
        self._held = self.decode()

    @torch.no_grad()
    def bound(self) -> None:
        """Keep codes within what they can be, so that they can turn back at once."""
        self._held = None
        if self.codes_moved is not None:
            least, most = -self.half - CELL - self.codes, self.half - 1 + CELL - self.codes
            torch.clamp(self.codes_moved, least, most, out=self.codes_moved)

    @torch.no_grad()
    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrix and its scales as the format decodes them, fp32 (k, n) each."""
        ops = get_ops(self.device)
        scales = ops.decode_scales(self.scale_codes, self.max_scales).float()
        steps = scales[self.group]  # (k, n)
        return (self.signed_codes() * steps).half().float(), steps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        matrix, steps = self._held or self.decode()
        y: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]  # torch's own
            x, self.factors, self.codes_moved, matrix, steps, self.members
        )
        bias = self.bias
        return y if bias is None else y + bias

    @torch.no_grad()
    def rounded(self) -> RoundedMatrix:
        """Return the current matrix as codes."""
        codes = self.start.codes
        if self.codes_moved is not None:
            codes = codes.clone()
            now = (self.signed_codes() + self.half).to(torch.uint8)
            codes[:, : self.out_features] = now[self.start.perm]
        return replace(self.start, codes=codes, max_scales=self.max_scales)

    def export(self) -> QuantizedMatrix:
        """Return the current matrix in stored form, on the CPU."""
        bias = None if self.start_bias is None else padded(self.start_bias.detach())
        return self.rounded().pack(bias).to("cpu")


class FixedLinear:
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


class TrainedNorm:
    """A norm with a trained weight; what is trained and rounded is the weight as it is stored."""

    def __init__(self, spec: NormSpec, norm: Norm, tensors: TensorFiles, rates: Rates) -> None:
        """Take the source's norm, and the files that hold its tensors."""
        self.spec = spec
        self.norm = norm
        device = norm.weight.device
        weight = fits_half(read_norm(tensors, spec, "weight"), f"{spec.key}.weight")
        self.value = leaf(weight.float(), device)
        self.bias: torch.Tensor | None = None
        if spec.has_bias:
            bias = fits_half(read_norm(tensors, spec, "bias"), f"{spec.key}.bias")
            self.bias = bias.float().to(device)
        self.parameter = sized(self.value, rates.norm)

    def current(self) -> Norm:
        """Return the norm with its tensors as stored."""
        spec, bias = self.spec, self.bias
        return replace(
            self.norm,
            weight=in_memory(stored(self.value), spec.offset, spec.multiplier),
            bias=None if bias is None else in_memory(bias, 0.0, spec.multiplier),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name."""
        tensors = {f"{self.spec.key}.weight": self.value}
        return tensors if self.bias is None else tensors | {f"{self.spec.key}.bias": self.bias}


def fits_half(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return a weight rounded to fp16.

    Raises:
        NonFiniteState: it is too large.
    """
    rounded = weight.half()
    if not rounded.isfinite().all():
        raise NonFiniteState(
            f"`{name}` does not fit fp16, in which EXL2 stores it; this model cannot be "
            "converted without clamping"
        )
    return rounded


def leaf(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a trainable copy of a tensor, contiguous, as are its gradients then."""
    copy = value.detach().clone(memory_format=torch.contiguous_format)
    return copy.to(device).requires_grad_()


def sized(value: torch.Tensor, rate: float) -> Parameter:
    """Return a parameter whose rate is relative to the root mean square of its values."""
    size = float(value.detach().square().mean().sqrt())
    return Parameter(value=value, rate=rate * size)


def _members(place: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return each group's in-features, int64 (g, rows), padded with k.

    Args:
        place: int64 (k,), row in the file of each in-feature.
        sizes: int64 (g,), rows of each group in the file.
    """
    groups = torch.split(torch.argsort(place), sizes.tolist())  # in-features in the file's order
    return pad_sequence(list(groups), batch_first=True, padding_value=len(place))
