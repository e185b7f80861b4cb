"""Reports on a model with experts, as `quantize` writes them, and the record made of them."""

import random
from typing import Any

from exl2flow.core.reports import SublayerReport
from exl2flow.quant.quantize.routing import experts_summary

ROLES = ("gate_proj", "up_proj", "down_proj")
NUMEL = 2048 * 768  # of each matrix
SCORE: dict[str, Any] = {
    "perplexity": 10.0,
    "reference_perplexity": 9.0,
    "kl_divergence": 0.5,
    "kl_median": 0.5,
    "kl_p99": 0.5,
    "top1_agreement": 0.5,
    "tokens": 100,
    "bytes": 1000,
    "text": "a",
}


def group_report(layer: int, experts: range, tokens: list[int], seed: int = 0) -> SublayerReport:
    """Return the report on some experts of a layer; below 100 tokens they were topped up."""
    source = random.Random(f"{seed}.{layer}.{experts}")
    block = f"model.layers.{layer}.mlp.experts"
    projections = {
        f"experts.{expert}.{role}": item(source, f"{block}.{expert}.{role}")
        for expert in experts
        for role in ROLES
    }
    bits = sum(entry["bits"] for entry in projections.values())
    counts = dict(zip(experts, tokens, strict=True))
    content = {
        "name": f"{block}.{experts[0]}-{experts[-1]}",
        "bits": bits,
        "bpw": bits / (NUMEL * len(projections)),
        "rel_err": 0.03,
        "projections": projections,
        "experts": {
            "tokens": {str(expert): count for expert, count in counts.items()},
            "topped_up": [expert for expert, count in counts.items() if count < 100],
            "least_tokens": 100,
            "changed_routes": 0.02,
        },
    }
    return SublayerReport.from_json(content)


def item(source: random.Random, key: str | None = None) -> dict[str, Any]:
    """Return the report on a matrix of a random bitrate."""
    bits = round(source.uniform(3, 5) * NUMEL)
    return {
        **({} if key is None else {"key": key}),
        "params": "0.25:5b_32g/0.75:4b_32g s4",
        "rel_err": source.uniform(0.03, 0.2),
        "nats": source.lognormvariate(-14, 1.5),
        "bits": bits,
        "bpw": bits / NUMEL,
        "sha256": f"{source.getrandbits(256):064x}",
    }


def plain_report(name: str, *projections: str) -> SublayerReport:
    """Return the report on attention, or on the head."""
    source = random.Random(name)
    items = {projection: item(source) for projection in projections}
    bits = sum(entry["bits"] for entry in items.values())
    content = {
        "name": name,
        "bits": bits,
        "bpw": bits / (NUMEL * len(items)),
        "rel_err": 0.02,
        "projections": items,
    }
    return SublayerReport.from_json(content)


def model_reports(layers: int, experts: int, group: int) -> list[SublayerReport]:
    """Return the reports on a whole model, whose experts are in groups of `group`."""
    reports = []
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn"
        reports.append(plain_report(name, "q_proj", "k_proj", "v_proj", "o_proj"))
        for begin in range(0, experts, group):
            members = range(begin, min(begin + group, experts))
            tokens = [200 + 10 * expert + layer for expert in members]
            reports.append(group_report(layer, members, tokens))
    return [*reports, plain_report("lm_head", "lm_head")]


def report_of(layers: list[SublayerReport]) -> dict[str, Any]:
    """Return the content of `report.json` with these layers."""
    return {
        "model": "/models/moe-exl2",
        "source": "/models/moe",
        "bpw": 4.0,
        "source_bytes": 10**7,
        "score": {**SCORE},
        "calibration": None,
        "predicted_kl": 0.02,
        "experts": experts_summary(layers).to_json(),
        "layers": [layer.to_json() for layer in layers],
        **dict.fromkeys(("warnings", "failures", "sample"), ()),
    }
