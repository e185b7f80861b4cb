"""Layers with a state: the gated delta rule (linear attention of Qwen3-Next and Qwen3.5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from exl2flow.core.errors import SourceModelError, UnsupportedArchitecture
from exl2flow.model.config.fields import Fields

LINEAR = "linear_attention"  # in `layer_types`
HEAD_DIM, CONV = 128, 4  # of the kernels
MOST_HEADS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A layer with a state of (key_dim, value_dim) for each value head.

    Value heads share key heads in groups of neighbours. is_packed: q, k, v and z are the rows of
    one matrix, by key head, and b and a those of another.
    """

    key_heads: int
    value_heads: int
    key_dim: int = HEAD_DIM
    value_dim: int = HEAD_DIM
    conv: int = CONV
    is_packed: bool = False

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token, and as many of queries."""
        return self.key_heads * self.key_dim

    @property
    def width(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements of a token that the convolution reads: queries, keys and values."""
        return 2 * self.key_width + self.width

    @property
    def state(self) -> int:
        """Elements of a text's state, those of the convolution apart."""
        return self.width * self.key_dim


class PlainTensor(NamedTuple):
    """A tensor of a layer that is stored as it is: its name and shape."""

    name: str
    shape: tuple[int, ...]


def read_delta(config: Fields, *, is_packed: bool) -> DeltaSpec:
    """Read the keys of layers with a state.

    Raises:
        SourceModelError: a key is impossible.
        UnsupportedArchitecture: heads or a convolution of another size than the kernels have.
    """
    key_heads = config.integer("linear_num_key_heads", 16, most=MOST_HEADS)
    value_heads = config.integer("linear_num_value_heads", 32, most=MOST_HEADS)
    if value_heads % key_heads:
        raise SourceModelError(
            f"{config.named('linear_num_value_heads')} in `{config.path}` is {value_heads}; it "
            f"must be a multiple of {config.named('linear_num_key_heads')}, {key_heads}"
        )
    for key, only in (
        ("linear_key_head_dim", HEAD_DIM),
        ("linear_value_head_dim", HEAD_DIM),
        ("linear_conv_kernel_dim", CONV),
    ):
        if config.integer(key, only) != only:
            raise UnsupportedArchitecture(
                f"{config.named(key)} in `{config.path}` is {config.integer(key)}; only {only} is "
                "supported"
            )
    return DeltaSpec(key_heads=key_heads, value_heads=value_heads, is_packed=is_packed)


def plain_tensors(start: str, spec: DeltaSpec, hidden_size: int) -> Mapping[str, PlainTensor]:
    """Return by role the tensors of a layer that are stored as they are.

    start: beginning of their names.
    """
    heads = spec.value_heads
    rows = {"ba": 2 * heads} if spec.is_packed else {"b": heads, "a": heads}
    return {
        "conv": PlainTensor(f"{start}.conv1d.weight", (spec.channels, 1, spec.conv)),
        "decay": PlainTensor(f"{start}.A_log", (heads,)),
        "step": PlainTensor(f"{start}.dt_bias", (heads,)),
        "norm": PlainTensor(f"{start}.norm.weight", (spec.value_dim,)),
        **{
            role: PlainTensor(f"{start}.in_proj_{role}.weight", (n, hidden_size))
            for role, n in rows.items()
        },
    }
