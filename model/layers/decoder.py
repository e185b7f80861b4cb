"""The whole model: embedding, sublayers, head."""

from collections.abc import Callable, Sequence

import torch

from exl2flow.core.errors import SourceModelError, TensorShapeError
from exl2flow.core.requests.request import FIRST_EMBEDDING
from exl2flow.kernels import get_ops, on_device, read_in_place
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.cache import KvCache
from exl2flow.model.layers.experts import ExpertsSublayer
from exl2flow.model.layers.fuse import product_of
from exl2flow.model.layers.linear import (
    DenseLinear,
    Linear,
    Part,
    SharedLinear,
    is_packed,
    made_linear,
    read_part,
    read_to,
)
from exl2flow.model.layers.norms import Norm, load_norm
from exl2flow.model.layers.placement import Placement
from exl2flow.model.layers.rope import RopeTables
from exl2flow.model.layers.span import Span
from exl2flow.model.layers.sublayer import Sublayer


def check_ids(ids: torch.Tensor | Sequence[int], spec: ModelSpec, *, noise: bool = False) -> None:
    """Check token ids where they enter, in main memory; `Embedding` does not look at them.

    Args:
        ids: any shape.
        spec: the model that is to read them.
        noise: allow -1, which stands for noise.

    Raises:
        SourceModelError: an id is not in the model's vocabulary.
    """
    given = torch.as_tensor(ids)
    outside = given[(given >= spec.vocab_size) | (given < (-1 if noise else 0))]
    if outside.numel():
        raise SourceModelError(
            f"{outside.numel()} of {given.numel()} tokens are not in the vocabulary of "
            f"`{spec.source_dir}`, such as id {int(outside[0])} of {spec.vocab_size}; the "
            "tokenizer belongs to another model: fetch both from one repository"
        )


