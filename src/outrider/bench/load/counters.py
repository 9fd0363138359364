"""Read draft counters from a server's ``/metrics`` page, under vLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.rounds - before.rounds,
            self.drafts - before.drafts,
            self.accepted - before.accepted,
            {position: count - before.by_position.get(position, 0.0) for position, count in self.by_position.items()},
            {phase: seconds - before.phases.get(phase, 0.0) for phase, seconds in self.phases.items()},
        )

    def __add__(self, other: Counters) -> Counters:
        positions, phases = {*self.by_position, *other.by_position}, {*self.phases, *other.phases}
        return Counters(
            self.rounds + other.rounds,
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            {each: self.by_position.get(each, 0.0) + other.by_position.get(each, 0.0) for each in sorted(positions)},
            {each: self.phases.get(each, 0.0) + other.phases.get(each, 0.0) for each in sorted(phases)},
        )


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
