"""The kernels a GPU runs between products: launches are recorded instead of made."""

from typing import Any

import pytest
import torch

from exl2flow.kernels import CACHE_FORMATS, LayerStore, NormArgs
from exl2flow.kernels.cuda import cache as cuda_cache
from exl2flow.kernels.cuda import steps as cuda_steps


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], int]]:
    """Record the names, grids and threads of launches from now on."""
    found: list[tuple[str, tuple[int, ...], int]] = []

    def kept(file: str, name: str, grid: tuple[int, ...], *arguments: Any, **how: Any) -> None:
        assert all(a.is_contiguous() for a in arguments if isinstance(a, torch.Tensor))
        found.append((name, grid, how.get("threads", 128)))

    monkeypatch.setattr(cuda_steps, "launch", kept)
    monkeypatch.setattr(cuda_cache, "launch", kept)
    return found


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16)


def rms(d: int) -> NormArgs:
    return NormArgs(weight=halves(d), eps=1e-5)


@pytest.mark.parametrize(
    ("d", "expected"),
    [
        (4096, ("rms_norm_8", (6,), 128)),
        (128, ("rms_norm_8", (2,), 128)),  # a warp has a row
        (28672, ("rms_norm_8", (6,), 896)),
        (32776, ("add_normed", (6,), 512)),  # more than threads can keep
        (100, ("add_normed", (6,), 128)),
    ],
)
def test_a_row_is_kept_where_it_has_whole_pieces(
    d: int, expected: tuple[str, tuple[int, ...], int], launches: list
) -> None:
    cuda_steps.norm(halves(2, 3, d), rms(d))

    assert launches == [expected]


def test_rows_of_exchanged_axes_are_normed_where_they_lie(launches: list) -> None:
    x = halves(2, 3, 5, 64).transpose(1, 2)

    assert cuda_steps.norm(x, rms(64)).stride() == x.stride()
    assert cuda_steps.norm(x[..., :32], rms(32)).is_contiguous()


def test_a_cta_rotates_the_heads_of_a_place(launches: list) -> None:
    x, angles = halves(2, 9, 32, 128).transpose(1, 2), torch.zeros(9, 64)

    found = cuda_steps.rotate(x, angles, angles)
    cuda_steps.rotate(x[:, :4].contiguous(), angles, angles)

    assert found.stride() == x.stride()
    assert launches == [("rotate_8", (9, 1, 2), 256), ("rotate_8", (9, 1, 2), 32)]


@pytest.mark.parametrize(("head_dim", "half"), [(80, 20), (100, 32), (100, 50)])
def test_heads_without_whole_pieces_are_rotated_one_by_one(
    head_dim: int, half: int, launches: list
) -> None:
    angles = torch.zeros(9, half)

    cuda_steps.rotate(halves(1, 1, 9, head_dim), angles, angles)

    assert [name for name, _, _ in launches] == ["rotate_1"]


def test_unaligned_tensors_are_read_one_element_at_a_time(launches: list) -> None:
    odd, angles = halves(9 * 128 + 1)[1:].view(1, 1, 9, 128), torch.zeros(9, 64)

    cuda_steps.norm(odd, rms(128))
    cuda_steps.rotate(odd, angles, angles)
    cuda_steps.gated(odd, odd, "silu")

    assert [name for name, _, _ in launches] == ["add_normed", "rotate_1", "gated_silu_1"]


def test_gates_are_read_by_sixteen_bytes(launches: list) -> None:
    cuda_steps.gated(halves(3, 11008), halves(3, 11008), "gelu_tanh")
    cuda_steps.gated(halves(3, 3), halves(3, 3), "relu")

    assert launches == [("gated_gelu_tanh_8", (17, 1), 256), ("gated_relu_1", (1, 1), 256)]


