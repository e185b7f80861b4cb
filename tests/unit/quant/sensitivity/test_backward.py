"""Gradients of tiny models against those that autograd gives of the whole model at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from backward_runs import configuration, pipeline_in, read_factors, run_all, whole_decoder
from blocks import ROWS, add_rows, block_config
from bounds import near, terms_of
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import NonFiniteState
from exl2flow.core.options.config import ConversionConfig
from exl2flow.model import Linear
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.model.layers.decoder import Decoder
from exl2flow.quant.rounding.error_feedback import padded_weight
from exl2flow.quant.sensitivity import backward
from exl2flow.quant.sensitivity.backward import draw
from exl2flow.quant.sensitivity.fisher import estimate
from exl2flow.quant.sensitivity.stage import spread_rows


class Recorded:
    """A linear map that keeps all inputs and outputs with their gradients."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.retain_grad()
        self.inputs.append(x.detach()[0])
        self.outputs.append(y)
        return y

    def padded_gradients(self) -> list[torch.Tensor]:
        gradients = [y.grad[0] for y in self.outputs if y.grad is not None]
        missing = padded_columns(gradients[0].shape[-1]) - gradients[0].shape[-1]
        return [torch.nn.functional.pad(g, (0, missing)) for g in gradients]


def labels_of(logits: torch.Tensor, row: int) -> torch.Tensor:
    """Draw labels as the documentation says, with another library."""
    uniform = torch.rand(row + 1, len(logits), generator=torch.Generator().manual_seed(0))[row]
    cumulated = logits.softmax(-1).double().cumsum(-1).numpy()
    drawn = [
        np.searchsorted(c, u, side="right")
        for c, u in zip(cumulated, uniform.tolist(), strict=True)
    ]
    return torch.tensor(np.array(drawn))


def naive_backward(config: ConversionConfig, ids: torch.Tensor) -> tuple[Decoder, torch.Tensor]:
    """Run the whole model forward and backward, its linears recorded; also return all logits."""
    decoder = whole_decoder(config)
    decoder.embedding.weight.requires_grad_()
    for sublayer in decoder.sublayers:
        for name, linear in sublayer.linears.items():
            sublayer.linears[name] = Recorded(linear)  # type: ignore[assignment]  # a spy
    decoder.head.linear = Recorded(decoder.head.linear)  # type: ignore[assignment]  # a spy
    kept = []
    for row, tokens in enumerate(ids):
        logits = decoder.forward(tokens[None])[0]
        labels = labels_of(logits.detach(), row)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        kept.append(logits.detach())
    return decoder, torch.cat(kept)


def naive_factors(recorded: Recorded) -> tuple[torch.Tensor, torch.Tensor]:
    """Return H_I of the projection alone, divided by tr(H_O), and H_O."""
    x, g = torch.cat(recorded.inputs), torch.cat(recorded.padded_gradients())
    by_output = g.T @ g / len(x)
    by_input = (x * g.square().sum(-1, keepdim=True)).T @ x / len(x)
    return by_input / by_output.trace(), by_output


def close(found: torch.Tensor, expected: torch.Tensor, config: ConversionConfig) -> None:
    """Compare sums over two rows of 64 tokens of what is computed there and back, twice."""
    terms = 4 * terms_of(whole_decoder(config).spec, 64)
    torch.testing.assert_close(found, expected, **near(expected, terms, 2 * 64))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *ROWS])
