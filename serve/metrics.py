"""Metrics with vLLM's stems, the status of a server, and a line of the log per request."""

import logging
import time
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from exl2flow.inference.generate import Statistics
from exl2flow.serve.answers import RunningAnswer
from exl2flow.serve.engine import Engine

log = logging.getLogger("exl2flow.serve")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = (1, 10, 100, 1_000, 10_000, 100_000)
PREFIX = "exl2flow_"
METRICS_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """What one server counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.registry = engine, CollectorRegistry()
        self._label = {"model_name": engine.name}
        gauges = {
            "num_requests_running": self._running,
            "num_requests_waiting": lambda: engine.count - self._running(),
            "kv_cache_usage_perc": self._usage,
        }
        for name, value in gauges.items():
            gauge = Gauge(PREFIX + name, name, ["model_name"], registry=self.registry)
            gauge.labels(**self._label).set_function(value)
        self._counters = {
            name: Counter(PREFIX + name, name, ["model_name", *more], registry=self.registry)
            for name, more in (
                ("prompt_tokens", ()),
                ("generation_tokens", ()),
                ("prefix_cache_queries", ()),
                ("prefix_cache_hits", ()),
                ("spec_decode_num_draft_tokens", ()),
                ("spec_decode_num_accepted_tokens", ()),
                ("request_success", ("finished_reason",)),
                ("request_errors", ("code",)),
                ("client_disconnects", ()),
                ("tool_calls", ("format", "parsed")),
                ("http_requests", ("path", "code")),
            )
        }
        self._histograms = {
            name: Histogram(
                PREFIX + name, name, ["model_name"], buckets=buckets, registry=self.registry
            )
            for name, buckets in (
                ("time_to_first_token_seconds", SECONDS),
                ("e2e_request_latency_seconds", SECONDS),
                ("request_queue_time_seconds", SECONDS),
                ("inter_token_latency_seconds", SECONDS),
                ("request_prompt_tokens", TOKENS),
                ("request_generation_tokens", TOKENS),
            )
        }

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self._counters[name].labels(**self._label, **labels).inc(value)

    def text(self) -> bytes:
        """Return all metrics, as Prometheus reads them."""
        return bytes(generate_latest(self.registry))

    def status(self) -> dict[str, Any]:
        """Return what runs, for people."""
        engine = self._engine
        return {
            "model": engine.name,
            "state": engine.state,
            "running": self._running(),
            "waiting": engine.count - self._running(),
            "slots": engine.options.slots,
            "kv_cache_usage": round(self._usage(), 4),
            "cache_pages": engine.pages,
            "max_model_len": engine.room,
            "tool_format": engine.tool_format.name,
            "warnings": engine.warnings,
        }

    def ended(self, answer: RunningAnswer, state: dict[str, Any], path: str, code: str) -> None:
        """Count an answer that has ended, and write its line."""
        counts = [e.statistics for e in answer.ends.values() if e.statistics is not None]
        for one in counts:
            self._count(one)
        for end in answer.ends.values():
            self.add("request_success", finished_reason=str(end.reason))
        if (fmt := answer.plan.tool_format) is not None:
            for choice in answer.choices:
                if choice.calls or choice.is_broken:
                    self.add("tool_calls", format=fmt.name, parsed=str(not choice.is_broken))
                if choice.is_broken:
                    log.warning("%s: a call of a function is broken", state["request_id"])
        total, usage = time.monotonic() - answer.began, answer.usage()
        first = total if answer.first is None else answer.first - answer.began
        self._histograms["time_to_first_token_seconds"].labels(**self._label).observe(first)
        self._histograms["e2e_request_latency_seconds"].labels(**self._label).observe(total)
        log.info(
            "%s key=%s %s model=%s prompt=%d cached=%d new=%d waited=%.3f first=%.3f total=%.3f %s",
            state["request_id"],
            state["key"],
            path,
            self._engine.name,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            max((one.waiting_seconds for one in counts), default=0.0),
            first,
            total,
            code,
        )

    def _count(self, one: Statistics) -> None:
        for name, value in (
            ("prompt_tokens", one.prompt_tokens),
            ("generation_tokens", one.new_tokens),
            ("prefix_cache_queries", one.prompt_tokens),
            ("prefix_cache_hits", one.cached_tokens),
            ("spec_decode_num_draft_tokens", one.drafted_tokens),
            ("spec_decode_num_accepted_tokens", one.accepted_tokens),
        ):
            self.add(name, value)
        for name, measured in (
            ("request_queue_time_seconds", one.waiting_seconds),
            ("request_prompt_tokens", one.prompt_tokens),
            ("request_generation_tokens", one.new_tokens),
            ("inter_token_latency_seconds", one.text_seconds / max(one.new_tokens - 1, 1)),
        ):
            self._histograms[name].labels(**self._label).observe(measured)

    def _running(self) -> int:
        return min(self._engine.count, self._engine.options.slots)

    def _usage(self) -> float:
        return 1.0 - self._engine.free_pages / self._engine.pages
