"""Metrics: all series are there before their first event; texts that nobody reads count."""

import asyncio
import json
from collections import defaultdict
from itertools import product
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from hosts import make_host, models_of
from prometheus_client import CollectorRegistry
from sources import ROOT

from exl2flow.engine.chat import all_tool_formats
from exl2flow.engine.generate.event import Reason
from exl2flow.inference import LoadedModel
from exl2flow.serve.answers.fields import HARMLESS
from exl2flow.serve.hosts.metrics import LABEL, TABLE, TIERS, Metrics
from exl2flow.serve.hosts.models import Models
from exl2flow.serve.http.app import create_app


@pytest.fixture
def models(model: LoadedModel) -> Models:
    return models_of(make_host(model))


def metrics_of(app: FastAPI) -> Metrics:
    """Return what an application counts."""
    [found] = [one.kwargs["metrics"] for one in app.user_middleware]
    assert isinstance(found, Metrics)
    return found


def samples(registry: CollectorRegistry, model: str) -> dict[str, dict[frozenset[Any], float]]:
    """Return the values of a model's series, by metric and other labels."""
    found = defaultdict[str, dict[frozenset[Any], float]](dict)
    for metric in registry.collect():
        found[metric.name].update(
            (
                frozenset((sample.labels | {"": sample.name}).items() - {(LABEL, model)}),
                sample.value,
            )
            for sample in metric.samples
            if sample.labels[LABEL] == model and not sample.name.endswith("_created")
        )
    return found


KNOWN: dict[str, tuple[str, ...]] = {
    "tier": TIERS,
    "draft": ("model", "mtp", "ngram"),
    "finished_reason": get_args(Reason),
    "format": tuple(all_tool_formats()),
    "parsed": ("True", "False"),
    "field": (*HARMLESS, "other"),
    "path": ("/completions", "/health", "/model/unload", "/props", "/", "other"),
}


def test_every_metric_is_there_before_its_first_event(models: Models) -> None:
    """At a start, and of a model that is loaded later."""
    metrics = metrics_of(create_app(models))

    for name in (models.name, "later"):
        models.name = name
        metrics.text()
        found = samples(metrics.registry, name)

        assert len(found) == len([*metrics.registry.collect()])
        for metric in metrics.registry.collect():
            rows = found[metric.name]
            assert rows, metric.name
            if metric.type != "gauge":
                assert not any(rows.values()), metric.name
        for counter, labels in TABLE["counters"].items():
            known = KNOWN | {"code": TABLE["codes"].get(counter, ())}
            expected = {
                frozenset([("", f"exl2flow_{counter}_total"), *zip(labels, row, strict=True)])
                for row in product(*(known[label] for label in labels))
            }
            assert expected <= found[f"exl2flow_{counter}"].keys(), counter


def test_first_events_are_counted_from_zero(models: Models) -> None:
    """Also before anything has asked for the metrics."""
    metrics = Metrics(models)
    metrics.add("client_disconnects")

    text = metrics.text().decode()

    assert f'exl2flow_client_disconnects_total{{model_name="{models.name}"}} 1.0' in text
    assert f'exl2flow_time_to_first_token_seconds_count{{model_name="{models.name}"}} 0.0' in text


def test_every_metric_is_documented(models: Models) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    metrics = Metrics(models)

    for metric in metrics.registry.collect():
        ending = "_total" if metric.type == "counter" else ""
        row = f"| `{metric.name.removeprefix('exl2flow_')}{ending}` | {metric.type} |"
        assert row in page


def test_metrics_are_made_quickly(models: Models) -> None:
    """They are written on the event loop: no more lines than some milliseconds are worth."""
    metrics = metrics_of(create_app(models))

    assert len(metrics.text().splitlines()) < 1500


def test_the_tokens_of_an_answer_that_is_left_are_counted(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """In its line of the log and in the metrics, as if somebody had read it."""
    app, host = create_app(models), models.host
    metrics = metrics_of(app)
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
    assert host is not None
    caplog.set_level("INFO", "exl2flow.serve")

    async def run() -> None:
        host.start()
        has_text = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await has_text.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                has_text.set()

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await app(scope | {"query_string": b""}, receive, send)
        await models.close()

    asyncio.run(run())

    def count(name: str, **labels: str) -> float | None:
        labels = {LABEL: models.name, **labels}
        return metrics.registry.get_sample_value(f"exl2flow_{name}", labels)

    [line] = [record.args for record in caplog.records if "status" in (record.args or ())]
    assert isinstance(line, dict)
    assert line["status"] == 499
    assert 0 < line["new"] < 200
    assert count("generation_tokens_total") == line["new"]
    assert count("prompt_tokens_total") == line["prompt"] == 3
    assert count("request_success_total", finished_reason="cancelled") == 1
    assert count("client_disconnects_total") == 1
