"""Metrics with vLLM's stems, the status of a server, and a line of the log per request."""

import logging
import time
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from exl2flow.engine.chat import all_tool_formats
from exl2flow.engine.drafts import DraftKind
from exl2flow.engine.generate.event import Reason
from exl2flow.serve.answers.answer import BROKEN, RunningAnswer
from exl2flow.serve.answers.fields import HARMLESS
from exl2flow.serve.hosts.model_host import CacheUse
from exl2flow.serve.hosts.models import Models

log = logging.getLogger("exl2flow.serve")
PREFIX, LABEL, OTHER = "exl2flow_", "model_name", "other"
TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
LINE = (
    "%(request)s key=%(key)s %(path)s model=%(model)s prompt=%(prompt)d cached=%(cached)d "
    "new=%(new)d waited=%(waited).3f first=%(first).3f total=%(total).3f %(status)d"
)

TIERS = ("gpu", "ram", "disk")  # where parts of prompts are found
# values of labels that are known before they are counted
KNOWN = {
    "tier": TIERS,
    "draft": tuple(DraftKind),
    "finished_reason": get_args(Reason),
    "format": tuple(all_tool_formats()),
    "parsed": ("True", "False"),
    "field": (*sorted(HARMLESS), OTHER),
}
REFUSED = "%(request)s key=%(key)s %(path)s refused %(status)d"


class Metrics:
    """The figures of one server; all of it begins with 0, so that rates see the first event.

    paths: of the server's endpoints.
    """

    def __init__(self, models: Models) -> None:
        self._models, self.registry = models, CollectorRegistry()
        self.paths, self._begun = list[str](), set[str]()
        into = self.registry
        self._gauges = {n: Gauge(PREFIX + n, n, [LABEL], registry=into) for n in self._now()}
        self._counters = {
            name: Counter(PREFIX + name, name, [LABEL, *more], registry=into)
            for name, more in TABLE["counters"].items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, name, [LABEL], buckets=buckets, registry=into)
            for name, buckets in TABLE["histograms"].items()
        }

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter, or to a histogram."""
        self._begin()
        if name in self._counters:
            self._counters[name].labels(**self._label, **labels).inc(value)
        else:
            self._histograms[name].labels(**self._label).observe(value)

    def text(self) -> bytes:
        """Return all metrics, as Prometheus reads them."""
        self._begin()
        for name, value in self._now().items():
            self._gauges[name].clear()  # of another model
            self._gauges[name].labels(**self._label).set(value)
        return bytes(generate_latest(self.registry))

    def status(self) -> dict[str, Any]:
        """Return what runs, for people."""
        host, gauges = self._models.host, self._now()
        row = {
            "model": self._models.name,
            "state": self._models.state,
            "running": gauges["num_requests_running"],
            "waiting": gauges["num_requests_waiting"],
            "slots": self._models.options.slots,
            "kv_cache_usage": round(gauges["kv_cache_usage_perc"], 4),
            "preemptions": gauges["num_preemptions_total"],
        }
        if host is not None:
            use = host.cache_use
            row |= {
                "cache_pages": host.pages,
                "cache": {
                    "free_pages": use.free_pages,
                    "hits": {tier: self._hits(tier) for tier in TIERS},
                    **{f"{tier}_bytes": n for tier, n in use.tier_bytes.items()},
                },
                "max_model_len": host.room,
                "tool_format": host.tool_format.name,
                "warnings": host.warnings,
            }
        return row

    def refused(self, state: dict[str, Any], path: str, status: int) -> None:
        """Write the line of a request that gets an error."""
        shown = f"{path!r:.80}"
        line = {"request": state["request_id"], "key": state["key"].name, "path": shown}
        log.info(REFUSED, line | {"status": status})

    def ended(self, answer: RunningAnswer, state: dict[str, Any], path: str, status: int) -> None:
        """Count an answer that has ended, and write its line."""
        counts = [e.statistics for e in answer.ends.values() if e.statistics is not None]
        for one in counts:
            self.add("request_queue_time_seconds", one.waiting_seconds + answer.waited)
            for source, names in TABLE["statistics"].items():
                for name in names:
                    self.add(name, getattr(one, source))
            for tier in TIERS:
                self.add("prefix_cache_hits", one.hits[tier], tier=tier)
            for kind, (drafted, accepted) in one.drafts.items():
                self.add("spec_decode_num_draft_tokens", drafted, draft=kind)
                self.add("spec_decode_num_accepted_tokens", accepted, draft=kind)
            between = one.text_seconds / max(one.new_tokens - 1, 1)
            self.add("inter_token_latency_seconds", between)
        for end in answer.ends.values():
            self.add("request_success", finished_reason=str(end.reason))
        for choice in answer.choices:
            if (fmt := answer.plan.tool_format) and (choice.calls or choice.is_broken):
                self.add("tool_calls", format=fmt.name, parsed=str(not choice.is_broken))
            if choice.is_broken:
                log.warning("%s: %s", state["request_id"], BROKEN)
        total, usage = time.monotonic() - answer.began, answer.usage()
        first = total if answer.first is None else answer.first - answer.began
        self.add("time_to_first_token_seconds", first)
        self.add("e2e_request_latency_seconds", total)
        line = {
            "request": state["request_id"],
            "key": state["key"].name,
            "path": path,
            "model": self._models.name,
            "prompt": usage["prompt_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
            "new": usage["completion_tokens"],
            "waited": max((one.waiting_seconds for one in counts), default=0.0) + answer.waited,
            "first": first,
            "total": total,
            "status": status,
        }
        log.info(LINE, line)

    def _begin(self) -> None:
        """Let the series of a model that was not loaded before begin with 0."""
        if self._models.name in self._begun:
            return
        self._begun.add(self._models.name)
        for name, metric in (self._counters | self._histograms).items():
            labels = TABLE["counters"].get(name, [])
            for values in product(*(self._known(name, label) for label in labels)):
                metric.labels(**self._label, **dict(zip(labels, values, strict=True)))

    def _known(self, name: str, label: str) -> Sequence[str]:
        """Return the values that a label of a counter is known to have."""
        if label == "code":
            return tuple(TABLE["codes"][name])
        return [*self.paths, OTHER] if label == "path" else KNOWN[label]

    def _hits(self, tier: str) -> int:
        name, labels = f"{PREFIX}prefix_cache_hits_total", {**self._label, "tier": tier}
        return int(self.registry.get_sample_value(name, labels) or 0)

    @property
    def _label(self) -> dict[str, str]:
        return {LABEL: self._models.name}

    def _now(self) -> dict[str, float]:
        """Return what is the case, by the names of gauges."""
        count, host = self._models.count, self._models.host
        running = min(count, self._models.options.slots)
        use = CacheUse() if host is None else host.cache_use
        used = 0.0 if host is None else 1.0 - use.free_pages / host.pages
        return {
            "num_requests_running": running,
            "num_requests_waiting": count - running,
            "kv_cache_usage_perc": used,
            "num_preemptions_total": use.preemptions,
            "model_load_seconds": self._models.load_seconds,
        }
