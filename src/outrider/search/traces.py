"""What a proposer's drafts along a recorded text were worth, and what that says of drafts that were not tried.

A chance is that of a draft to survive, given that those before it did: 1 or 0 where nothing is left to chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

from outrider.proposers.base import Proposer
from outrider.sampling import Sampler
from outrider.search.traffic import Text
from outrider.types import Context, Request, Verdict


@dataclass(frozen=True)
class Drafted:
    """The drafts of one round."""

    depth: int  # of the longest path
    chances: tuple[float, ...]  # along the recorded text, up to the first draft that it does not say


@dataclass
class Trace:
    """The rounds tried along one text, by place: tokens of output before them."""

    num_prompt_tokens: int
    num_tokens: int
    temperature: float = 0.0
    rounds: dict[int, Drafted] = field(default_factory=dict)

    @classmethod
    def of(cls, text: Text) -> Trace:
        """Of a text along which nothing was tried yet."""
        return cls(len(text.prompt), len(text.output), text.params.temperature)

    def add(self, place: int, drafted: Drafted) -> None:
        self.rounds[place] = drafted

    @cached_property
    def by_position(self) -> dict[int, float]:
        """Token of the output -> mean chance of the drafts that stood there."""
        found: dict[int, list[float]] = {}
        for place, drafted in self.rounds.items():
            for i, chance in enumerate(drafted.chances):
                found.setdefault(place + i, []).append(chance)
        return {position: fmean(chances) for position, chances in found.items()}


@dataclass
class Replay:
    """A proposer's traces of all texts, at each number of drafts that was asked for while it was led."""

    traces: dict[int, list[Trace]]

    def drafts(self, index: int, place: int, k: int) -> Drafted:
        """What k drafts at a place of text ``index`` would be worth.

        Where no round began there, or the text left its drafts early, drafts count as they did wherever that token was drafted:
        a model's draft of it is the same from whichever round. Elsewhere, as they did on average.
        """
        asked = min((length for length in self.traces if length >= k), default=max(self.traces))
        trace = self.traces[asked][index]
        known = trace.rounds.get(place)
        depth, chances = (k, []) if known is None else (known.depth, list(known.chances[:k]))
        depth = k if depth >= asked else min(depth, k)
        while len(chances) < depth and (not chances or chances[-1] > 0):
            chances.append(trace.by_position.get(place + len(chances), self._means[asked]))
        return Drafted(depth, tuple(chances))

    def only(self, indices: Sequence[int]) -> Replay:
        """Of some of the texts."""
        return Replay({asked: [traces[index] for index in indices] for asked, traces in self.traces.items()})

    @property
    def texts(self) -> list[Trace]:
        """One trace of each text."""
        return next(iter(self.traces.values()))

    @cached_property
    def is_certain(self) -> bool:
        """Whether every chance is 1 or 0."""
        return all(
            chance in (0.0, 1.0)
            for traces in self.traces.values()
            for trace in traces
            for drafted in trace.rounds.values()
            for chance in drafted.chances
        )

    @cached_property
    def _means(self) -> dict[int, float]:
        return {
            asked: fmean([chance for trace in traces for chance in trace.by_position.values()] or [0.0])
            for asked, traces in self.traces.items()
        }

    @property
    def alpha(self) -> float:
        """Mean chance of a draft where one was reached."""
        return self._means[max(self.traces)]

    def as_json(self) -> dict[str, Any]:
        return {
            str(asked): [
                {
                    "prompt": trace.num_prompt_tokens,
                    "tokens": trace.num_tokens,
                    "temperature": trace.temperature,
                    "rounds": [
                        [place, each.depth, [round(c, 4) for c in each.chances]] for place, each in trace.rounds.items()
                    ],
                }
                for trace in traces
            ]
            for asked, traces in self.traces.items()
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Replay:
        return cls(
            {
                int(asked): [
                    Trace(
                        each["prompt"],
                        each["tokens"],
                        each["temperature"],
                        {place: Drafted(depth, tuple(chances)) for place, depth, chances in each["rounds"]},
                    )
                    for each in traces
                ]
                for asked, traces in found.items()
            }
        )


def replay_text(proposer: Proposer, text: Text, k: int, vocab_size: int) -> Trace:
    """Asks a proposer that reads nothing but the text for k drafts at every place of it: no target is run.

    What is compared is the recorded text itself, so that a chance is 1 or 0; where the text was drawn from the target's
    distribution that is right on average.
    """
    trace = Trace.of(text)
    request = Request("replayed", list(text.prompt), len(text.prompt), text.params, 0, torch.Generator())
    sampler = Sampler([request], vocab_size)
    try:
        for place, token in enumerate(text.output[:-1]):
            rest = text.output[place:-1]  # the round says one token beyond its drafts
            context = Context((request,), (k,), sampler)  # all that it has, though the text may end before
            proposal = proposer.propose(context, k)
            drafts = proposal.token_ids[0, : int(proposal.lens[0])].tolist()[:k]
            trace.add(place, Drafted(len(drafts), _matches(drafts, rest)))
            none = torch.zeros(1, 0, dtype=torch.long)
            proposer.commit(context, Verdict(none, torch.zeros(1, dtype=torch.long), torch.tensor([token])))
            request.token_ids.append(token)
    finally:
        proposer.release([request.request_id])
    return trace


def _matches(drafts: Sequence[int], rest: Sequence[int]) -> tuple[float, ...]:
    chances: list[float] = []
    for draft, token in zip(drafts, rest, strict=False):
        chances.append(float(draft == token))
        if draft != token:
            break
    return tuple(chances)
