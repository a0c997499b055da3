"""Prometheus metrics, with the names that vLLM gives its own after the colon: dashboards need another prefix only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from lmstate.engine import Completion
    from lmstate.engine.serving import ServingEngine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

# Numbers of the engine by its own words -> the field's.
RENAMED = {"waiting": "num_requests_waiting", "decoding": "num_requests_running", "preempted": "num_preemptions"}
# Those that do not count from the start.
GAUGES = frozenset(
    {
        "waiting", "reading", "decoding", "set_aside", "row_bytes", "row_bytes_peak", "prefix_bytes",
        "sessions_unstored",
        "draft_seconds_saved",
    }
)  # fmt: skip


class Metrics:
    """Counters and histograms of a server. Thread-safe."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.registry.register(EngineCollector(engine, model_name))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"lmstate:{name}", text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"lmstate:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self._success = counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._failures = counter("request_failure", "Requests that failed.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.").labels(model_name)
        self._generated = counter("generation_tokens", "Tokens generated.").labels(model_name)
        self._queries = counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix store.").labels(
            model_name
        )
        self._hits = counter("prefix_cache_hits", "Tokens of prompts that were reused.").labels(model_name)
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.").labels(model_name)
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.").labels(model_name)
        self._http = counter("http_requests", "Requests by path and status.", "path", "status")
        self._first = histogram("time_to_first_token_seconds", "From submission to the first token.", SECONDS)
        self._between = histogram("inter_token_latency_seconds", "Mean time between an answer's tokens.", STEP_SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From submission to the end.", SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Waiting for a row.", SECONDS)
        self._inference = histogram("request_inference_time_seconds", "With a row: reading and generating.", SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Reading the prompt.", SECONDS)
        self._decode = histogram("request_decode_time_seconds", "Generating.", SECONDS)
        self._prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answers = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)

    def observe(self, completion: Completion) -> None:
        """Count a request that ended."""
        usage = completion.usage
        for reason in completion.finished:
            self._success.labels(self._model, reason).inc()
        self._prompt.inc(usage.prompt)
        self._generated.inc(usage.generated)
        self._queries.inc(usage.prompt)
        self._hits.inc(usage.reused)
        self._drafted.inc(usage.drafted)
        self._accepted.inc(usage.accepted)
        self._first.observe(usage.queued + usage.prefill)
        self._queue.observe(usage.queued)
        self._inference.observe(usage.prefill + usage.decode)
        self._prefill.observe(usage.prefill)
        self._decode.observe(usage.decode)
        self._whole.observe(usage.queued + usage.prefill + usage.decode)
        longest = max(map(len, completion.tokens), default=0)
        if longest > 1:
            self._between.observe(usage.decode / (longest - 1))
        self._prompts.observe(usage.prompt)
        self._answers.observe(usage.generated)

    def failed(self) -> None:
        self._failures.labels(self._model).inc()

    def http(self, path: str, status: int) -> None:
        """Count an HTTP request. `path` is the route's, so that paths from outside make no series."""
        self._http.labels(self._model, path, str(status)).inc()


def together(several: Iterable[Metrics]) -> bytes:
    """The metrics of all models in Prometheus's text format, in which each name comes once."""
    registry = CollectorRegistry()
    registry.register(_AllModels(tuple(several)))
    return generate_latest(registry)


class _AllModels(Collector):
    def __init__(self, several: Sequence[Metrics]) -> None:
        self._several = several

    def describe(self) -> Iterable[Metric]:
        return ()  # else it is collected when it is registered, to know its names

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for each in self._several:
            for metric in each.registry.collect():
                if (known := found.setdefault(metric.name, metric)) is not metric:
                    known.samples += metric.samples
        return found.values()


class EngineCollector(Collector):
    """The engine's own numbers, read when asked for."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        for key, value in sorted(self._engine.stats().items()):
            family = GaugeMetricFamily if key in GAUGES else CounterMetricFamily
            name = RENAMED.get(key, "engine_" + re.sub(r"\W", "_", key))
            metric = family(f"lmstate:{name}", f"The engine's {key}.", labels=["model_name"])
            metric.add_metric([self._model], float(value))
            yield metric
        load = self._engine.load()
        for key in ("unread", "free_tokens", "first_token"):
            gauge = GaugeMetricFamily(f"lmstate:load_{key}", f"The engine's load: {key}.", labels=["model_name"])
            gauge.add_metric([self._model], float("nan") if (value := getattr(load, key)) is None else float(value))
            yield gauge
        digests = GaugeMetricFamily(
            "lmstate:resident_prefixes", "Digests of prefixes in memory.", labels=["model_name"]
        )
        digests.add_metric([self._model], len(self._engine.resident()))
        yield digests
        report = self._engine.draft_report()
        drafts = CounterMetricFamily("lmstate:spec_decode_num_drafts", "Drafts verified.", labels=["model_name"])
        drafts.add_metric([self._model], report.drafts)
        places = CounterMetricFamily(
            "lmstate:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their place in a draft.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(report.held):
            places.add_metric([self._model, str(position)], count)
        yield from (drafts, places)
