"""A resumed walk replays finished sublayers with the arithmetic of the first run."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import small_config
from stage_runs import calibrated_on, foreign_measurement, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.model import CanonicalTensors, Sublayer, build_sublayer, resolve
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.mlp import MlpSublayer
from exl2flow.quant.quantize import correction
from exl2flow.quant.quantize.correction import JUDGE_STEP, CrossProducts
from exl2flow.quant.quantize.matrix_work import HEAD_FILE
from exl2flow.quant.quantize.stage import Quantizing
from exl2flow.quant.rounding import hessian
from exl2flow.quant.rounding.hessian import collect_hessians
from exl2flow.quant.walk import walk
from exl2flow.quant.walk.deal import Deal, Pairs

ROWS = 16
SUBLAYERS = 4


@pytest.fixture
def config(tmp_path: Path) -> ConversionConfig:
    """A conversion with correction that need not measure."""
    source = make_tiny("llama", tmp_path / "model")
    return small_config(
        source,
        tmp_path / "out",
        bpw=4.0,
        calibration=calibrated_on(text_parquet(tmp_path / "text.parquet"), (ROWS, 32), (1, 32)),
        measurement=foreign_measurement(tmp_path / "measurement.json", resolve(source)),
        sensitivity={"kind": "error"},
        rounding={"correction": 1.0},
    )


def by(most: int) -> Callable[..., Iterator[slice]]:
    """Return a stand-in for `row_batches` whose batches have `most` rows or fewer, as on a GPU."""

    def batches(
        sublayer: Sublayer, states: torch.Tensor, pieces: Sequence[slice] | None = None
    ) -> Iterator[slice]:
        for piece in pieces or [slice(0, len(states))]:
            for begin in range(piece.start, piece.stop, most):
                yield slice(begin, min(begin + most, piece.stop))

    return batches


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """By what is being done, how many rows pass a sublayer together."""
    found: dict[str, list[int]] = defaultdict(list)
    inside = ["compute"]

    def watch(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            inside.append(name)
            result = method(*args, **kwargs)
            inside.pop()
            return result

        monkeypatch.setattr(owner, name, watched)

    def count(kind: type[AttentionSublayer] | type[MlpSublayer]) -> None:
        method = kind.reads

        def counted(sublayer: Any, hidden: torch.Tensor, **given: Any) -> dict[str, torch.Tensor]:
            found[inside[-1]].append(len(hidden))
            return method(sublayer, hidden, **given)

        monkeypatch.setattr(kind, "reads", counted)

    watch(CrossProducts, "add")
    watch(Quantizing, "replay")
    count(AttentionSublayer)
    count(MlpSublayer)
    return found


def test_replay_passes_rows_in_the_batches_of_the_first_run(
    config: ConversionConfig, seen: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU takes another kernel, with other bits, for products of another shape."""
    for module in (walk, hessian):
        monkeypatch.setattr(module, "row_batches", by(4))
    pipeline = run_until(config, "quantize")
    (pipeline.path("quantize") / HEAD_FILE).unlink()

    pipeline.run("quantize", progress=silent)

    source = seen["add"][: len(seen["add"]) // SUBLAYERS]
    assert sum(source) == ROWS
    assert seen["add"] == SUBLAYERS * source
    assert seen["replay"] == SUBLAYERS * [*source, *(ROWS // 4) * [4]]


def test_source_rows_of_experts_pass_in_the_batches_of_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(make_tiny("qwen2-moe", tmp_path / "model"))
    spec = next(s for s in source.sublayers if s.group is not None)
    tensors = CanonicalTensors(source)
    sublayer = build_sublayer(source, spec, tensors, dtype=torch.float32, device="cpu")
    for module in (hessian, correction):
        monkeypatch.setattr(module, "row_batches", by(16))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, 8, source.hidden_size, generator=generator)
    again = range(0, 40, 3)
    pairs = Pairs(again, Deal(40, is_whole=True))
    first = states[list(again)] + 0.1 * torch.randn(len(again), *states.shape[1:])
    second, alone = first.clone(), first.clone()
    passed: list[list[int]] = []
    inner = CrossProducts._leave

    def leave(self: CrossProducts, rows: list[int], outputs: torch.Tensor) -> None:
        passed.append(rows)
        inner(self, rows, outputs)

    monkeypatch.setattr(CrossProducts, "_leave", leave)
    crosses = CrossProducts(sublayer, first, pairs)
    collect_hessians(sublayer, states, observe=crosses)
    count = len(passed)
    correction.advance_source(sublayer, CrossProducts(sublayer, second, pairs), states)

    assert torch.equal(first, second)
    assert passed[:count] == passed[count:]
    judging = [row for place, row in enumerate(again) if place % JUDGE_STEP == 0]
    assert [rows for rows in passed[:count] if set(rows) & set(judging)] == [[r] for r in judging]
    assert sorted(row for rows in passed[:count] for row in rows) == list(again)
    assert max(map(len, passed)) == 5

    plain = CrossProducts(sublayer, alone, pairs)
    for module in (hessian, correction):
        monkeypatch.setattr(module, "row_batches", by(1))
    collect_hessians(sublayer, states, observe=plain)
    torch.testing.assert_close(alone, first)
    means, singles = crosses.means(), plain.means()
    assert means.keys() == singles.keys()
    for capture, mean in means.items():
        torch.testing.assert_close(mean, singles[capture], rtol=1e-3, atol=1e-4)
    assert crosses.changed_routes() == pytest.approx(plain.changed_routes())
