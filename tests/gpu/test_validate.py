"""Validation on a GPU: with the inference kernels, within fp16 accuracy of the CPU's scores."""

import pytest
import torch
from stage_runs import run_until
from tiny import VOCAB_SIZE

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.files import read_json
from exl2flow.engine.loading.streamed import StreamedModel
from exl2flow.inference.scoring.evaluate import evaluate, evaluate_texts
from exl2flow.inference.validate.stage import REPORT_FILE
from exl2flow.model import TensorFiles, resolve
from exl2flow.model.layers.linear import PackedLinear, QuantizedLinear, made_linear, read_part

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture
def config(qwen2: ConversionConfig) -> ConversionConfig:
    return qwen2


def test_scores_are_those_of_the_cpu_but_for_fp16(config: ConversionConfig) -> None:
    ids = torch.randint(VOCAB_SIZE, (5, 100))

    (found,) = evaluate([config.out], ids, reference=config.source, device="cuda")

    (expected,) = evaluate([config.out], ids, reference=config.source)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=2e-3)
    assert found.reference_perplexity == pytest.approx(expected.reference_perplexity, rel=1e-3)
    assert found.kl_divergence == pytest.approx(expected.kl_divergence, rel=0.02)
    assert found.top1_agreement == pytest.approx(expected.top1_agreement, abs=0.02)


def test_texts_of_different_lengths_pass_together(config: ConversionConfig) -> None:
    texts = [torch.randint(VOCAB_SIZE, (3, 64)), torch.randint(VOCAB_SIZE, (2, 100))]

    [together] = evaluate_texts([config.out], texts, reference=config.source, device="cuda")

    for found, ids in zip(together, texts, strict=True):
        (expected,) = evaluate([config.out], ids, reference=config.source, device="cuda")
        assert found.kl_divergence == pytest.approx(expected.kl_divergence, rel=1e-3)


def test_the_result_is_scored_through_packed_matrices(config: ConversionConfig) -> None:
    model = StreamedModel(config.out, DEVICE)
    reference = StreamedModel(config.source, DEVICE, is_reference=True)

    (states,) = model.states([torch.zeros(1, 64, dtype=torch.int64, device=DEVICE)])
    (exact,) = reference.states([torch.zeros(1, 64, dtype=torch.int64, device=DEVICE)])

    assert (states.dtype, exact.dtype) == (torch.float16, torch.float32)
    assert isinstance(model.head.linear, PackedLinear)


def test_a_matrix_decodes_on_the_device_to_what_the_cpu_decodes(config: ConversionConfig) -> None:
    tensors = TensorFiles(config.out)
    for projection in resolve(config.out).sublayers[0].projections:
        found, expected = (
            made_linear(
                read_part(tensors, projection, device=device), dtype=torch.float32, device=device
            )
            for device in (DEVICE, torch.device("cpu"))
        )

        assert isinstance(found, QuantizedLinear)
        assert torch.equal(found.weight.cpu(), expected.weight)


def test_stage_reports_scores_and_a_sample(config: ConversionConfig) -> None:
    pipeline = run_until(config, "validate", device="cuda")

    report = read_json(pipeline.path("validate") / REPORT_FILE)
    assert report["score"]["kl_divergence"] > 0
    assert report["failures"] == []
    assert len(report["sample"]) > len(config.validate_options.sample_prompt)