def test_factors_are_those_of_the_gradients_of_the_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_rows(monkeypatch)
    shape = block_config(family) if family in ROWS else {}
    config = configuration("llama" if shape else family, tmp_path, **shape)
    pipeline = run_all(pipeline_in(config, tmp_path / "work"))
    ids = spread_rows(pipeline.path("tokenize"), 2)

    decoder, _ = naive_backward(config, ids)

    for sublayer in decoder.sublayers:
        found = read_factors(pipeline.path("sensitivity"), sublayer.spec.index)
        naive = {name: naive_factors(linear) for name, linear in sublayer.linears.items()}  # type: ignore[arg-type]
        for projection in sublayer.spec.projections:
            readers = [p.name for p in sublayer.spec.projections if p.capture == projection.capture]
            shared = torch.stack([naive[name][0] for name in readers]).mean(0)
            factors = found[projection.name]
            close(factors.input, shared, config)
            close(factors.output.blocks, naive[projection.name][1][None], config)
            n = padded_columns(projection.out_features)
            assert factors.output.columns == n == factors.output.diagonal().shape[0]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_factors_of_the_head_are_those_of_all_labels(
    softcap: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_rows(monkeypatch)
    shape = block_config("capped") if softcap else {}
    config = configuration("llama", tmp_path, num_hidden_layers=1, **shape)
    pipeline = run_all(pipeline_in(config, tmp_path / "work"))
    decoder, logits = naive_backward(config, spread_rows(pipeline.path("tokenize"), 2))
    p = torch.nn.functional.pad(logits.softmax(-1), (0, 320 - 301))
    x = torch.cat(decoder.head.linear.inputs)  # type: ignore[attr-defined]

    factors = read_factors(pipeline.path("sensitivity"), "head")["lm_head"]

    by_label = torch.eye(320) - p[:, None]  # (t, labels, n): gradients, signs aside
    if softcap:
        raw = torch.nn.functional.pad(
            x @ whole_decoder(config).head.linear.weight.T, (0, 320 - 301)
        )
        by_label = by_label / torch.cosh(raw / softcap).square()[:, None]  # derivative of the cap
    weighted = by_label * p[..., None].sqrt()
    fisher = weighted.flatten(0, 1).T @ weighted.flatten(0, 1) / len(x)
    traces = weighted.square().sum((1, 2))  # (t,)
    close(factors.output.blocks[0], fisher, config)
    close(factors.input, (x * traces[:, None]).T @ x / len(x) / traces.mean(), config)
    assert factors.output.columns == padded_weight(whole_decoder(config).head.linear).shape[1]


def test_blocks_are_those_on_the_diagonal_of_the_full_factor(tmp_path: Path) -> None:
    whole = configuration("llama", tmp_path, num_hidden_layers=1)
    options = whole.sensitivity.model_copy(update={"block": 70})
    parts = whole.model_copy(update={"sensitivity": options})

    folders = [run_all(pipeline_in(c, tmp_path / "w")).path("sensitivity") for c in (whole, parts)]

    sizes = {32: 32, 64: 64, 96: 32, 320: 64}  # columns: at most 70, a multiple of 32, all alike
    for index in (0, 1, "head"):
        full, blocked = (read_factors(folder, index) for folder in folders)  # type: ignore[arg-type]
        for name, factors in blocked.items():
            matrix, blocks = full[name].output.blocks[0], factors.output.blocks
            size = sizes[len(matrix)]
            assert blocks.shape == (len(matrix) // size, size, size)
            for place, block in enumerate(blocks):
                part = slice(place * size, (place + 1) * size)
                close(block, matrix[part, part], whole)
            close(factors.input, full[name].input, whole)


def test_estimate_predicts_the_divergence_of_a_small_error(tmp_path: Path) -> None:
    config = configuration("llama", tmp_path, num_hidden_layers=1)
    pipeline = run_all(pipeline_in(config, tmp_path / "work"))
    ids = spread_rows(pipeline.path("tokenize"), 2)
    decoder = whole_decoder(config)
    before = decoder.forward(ids).log_softmax(-1)
    factors = read_factors(pipeline.path("sensitivity"), "head")["lm_head"]
    error = torch.zeros(64, 320)
    error[:, :301] = 1e-2 * torch.randn(64, 301, generator=torch.Generator().manual_seed(0))

    decoder.head.linear.weight += error[:, :301].T

    after = decoder.forward(ids).log_softmax(-1)
    divergence = float((before.exp() * (before - after)).sum(-1).mean())
    assert estimate(error, factors) == pytest.approx(divergence, rel=0.2)  # a product stands in


def test_labels_are_drawn_by_their_probabilities() -> None:
    p = torch.tensor([0.0, 0.5, 0.25, 0.25, 0.0]).expand(6, 5)

    labels = draw(p, torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 1.0]))

    assert labels.tolist() == [1, 1, 2, 2, 3, 4]


def test_logits_in_parts_give_the_same_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration("llama", tmp_path, num_hidden_layers=1)
    at_once = run_all(pipeline_in(config, tmp_path / "once")).path("sensitivity")
    monkeypatch.setattr(backward, "LOGIT_ELEMENTS", 301 * 7)

    in_parts = run_all(pipeline_in(config, tmp_path / "parts")).path("sensitivity")

    for index in (0, "head"):
        expected = read_factors(at_once, index)  # type: ignore[arg-type]
        for name, factors in read_factors(in_parts, index).items():  # type: ignore[arg-type]
            close(factors.input, expected[name].input, config)
            close(factors.output.blocks, expected[name].output.blocks, config)


def test_gradients_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config = configuration("llama", tmp_path, num_hidden_layers=1)
    path = config.source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] *= 1e30  # logits overflow, states do not
    tensors["lm_head.weight"] *= 1e30
    save_file(tensors, path)

    with pytest.raises(NonFiniteState, match="gradients before `lm_head`"):
        run_all(pipeline_in(config, tmp_path / "work"))
