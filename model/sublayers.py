"""Sublayers: the unit that is run, measured and quantized, in three phases.

`normed` is what the first projections read, `inner` what the last one reads, `output` adds the
residual. A caller may run phases separately and replace any linear between them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from exl2flow.model.activations import ACTIVATIONS
from exl2flow.model.attention import LayerCache, attend
from exl2flow.model.linear import Linear, load_linear
from exl2flow.model.mlp import MlpSublayer
from exl2flow.model.norms import RmsNorm, load_norm
from exl2flow.model.rope import rope_table
from exl2flow.model.rope_spec import RopeSpec
from exl2flow.model.spec import AttentionSpec, ModelSpec, SublayerSpec
from exl2flow.model.weights import TensorFiles


class Sublayer(Protocol):
    """What attention and MLP half-layers share; `linears` may be replaced one by one."""

    spec: SublayerSpec
    linears: dict[str, Linear]

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what projections of capture `input` read, (b, t, hidden)."""
        ...

    def inner(
        self, normed: torch.Tensor, *, start: int = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Return what projections of capture `inner` read.

        Args:
            normed: (b, t, hidden).
            start: position of the first token.
            cache: takes this call's keys and values and gives back all of them.
        """
        ...

    def output(self, hidden: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, (b, t, hidden)."""
        ...

    def __call__(
        self, hidden: torch.Tensor, *, start: int = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Map hidden states to the next hidden states, (b, t, hidden)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Outputs of the q, k and v projections, before norms and rotation: (b, t, heads · dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class AttentionSublayer:
    """A `Sublayer`; `project` and `attend` are the two halves of `inner`."""

    def __init__(
        self,
        spec: SublayerSpec,
        *,
        attention: AttentionSpec,
        rope: RopeSpec,
        norm: RmsNorm,
        head_norms: tuple[RmsNorm, ...],
        linears: dict[str, Linear],
    ) -> None:
        """Put together; `head_norms` are those of queries and of keys, or none."""
        self.spec = spec
        self.attention = attention
        self.rope = rope
        self.norm = norm
        self.head_norms = head_norms
        self.linears = linears

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what q, k and v read, (b, t, hidden)."""
        return self.norm(hidden)

    def inner(
        self, normed: torch.Tensor, *, start: int = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Return the attention output that o reads, (b, t, heads · dim)."""
        return self.attend(self.project(normed), start=start, cache=cache)

    def project(self, normed: torch.Tensor) -> Projected:
        """Apply the q, k and v projections."""
        return Projected(
            q=self.linears["q_proj"](normed),
            k=self.linears["k_proj"](normed),
            v=self.linears["v_proj"](normed),
        )

    def attend(
        self, projected: Projected, *, start: int = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Return the attention output (b, t, heads · dim) of given projection outputs."""
        q, k, v = (self._heads(x) for x in (projected.q, projected.k, projected.v))
        if self.head_norms:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        table = rope_table(self.rope, start, q.shape[-2], q.device)
        q, k = table.rotate(q), table.rotate(k)
        if cache is not None:
            k, v = cache.append(k, v)
        window = self.attention.windows[self.spec.layer_index]
        result = attend(q, k, v, scale=self.attention.scale, window=window)  # (b, h, t, d)
        return result.transpose(1, 2).flatten(2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Split (b, t, h · d) into (b, h, t, d)."""
        batch, count, _ = x.shape
        return x.view(batch, count, -1, self.attention.head_dim).transpose(1, 2)

    def output(self, hidden: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, (b, t, hidden)."""
        return hidden + self.linears["o_proj"](inner)

    def __call__(
        self, hidden: torch.Tensor, *, start: int = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Map hidden states to the next hidden states, (b, t, hidden)."""
        return self.output(hidden, self.inner(self.normed(hidden), start=start, cache=cache))


def build_sublayer(
    spec: ModelSpec,
    sublayer: SublayerSpec,
    tensors: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Sublayer:
    """Load one sublayer.

    Raises:
        MissingTensor: one of its tensors is absent.
        TensorShapeError: a tensor contradicts the config.
    """
    linears = {
        projection.name: load_linear(tensors, projection, dtype=dtype, device=device)
        for projection in sublayer.projections
    }
    norm, *head_norms = (
        load_norm(tensors, key, size=size, eps=spec.norm_eps, dtype=dtype, device=device)
        for key, size in _norm_sizes(spec, sublayer)
    )
    match sublayer.kind:
        case "attention":
            return AttentionSublayer(
                sublayer,
                attention=spec.attention,
                rope=spec.rope,
                norm=norm,
                head_norms=tuple(head_norms),
                linears=linears,
            )
        case "mlp":
            activation = ACTIVATIONS[spec.mlp.activation]
            return MlpSublayer(sublayer, norm=norm, linears=linears, activation=activation)


def _norm_sizes(spec: ModelSpec, sublayer: SublayerSpec) -> list[tuple[str, int]]:
    sizes = [(sublayer.norm_key, spec.hidden_size)]
    return sizes + [(key, spec.attention.head_dim) for key in sublayer.head_norm_keys]
