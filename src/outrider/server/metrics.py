"""Prometheus metrics, under vLLM's names where vLLM has them, so that most of its dashboards work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from outrider.server.bridge import EngineBridge

Kind = type[CounterMetricFamily | GaugeMetricFamily]
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(19))
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Metrics of calls, and of the engine's counts when the page is requested."""

    def __init__(self, bridge: EngineBridge, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCounts(bridge, model))
        labels, here = ["model_name"], {"model_name": model}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry).labels(**here)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self.between_tokens = histogram("vllm:inter_token_latency_seconds", "Seconds per later token.", TOKEN_SECONDS)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", SECONDS)
        self._prompt_lens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a prompt.", TOKENS)
        self._output_lens = histogram("vllm:request_generation_tokens", "Generated tokens of a sequence.", TOKENS)
        self._prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens.", labels, registry=self.registry).labels(**here)
        self._ended = Counter(
            "vllm:request_success", "Sequences that ended.", [*labels, "finished_reason"], registry=self.registry
        )
        self._refused = Counter(
            "outrider:requests_refused", "Calls refused while busy or stopping.", [*labels, "status"], registry=self.registry
        )
        self._here = here
        for status in (429, 503):
            self._refused.labels(**here, status=str(status))  # start at 0: alarms see no increase in a series that is new

    def accepted(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            self._prompt_tokens.inc(len(prompt))
            self._prompt_lens.observe(len(prompt))

    def ended(self, reason: str, num_tokens: int) -> None:
        self._output_lens.observe(num_tokens)
        self._ended.labels(**self._here, finished_reason=reason).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(**self._here, status=str(status)).inc()

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _EngineCounts:
    """Collector of the engine's totals, which the engine thread updates."""

    def __init__(self, bridge: EngineBridge, model: str) -> None:
        self._bridge, self._model = bridge, model

    def collect(self) -> Iterator[Metric]:
        """Yield metrics with vLLM's names, then Outrider's own."""
        engine = self._bridge.llm.engine
        stats, scheduler = engine.stats, engine.scheduler
        histogram, cache = dict(stats.acceptance_histogram), engine.runner.cache
        yield self._metric("vllm:num_requests_running", "Sequences in the batch.", len(scheduler.running), GaugeMetricFamily)
        yield self._metric("vllm:num_requests_waiting", "Waiting sequences.", len(scheduler.waiting), GaugeMetricFamily)
        yield self._metric("vllm:prefix_cache_queries", "Prompt tokens looked up.", cache.num_looked_up)
        yield self._metric("vllm:prefix_cache_hits", "Prompt tokens found.", cache.num_reused)
        yield self._metric("vllm:generation_tokens", "Generated tokens.", stats.num_tokens)
        yield self._metric("vllm:spec_decode_num_drafts", "Rounds with drafts.", stats.num_drafted_rounds)
        yield self._metric("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.num_drafts)
        yield self._metric("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.", stats.num_accepted)
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position.", labels=["model_name", "position"]
        )
        for position in range(max([1, *histogram])):
            count = sum(rounds for accepted, rounds in histogram.items() if accepted > position)
            by_position.add_metric([self._model, str(position)], count)
        yield by_position
        yield self._metric("outrider:grammar_tokens", "Accepted drafts of a grammar.", stats.num_grammar_tokens)
        yield self._metric(
            "outrider:proposer_faults",
            "Rounds in which the proposer, or the target on drafts, failed for a sequence.",
            stats.faults,
        )
        yield self._metric("outrider:failed_rounds", "Rounds that failed as a whole.", self._bridge.num_failures)
        phases = CounterMetricFamily("outrider:phase_seconds", "Seconds of rounds.", labels=["model_name", "phase"])
        for phase, seconds in stats.times.by_phase().items():
            phases.add_metric([self._model, phase], seconds)
        yield phases

    def _metric(self, name: str, text: str, value: float, kind: Kind = CounterMetricFamily) -> Metric:
        family = kind(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
