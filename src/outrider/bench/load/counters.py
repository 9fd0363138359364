"""Read draft counters from a server's ``/metrics`` page, under vLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import httpx

LINE = re.compile(r"^(vllm|outrider):(\w+?)(?:_total)?(?:\{([^}]*)\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)
NAMES = {
    "spec_decode_num_drafts": "rounds",
    "spec_decode_num_draft_tokens": "drafts",
    "spec_decode_num_accepted_tokens": "accepted",
}
BY_POSITION, BY_PHASE = "spec_decode_num_accepted_tokens_per_pos", "phase_seconds"


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
    """Parse Prometheus's text format. Counters of several engines on one page are added."""
    totals = dict.fromkeys(NAMES.values(), 0.0)
    positions: dict[int, float] = {}
    phases: dict[str, float] = {}
    for _, name, labels, value in LINE.findall(page):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if name in NAMES:
            totals[NAMES[name]] += float(value)
        elif name == BY_POSITION:
            position = int(label["position"])
            positions[position] = positions.get(position, 0.0) + float(value)
        elif name == BY_PHASE:
            phases[label["phase"]] = phases.get(label["phase"], 0.0) + float(value)
    return Counters(**totals, by_position=positions, phases=phases)


async def read(http: httpx.AsyncClient) -> Counters | None:
    """Return the server's counters, or None if it has no ``/metrics`` page or no draft counters."""
    try:
        answer = await http.get("/metrics")
    except httpx.HTTPError:
        return None
    return parse(answer.text) if answer.status_code == 200 and "spec_decode" in answer.text else None
