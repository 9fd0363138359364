"""Read draft counters from a server's ``/metrics`` page, under vLLM's names."""

from __future__ import annotations

from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROUNDS, DRAFTS = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"  # rounds with drafts; drafted tokens
ACCEPTED, BY_POSITION = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos"
BY_PHASE = "outrider:phase_seconds"
LABELS = {ROUNDS: "", DRAFTS: "", ACCEPTED: "", BY_POSITION: "position", BY_PHASE: "phase"}  # counter -> label of its parts
Counters = dict[tuple[str, str], float]  # (counter, part or "") -> total since the server's start, or in a run


def parse(page: str) -> Counters:
    """Parse Prometheus's text format and add the counters of all engines on the page. Raises ``ValueError`` for other text."""
    totals: defaultdict[tuple[str, str], float] = defaultdict(float)
    for sample in (sample for metric in text_string_to_metric_families(page) for sample in metric.samples):
        name = sample.name.removesuffix("_total")
        if name in LABELS:
            totals[name, sample.labels.get(LABELS[name], "")] += sample.value
    return dict(totals)


def between(before: Counters, after: Counters) -> Counters:
    """Return the increase from one reading to the next."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


async def read(http: httpx.AsyncClient) -> Counters | None:
    """Return the server's counters, or None if it has no ``/metrics`` page or no draft counters."""
    try:
        answer = await http.get("/metrics")
        return parse(answer.text) if answer.status_code == 200 and "spec_decode" in answer.text else None
    except (httpx.HTTPError, ValueError):
        return None
