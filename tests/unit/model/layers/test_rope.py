import math
from typing import Any

import pytest
import torch

from exl2flow.model.config.rope_spec import RopeKind, RopeSpec
from exl2flow.model.layers.rope import attention_factor, inverse_frequencies, rope_table, step_table

CPU = torch.device("cpu")


def rope(**fields: Any) -> RopeSpec:
    defaults: dict[str, Any] = {
        "kind": RopeKind.DEFAULT,
        "theta": 10_000.0,
        "rotary_dim": 16,
        "original_max_positions": 64,
    }
    return RopeSpec(**(defaults | fields))


def rotated(x: torch.Tensor, spec: RopeSpec, start: int = 0) -> torch.Tensor:
    return rope_table(spec, start, x.shape[-2], CPU).rotate(x)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    x = torch.randn(1, 1, 5, 16, dtype=torch.float64).float()

    result = rotated(x, rope(), start=3)

    for t in range(5):
        for i in range(8):
            angle = (3 + t) * 10_000 ** (-2 * i / 16)
            pair = complex(x[0, 0, t, i], x[0, 0, t, i + 8])
            turned = pair * complex(math.cos(angle), math.sin(angle))
            assert result[0, 0, t, i].item() == pytest.approx(turned.real, abs=1e-5)
            assert result[0, 0, t, i + 8].item() == pytest.approx(turned.imag, abs=1e-5)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16)

    scores = [
        (rotated(q, rope(), start=start + 7) * rotated(k, rope(), start=start)).sum()
        for start in (0, 20)
    ]

    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)


def test_partial_rotation_leaves_the_other_dimensions() -> None:
    x = torch.randn(2, 3, 5, 24)

    result = rotated(x, rope())

    torch.testing.assert_close(result[..., :16], rotated(x[..., :16], rope()))
    torch.testing.assert_close(result[..., 16:], x[..., 16:], rtol=0, atol=0)


def test_half_precision_is_rotated_in_fp32() -> None:
    x = torch.randn(1, 2, 4, 16).half()

    result = rotated(x, rope(), start=30)

    torch.testing.assert_close(result, rotated(x.float(), rope(), start=30).half(), rtol=0, atol=0)


def test_position_scale_divides_positions() -> None:
    x = torch.randn(1, 1, 1, 16)

    scaled = rotated(x, rope(position_scale=4.0), start=20)

    torch.testing.assert_close(scaled, rotated(x, rope(), start=5))


def test_linear_divides_all_frequencies() -> None:
    plain, divided = rope(), rope(kind=RopeKind.LINEAR, factor=3.0)

    expected = inverse_frequencies(plain, 1) / 3

    torch.testing.assert_close(inverse_frequencies(divided, 1), expected)


def test_llama3_keeps_short_and_divides_long_wavelengths() -> None:
    stretched = rope(kind=RopeKind.LLAMA3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    plain = inverse_frequencies(rope(), 1)

    ratio = inverse_frequencies(stretched, 1) / plain

    turns = 64 * plain / (2 * math.pi)
    assert ratio[turns > 4].tolist() == pytest.approx([1.0] * int((turns > 4).sum()))
    assert ratio[turns < 1].tolist() == pytest.approx([1 / 8] * int((turns < 1).sum()))
    assert ((ratio >= 1 / 8 - 1e-6) & (ratio <= 1 + 1e-6)).all()


def test_llama3_switches_where_its_bounds_are_one() -> None:
    stretched = rope(kind=RopeKind.LLAMA3, factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0)
    plain = inverse_frequencies(rope(), 1)

    ratio = inverse_frequencies(stretched, 1) / plain

    turns = 64 * plain / (2 * math.pi)
    assert ratio.tolist() == [1.0 if turn >= 1 else 1 / 16 for turn in turns.tolist()]


def test_queries_grow_from_the_position_before_a_context_is_full() -> None:
    far = rope(rotary_dim=0, original_max_positions=8, query_beta=0.1, query_offset=1)

    scale = rope_table(far, 0, 24, CPU).query_scale

    assert scale is not None
    expected = [1 + 0.1 * math.log1p((position + 1) // 8) for position in range(24)]
    assert scale[:, 0].tolist() == pytest.approx(expected)


def test_yarn_blends_from_kept_to_divided() -> None:
    ratio = inverse_frequencies(rope(kind=RopeKind.YARN, factor=4.0), 1) / inverse_frequencies(
        rope(), 1
    )

    assert ratio[0].item() == pytest.approx(1.0)
    assert ratio[-1].item() == pytest.approx(0.25)
    assert (ratio.diff() <= 1e-6).all()


def test_longrope_switches_after_the_original_positions() -> None:
    spec = rope(kind=RopeKind.LONGROPE, short_factors=(1.0,) * 8, long_factors=(2.0,) * 8)

    short, long = inverse_frequencies(spec, 64), inverse_frequencies(spec, 65)

    torch.testing.assert_close(short, 2 * long)


def test_dynamic_ntk_grows_the_base_after_the_original_positions() -> None:
    spec = rope(kind=RopeKind.DYNAMIC, factor=2.0)
    plain = inverse_frequencies(rope(), 1)

    within, beyond = (inverse_frequencies(spec, n) for n in (64, 96))

    assert torch.equal(within, plain)
    base = 10_000 * (2 * 96 / 64 - 1) ** (16 / 14)
    torch.testing.assert_close(beyond, torch.tensor([base ** (-i / 8) for i in range(8)]))


def test_a_table_of_steps_has_each_position_as_its_own_call_would() -> None:
    factors = {"short_factors": (1.0,) * 8, "long_factors": (2.0,) * 8}
    dynamic = rope(kind=RopeKind.DYNAMIC, factor=2.0)
    for spec in (rope(), dynamic, rope(kind=RopeKind.LONGROPE, **factors)):
        table = step_table(spec, 200, torch.device("cpu"))

        for position in (0, 1, 63, 64, 65, 127, 128, 129, 199):
            own = rope_table(spec, position, 1, torch.device("cpu"))
            assert torch.equal(table.cos[position], own.cos[0])
            assert torch.equal(table.at(torch.tensor([position])).sin, own.sin)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1.0),
        ({"kind": RopeKind.LINEAR, "factor": 4.0}, 1.0),
        ({"kind": RopeKind.YARN, "factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"kind": RopeKind.YARN, "factor": 0.5}, 1.0),
        ({"kind": RopeKind.YARN, "factor": 4.0, "attention_factor": 0.7}, 0.7),
        ({"kind": RopeKind.YARN, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"kind": RopeKind.LONGROPE, "factor": 4.0}, math.sqrt(1 + math.log(4) / math.log(64))),
    ],
)
def test_attention_factor_follows_the_kind(fields: dict[str, Any], expected: float) -> None:
    assert attention_factor(rope(**fields)) == pytest.approx(expected)


def test_attention_factor_multiplies_the_table() -> None:
    table = rope_table(rope(kind=RopeKind.YARN, attention_factor=2.0), 0, 1, CPU)

    assert table.cos.tolist() == [[2.0] * 8]
    assert table.sin.tolist() == [[0.0] * 8]


def test_a_table_made_in_inference_mode_lets_gradients_pass() -> None:
    rope_table.cache_clear()
    with torch.inference_mode():
        rope_table(rope(), 0, 5, CPU)
    x = torch.randn(1, 1, 5, 16, requires_grad=True)

    rotated(x, rope()).pow(2).sum().backward()

    torch.testing.assert_close(x.grad, 2 * x)  # a rotation keeps lengths
    assert rope_table.cache_info().hits == 1
