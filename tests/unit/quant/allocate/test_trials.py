"""Trials of whole allocations against models that are put together and run as a whole."""

from itertools import pairwise

import pytest
import torch
from backward_runs import configuration, pipeline_in, read_factors, run_all, whole_decoder

from exl2flow.core.options.config import ConversionConfig, RoundingOptions
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import DenseLinear, Linear, ProjectionSpec, resolve
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.model.layers.decoder import Decoder
from exl2flow.quant.allocate.trials import Trials, Verdict
from exl2flow.quant.measure.candidates import HEAD_PARAMS, parse_params
from exl2flow.quant.rounding.error_feedback import RoundingJob, padded_weight, round_matrices
from exl2flow.quant.rounding.hessian import factor, mixed
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.walk.source_model import SourceModel

SHAPE = {"hidden_size": 32, "intermediate_size": 64}
COARSE, FINE = parse_params("2 g32"), parse_params("5/4@0.5/0.5 g32")
Choice = dict[str, QuantParams]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Rows and factors of a model with biases."""
    folder = tmp_path_factory.mktemp("trials")
    return run_all(pipeline_in(configuration("qwen2", folder, **SHAPE), folder / "work"))


@pytest.fixture(scope="module")
def config(pipeline: Pipeline) -> ConversionConfig:
    return pipeline.config


@pytest.fixture(scope="module")
def rows(pipeline: Pipeline) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that Hessians are taken from, and rows that judge."""
    ids = load_rows(pipeline.path("tokenize"), "quantize")
    generator = torch.Generator().manual_seed(0)
    return ids[:2], torch.randint(0, 299, (2, 48), generator=generator)


@pytest.fixture(scope="module")
def choices(config: ConversionConfig) -> dict[str, Choice]:
    """Allocations that share some matrices, with heads of their own."""
    spec = resolve(config.source)
    keys = [p.key for s in spec.sublayers for p in s.projections]
    mixture = {key: COARSE if place % 3 else FINE for place, key in enumerate(keys)}
    return {
        "coarse": dict.fromkeys(keys, COARSE) | {spec.head.key: HEAD_PARAMS[4]},
        "mixture": mixture | {spec.head.key: HEAD_PARAMS[8]},
    }


def trials(pipeline: Pipeline, rows: torch.Tensor, **options: object) -> Trials:
    model = SourceModel.open(pipeline.config, "cpu")
    rounding = pipeline.config.rounding.model_copy(update=options)
    return Trials(model, pipeline.path("sensitivity"), rounding, rows)


@pytest.fixture(scope="module")
def verdict(
    pipeline: Pipeline, rows: tuple[torch.Tensor, torch.Tensor], choices: dict[str, Choice]
) -> Verdict:
    with torch.inference_mode():
        return trials(pipeline, rows[0]).judge(choices, rows[1])


class Reading:
    """A linear map that keeps the sum of XᵀX of what it reads."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.weight, self.bias = linear.weight, linear.bias
        self.sum = torch.zeros(linear.weight.shape[1], linear.weight.shape[1]).double()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2).double()
        self.sum += flat.T @ flat
        return self.linear(x)


@torch.inference_mode()
def hessians(config: ConversionConfig, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return projection key → Hessian of what it reads in the source."""
    decoder = whole_decoder(config)
    taps = {}
    for sublayer in decoder.sublayers:
        for p in sublayer.spec.projections:
            taps[p.key] = sublayer.linears[p.name] = Reading(sublayer.linears[p.name])  # type: ignore[assignment]  # a spy
    taps[decoder.spec.head.key] = decoder.head.linear = Reading(decoder.head.linear)  # type: ignore[assignment]  # a spy
    decoder.forward(rows)
    return {key: (tap.sum / len(rows)).float() for key, tap in taps.items()}


class Rounder:
    """Rounds one matrix at a time, as the options say."""

    def __init__(self, pipeline: Pipeline, rows: torch.Tensor, options: RoundingOptions) -> None:
        self.folder = pipeline.path("sensitivity")
        self.hessians = hessians(pipeline.config, rows)
        self.options = options

    def __call__(
        self, p: ProjectionSpec, linear: Linear, params: QuantParams, index: int | str
    ) -> Linear:
        factors = read_factors(self.folder, index)[p.name]  # type: ignore[arg-type]  # "head"
        blend = mixed(self.hessians[p.key], factors.input, self.options.fisher_share)
        item = factor(blend, damping=self.options.damping, name=p.key)
        job = RoundingJob(weight=padded_weight(linear), params=params)
        (rounded,) = round_matrices([job], item, search=self.options.scale_search)
        weight = rounded.dequantize().float()[:, : p.out_features].T
        return DenseLinear(weight, linear.bias)


