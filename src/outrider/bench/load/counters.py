"""Read draft counters from a server's ``/metrics`` page, under vLLM's names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

NAMES = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
BY_POSITION, BY_PHASE = "vllm:spec_decode_num_accepted_tokens_per_pos", "outrider:phase_seconds"


@dataclass(frozen=True)
class Counters:
    """Totals since the server's start, or the difference of two readings."""

    rounds: float = 0.0  # rounds with drafts
    drafts: float = 0.0
    accepted: float = 0.0
    by_position: dict[int, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    def __add__(self, other: Counters, sign: int = 1) -> Counters:
        def added(own: dict[Any, float], others: dict[Any, float]) -> dict[Any, float]:
            return {key: own.get(key, 0.0) + sign * others.get(key, 0.0) for key in sorted({*own, *others})}

        return Counters(
            self.rounds + sign * other.rounds,
            self.drafts + sign * other.drafts,
            self.accepted + sign * other.accepted,
            added(self.by_position, other.by_position),
            added(self.phases, other.phases),
        )

    def __sub__(self, before: Counters) -> Counters:
        return self.__add__(before, -1)


def parse(page: str) -> Counters:
    """Parse Prometheus's text format and add the counters of all engines on the page. Raises ``ValueError`` for other text."""
    totals = dict.fromkeys(NAMES.values(), 0.0)
    by_position: defaultdict[int, float] = defaultdict(float)
    phases: defaultdict[str, float] = defaultdict(float)
    for sample in (sample for metric in text_string_to_metric_families(page) for sample in metric.samples):
        name = sample.name.removesuffix("_total")
        if name in NAMES:
            totals[NAMES[name]] += sample.value
        elif name == BY_POSITION:
            by_position[int(sample.labels["position"])] += sample.value
        elif name == BY_PHASE:
            phases[sample.labels["phase"]] += sample.value
    return Counters(**totals, by_position=by_position, phases=phases)


async def read(http: httpx.AsyncClient) -> Counters | None:
    """Return the server's counters, or None if it has no ``/metrics`` page or no draft counters."""
    try:
        answer = await http.get("/metrics")
        return parse(answer.text) if answer.status_code == 200 and "spec_decode" in answer.text else None
    except (httpx.HTTPError, ValueError):
        return None