def with_bos(ids: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Return rows of text int64 (rows, t), beginning with BOS if the model needs it.

    Rows of noise, which begin with a negative id, stay as they are.
    """
    if not spec.family.needs_bos or spec.bos_token_id is None:
        return ids
    first = torch.where(ids[:, :1] < 0, ids[:, :1], spec.bos_token_id)
    return torch.cat([first, ids[:, 1:]], dim=1)


class Embedding:
    """Rows by token id; `weight` (rows, hidden) may have more rows than the vocabulary.

    multiplier: of these rows; learned: rows by position, (positions, hidden), which are added.
    """

    def __init__(
        self, weight: torch.Tensor, *, multiplier: float = 1.0, learned: torch.Tensor | None = None
    ) -> None:
        self.weight = weight
        self.multiplier = multiplier
        self.learned = learned

    def __call__(
        self,
        ids: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states (b, t, hidden) of ids (b, t); an id without a row counts as 0.

        Args:
            ids: of tokens.
            dtype: of the states; None: of the weight.
            positions: int64 (t,) or (b, t); None: from 0 on.
        """
        ids, dtype = ids.to(self.weight.device), dtype or self.weight.dtype
        if dtype == self.weight.dtype:
            rows = get_ops(ids.device).embed(ids, self.weight, self.multiplier)
            return placed(rows, 1.0, self.learned, positions)
        rows = get_ops(ids.device).embed(ids, self.weight).to(dtype)
        return placed(rows, self.multiplier, self.learned, positions)


def placed(
    rows: torch.Tensor,
    multiplier: float,
    learned: torch.Tensor | None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the states (b, t, hidden) of looked-up rows; other arguments as in `Embedding`."""
    rows = rows if multiplier == 1.0 else rows * multiplier
    if learned is None:
        return rows
    if positions is None:
        positions = torch.arange(rows.shape[-2], device=rows.device)
    return rows + learned[positions.clamp(max=len(learned) - 1)].to(rows.dtype)


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return softcap · tanh(logits / softcap), or logits as they are without a soft-cap."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def divergence_terms(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return `p ln(p / q)` of log probabilities p and q, (…, v).

    The sum over v is the KL divergence of q from p in nats.
    """
    return expected.exp() * (expected - found)


class Head:
    """Final norm and projection to the vocabulary; `softcap` limits logits, see `capped`."""

    def __init__(self, *, final_norm: Norm, linear: Linear, softcap: float | None = None) -> None:
        self.final_norm = final_norm
        self.linear = linear
        self.softcap = softcap
        self._columns = linear.columns if isinstance(linear, SharedLinear) else None
        own = linear.linear if isinstance(linear, SharedLinear) else linear
        self._product = product_of([own], norm=final_norm, exact=True)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the projection reads, (b, t, hidden)."""
        return self.final_norm(hidden)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits fp32 (b, t, v) of the last sublayer's output (b, t, hidden)."""
        if self._product is None or hidden.dtype != torch.float16:
            return self.logits(self.normed(hidden))
        flat = hidden.reshape(-1, hidden.shape[-1])
        [logits], _ = get_ops(hidden.device).multiply(flat, [self._product])
        if self._columns is not None:
            logits = self._columns(logits)
        return capped(logits.view(*hidden.shape[:-1], -1), self.softcap)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return logits fp32 (…, v) of what the projection reads, (…, hidden)."""
        return capped(self.linear(normed).float(), self.softcap)

    def with_linear(self, linear: Linear) -> "Head":
        """Return this head with another projection."""
        return Head(final_norm=self.final_norm, linear=linear, softcap=self.softcap)


class Decoder:
    """A model ready to run; `spans`: its sublayers by device, in the order of a pass."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Embedding,
        sublayers: Sequence[Sublayer],
        head: Head,
        placement: Placement | None = None,
    ) -> None:
        """Assemble a model; `placement` says where its parts are, by default all on one device."""
        self.spec = spec
        self.embedding = embedding
        self.sublayers = sublayers
        self.head = head
        whole = Placement.on(embedding.weight.device, spec.num_layers)
        self.placement = placement or whole
        self.spans = [
            Span(spec, sublayers, device=device, layers=layers)
            for device, layers in self.placement.spans()
        ]

    @property
    def waits_for_routes(self) -> bool:
        """Whether the host divides tokens among experts, of resident sublayers."""
        return any(
            isinstance(sublayer, ExpertsSublayer) and not sublayer.is_fused
            for sublayer in self.sublayers
        )

    def embed(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states (b, t, hidden) entering the first sublayer.

        Args:
            ids: token ids (b, t).
            rows: (n, hidden) in the embedding's dtype, used as they are, in their order, for the n
                ids from `FIRST_EMBEDDING` on.
            positions: of the ids, as in `Embedding`.
        """
        hidden = self.embedding(ids, positions=positions)
        if rows is None:
            return hidden
        given = ids.to(hidden.device) >= FIRST_EMBEDDING
        scaled = rows.to(hidden.device) * self.spec.family.residual_scale
        return hidden.masked_scatter(given[..., None], scaled)

    def hidden(
        self,
        ids: torch.Tensor,
        cache: KvCache | None = None,
        table: RopeTables | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the last sublayer's output (b, t, hidden), before the final norm.

        It is on the device of the head.

        Args:
            ids: token ids (b, t) that follow what the cache holds.
            cache: receives the keys and values of these tokens.
            table: their rotation; by default that of positions from 0 on.
            rows: see `embed`.
        """
        hidden = self.embed(ids, rows, None if table is None else table.positions)
        for span in self.spans:
            hidden = span(on_device(hidden, span.device), start=table or 0, cache=cache)
        return hidden

    def fill(
        self,
        ids: torch.Tensor,
        cache: KvCache,
        table: RopeTables | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Store the keys and values of token ids; arguments as in `hidden`.

        What follows the last layer's keys and values is not computed.
        """
        hidden = self.embed(ids, rows, None if table is None else table.positions)
        *spans, last = [span for span in self.spans if span.layers]
        for span in spans:
            hidden = span(on_device(hidden, span.device), start=table or 0, cache=cache)
        last.fill(on_device(hidden, last.device), start=table or 0, cache=cache)

    def forward(
        self, ids: torch.Tensor, cache: KvCache | None = None, table: RopeTables | None = None
    ) -> torch.Tensor:
        """Return the logits fp32 (b, t, v) of token ids (b, t); see `hidden`."""
        return self.head(self.hidden(ids, cache, table))


def build_embedding(
    spec: ModelSpec,
    tensors: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    in_host: bool = False,
) -> Embedding:
    """Load the embedding.

    in_host: its rows by token stay in host memory, where a GPU reads them.

    Raises:
        MissingTensor: it is absent.
        TensorShapeError: it, or that of positions, has too few rows, or rows of another size.
        BackendUnavailable: host memory cannot be pinned.
    """

    def read(key: str, rows: int, device: torch.device | str = device) -> torch.Tensor:
        weight = read_to(tensors, f"{key}.weight", device, dtype)
        if weight.dim() != 2 or weight.shape[0] < rows or weight.shape[1] != spec.hidden_size:
            raise TensorShapeError(
                f"`{key}.weight` has shape {tuple(weight.shape)}, `config.json` implies {rows} "
                f"rows of {spec.hidden_size}; check that both belong to one model"
            )
        return weight

    weight = read(spec.embedding_key, spec.vocab_size, "cpu" if in_host else device)
    apart = spec.family.learned_positions
    return Embedding(
        read_in_place(weight, device) if in_host else weight,
        multiplier=spec.embedding_multiplier,
        learned=None if apart is None else read(apart, spec.max_positions),
    )


def build_head(
    spec: ModelSpec,
    tensors: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    embedding: Embedding | None = None,
    packed: bool = False,
    cut: Callable[[Part], Part] = lambda part: part,
) -> Head:
    """Load the final norm and the head: quantized, else dense, else the tied embedding.

    Args:
        spec: the model.
        tensors: its files.
        dtype: of the weights in memory.
        device: where they go.
        embedding: loaded already; a tied head then shares its memory.
        packed: as in `made_linear`.
        cut: what becomes of the projection before it is made.

    Raises:
        MissingTensor: the head is absent and not tied.
        TensorShapeError: a tensor contradicts the config.
    """
    key = spec.head.key
    if spec.tied_head and not is_packed(key, tensors) and f"{key}.weight" not in tensors:
        embedding = embedding or build_embedding(spec, tensors, dtype=dtype, device=device)
        tied = DenseLinear(embedding.weight, out_features=spec.vocab_size)
        part = Part(tied, spec.vocab_size)
    else:
        part = read_part(
            tensors, spec.head, dtype=dtype, device=device, any_rows=True, gptq=spec.gptq_label
        )
    linear = made_linear(cut(part), dtype=dtype, device=device, packed=packed)
    final_norm = load_norm(tensors, spec.final_norm, dtype=dtype, device=device)
    return Head(final_norm=final_norm, linear=linear, softcap=spec.logit_softcap)