def quantized(
    config: ConversionConfig, rounder: Rounder, choice: Choice, *, left: str = ""
) -> Decoder:
    """Return the whole model with rounded matrices, but for those of the sublayer `left`."""
    decoder = whole_decoder(config)
    for sublayer in decoder.sublayers:
        for p in sublayer.spec.projections:
            if sublayer.spec.name != left:
                made = rounder(p, sublayer.linears[p.name], choice[p.key], sublayer.spec.index)
                sublayer.linears[p.name] = made
    head = decoder.spec.head
    decoder.head.linear = rounder(head, decoder.head.linear, choice[head.key], "head")
    return decoder


@torch.inference_mode()
def naive(config: ConversionConfig, model: Decoder, rows: torch.Tensor) -> float:
    """Return the KL divergence from the source in nats, the mean over all positions."""
    p, q = (
        torch.log_softmax(decoder.forward(rows).double(), dim=-1)
        for decoder in (whole_decoder(config), model)
    )
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_divergences_are_those_of_the_whole_models(
    pipeline: Pipeline,
    rows: tuple[torch.Tensor, torch.Tensor],
    choices: dict[str, Choice],
    verdict: Verdict,
) -> None:
    rounder = Rounder(pipeline, rows[0], pipeline.config.rounding)
    config = pipeline.config

    expected = {
        name: naive(config, quantized(config, rounder, choice), rows[1])
        for name, choice in choices.items()
    }

    assert list(verdict.divergences) == list(choices)
    # sums in fp32, in which single codes may fall to the other side
    assert verdict.divergences == pytest.approx(expected, rel=1e-3)
    assert expected["coarse"] > 1.1 * expected["mixture"]


def test_each_sublayer_of_the_first_allocation_is_left_out_once(
    pipeline: Pipeline,
    rows: tuple[torch.Tensor, torch.Tensor],
    choices: dict[str, Choice],
    verdict: Verdict,
) -> None:
    rounder = Rounder(pipeline, rows[0], pipeline.config.rounding)
    config = pipeline.config
    names = [sublayer.name for sublayer in resolve(config.source).sublayers]

    expected = {
        name: naive(config, quantized(config, rounder, choices["coarse"], left=name), rows[1])
        for name in names
    }

    assert list(verdict.without) == names
    assert verdict.without == pytest.approx(expected, rel=1e-3)
    values = sorted([*expected.values(), verdict.divergences["coarse"]])
    assert all(b > 1.002 * a for a, b in pairwise(values))  # tell them apart


def test_options_of_rounding_are_heeded(
    pipeline: Pipeline,
    rows: tuple[torch.Tensor, torch.Tensor],
    choices: dict[str, Choice],
    verdict: Verdict,
) -> None:
    options = {"scale_search": "grid", "damping": 0.5, "fisher_share": 0.0}
    config = pipeline.config
    rounder = Rounder(pipeline, rows[0], config.rounding.model_copy(update=options))

    with torch.inference_mode():
        found = trials(pipeline, rows[0], **options).judge(choices, rows[1])

    expected = naive(config, quantized(config, rounder, choices["mixture"]), rows[1])
    assert found.divergences["mixture"] == pytest.approx(expected, rel=1e-3)
    assert found.divergences["mixture"] != pytest.approx(verdict.divergences["mixture"], rel=1e-2)


@torch.inference_mode()
def test_divergence_of_an_allocation_does_not_depend_on_others_tried_with_it(
    pipeline: Pipeline,
    rows: tuple[torch.Tensor, torch.Tensor],
    choices: dict[str, Choice],
    verdict: Verdict,
) -> None:
    made = trials(pipeline, rows[0])

    alone = made.judge({"coarse": choices["coarse"]}, rows[1])
    turned = made.judge({name: choices[name] for name in reversed(choices)}, rows[1])

    # sums in fp32, over more columns or fewer
    assert alone.divergences["coarse"] == pytest.approx(verdict.divergences["coarse"], rel=1e-3)
    assert alone.without == pytest.approx(verdict.without, rel=1e-3)
    assert turned.divergences == pytest.approx(verdict.divergences, rel=1e-3)
    assert turned.without != pytest.approx(verdict.without, rel=1e-2)  # of the other allocation


@torch.inference_mode()
def test_eight_bits_everywhere_cost_next_to_nothing(
    pipeline: Pipeline, rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    spec = resolve(pipeline.config.source)
    keys = [p.key for s in spec.sublayers for p in s.projections]
    finest = dict.fromkeys([*keys, spec.head.key], parse_params("8 g32"))

    verdict = trials(pipeline, rows[0]).judge({"finest": finest}, rows[1])

    assert 0 <= verdict.divergences["finest"] < 1e-3