def test_an_activation_of_gate_and_up_has_its_own_kernel(launches: list) -> None:
    both = halves(3, 2 * 2880)

    cuda_steps.gated(both[:, :2880], both[:, 2880:], "clamped_swiglu")
    cuda_steps.gated(halves(3, 3), halves(3, 3), "clamped_swiglu")

    found = [("gated_clamped_swiglu_8", (2, 3), 256), ("gated_clamped_swiglu_1", (1, 1), 256)]
    assert launches == found


def test_gate_and_up_in_one_tensor_are_not_copied(launches: list) -> None:
    both, odd = halves(3, 2 * 11008), halves(3, 2 * 100 + 4)

    y = cuda_steps.gated(both[:, :11008], both[:, 11008:], "silu")
    cuda_steps.gated(odd[:, :100], odd[:, 100:200], "silu")

    assert y.shape == (3, 11008)
    assert y.is_contiguous()
    assert launches == [("gated_silu_8", (6, 3), 256), ("gated_silu_1", (1, 3), 256)]


def test_columns_of_a_wider_result_are_rotated_and_stored_where_they_are(launches: list) -> None:
    wide, angles = halves(9, 3 * 4096), torch.zeros(9, 64)
    q, k = (wide[:, i : i + 4096].view(1, 9, 32, 128).transpose(1, 2) for i in (0, 4096))
    store = LayerStore.empty(
        CACHE_FORMATS["fp16"], pages=1, kv_heads=32, head_dim=128, device="cpu"
    )

    found = cuda_steps.rotate(q, angles, angles)
    cuda_cache.write_cache(store, torch.arange(9), *(x[0].transpose(0, 1) for x in (k, k)))

    assert found.transpose(1, 2).is_contiguous()
    assert [name for name, _, _ in launches] == ["rotate_8", "put_rows", "put_rows"]


def test_attention_to_two_sets_of_positions_is_joined_in_one_launch(launches: list) -> None:
    a, b = (halves(1, 9, 32, 128).transpose(1, 2) for _ in range(2))

    y, _ = cuda_steps.joined(a, b, *torch.zeros(2, 1, 32, 9))

    assert y.stride() == a.stride()
    assert launches == [("joined", (18,), 256)]


def test_activations_are_read_by_sixteen_bytes(launches: list) -> None:
    cuda_steps.activated(halves(3, 11008), "relu2")
    cuda_steps.activated(halves(3, 3), "gelu")

    assert launches == [("activated_relu2_8", (17,), 256), ("activated_gelu_1", (1,), 256)]


@pytest.mark.parametrize(
    "norm",
    [
        NormArgs(weight=halves(64), eps=1e-5, centered=True),
        NormArgs(weight=halves(64), eps=1e-5, bias=halves(64)),
        NormArgs(weight=halves(5, 64), eps=1e-5),
    ],
)
def test_norms_of_other_kinds_have_a_kernel_of_their_own(norm: NormArgs, launches: list) -> None:
    x = halves(2, 3, 5, 64).transpose(1, 2)

    assert cuda_steps.norm(x, norm).stride() == x.stride()
    assert launches == [("add_normed", (30,), 64)]


def test_heads_without_positions_stay_where_they_are(launches: list) -> None:
    x, none = halves(2, 9, 32, 128).transpose(1, 2), torch.zeros(9, 0)

    assert cuda_steps.rotate(x, none, none) is x
    assert launches == []


@pytest.mark.parametrize(
    ("name", "dim", "expected"),
    [("fp16", 128, "put_rows"), ("fp16", 24, "write_rows"), ("fp8", 128, "write_rows")],
)
def test_rows_that_are_stored_as_they_are_are_copied(
    name: str, dim: int, expected: str, launches: list
) -> None:
    store = LayerStore.empty(CACHE_FORMATS[name], pages=1, kv_heads=4, head_dim=dim, device="cpu")

    cuda_cache.write_cache(store, torch.arange(7), halves(7, 4, dim), halves(7, 4, dim))

    assert [(kernel, grid[0]) for kernel, grid, _ in launches] == [(expected, 7)] * 2
