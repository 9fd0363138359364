"""Rounds along a text that is known already: the engine's own, except that what is said is what was recorded.

Every proposer meets there what it would meet in service: its own cache, features of the target, the same drafts. What each
draft would have been worth is read off both distributions, and what each round took is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from outrider.engine import Engine, FixedLength, Scheduler
from outrider.sampling import Sampler
from outrider.search.traces import Drafted, Trace
from outrider.search.traffic import Text
from outrider.types import OutriderError, Proposal, Randomness, Request, Verdict
from outrider.verifiers.base import Verifier, accept_prob, residual

if TYPE_CHECKING:
    from outrider.proposers.base import Proposer
    from outrider.runner import ModelRunner


class _Leader(Verifier):
    """Says what each request was told to say, and notes how likely each draft on the way was to survive."""

    lossless: ClassVar[bool] = True  # towards the text: whatever is drafted, it comes out
    handles_trees: ClassVar[bool] = True

    def __init__(self, outputs: Mapping[str, Sequence[int]], traces: Mapping[str, Trace]) -> None:
        self._outputs, self._traces = outputs, traces

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        assert isinstance(random, Sampler)
        paths, said = [], []
        for b, request in enumerate(random.requests):
            place = request.num_output_tokens
            rest = self._outputs[request.request_id][place:]
            path, drafted = self._follow(proposal, target, b, rest)
            self._traces[request.request_id].add(place, drafted)
            paths.append(path)
            said.append(rest[len(path)])
        width = max(map(len, paths))
        padded = [path + [-1] * (width - len(path)) for path in paths]
        counts = [len(path) for path in paths]
        return Verdict(torch.tensor(padded).view(len(paths), width).long(), torch.tensor(counts), torch.tensor(said))

    def _follow(self, proposal: Proposal, target: Tensor, b: int, rest: Sequence[int]) -> tuple[list[int], Drafted]:
        """Down the drafts of row b as far as they say what comes next: the path, and the chances on it."""
        tokens, num_drafts = proposal.token_ids[b].tolist(), int(proposal.lens[b])
        parents = list(range(-1, num_drafts - 1)) if proposal.parents is None else proposal.parents[b].tolist()
        depths: list[int] = []
        children: dict[int, list[int]] = {}
        for node in range(num_drafts):
            depths.append(1 + (depths[parents[node]] if parents[node] >= 0 else 0))
            children.setdefault(parents[node], []).append(node)
        path: list[int] = []
        chances: list[float] = []
        node = -1
        while node in children and len(path) < len(rest) - 1:
            tried, wanted = children[node], rest[len(path)]
            chances.append(self._chance(proposal, target, b, node, tried, wanted))
            follower = next((child for child in tried if tokens[child] == wanted), None)
            if follower is None:
                break
            path.append(follower)
            node = follower
        if path and node not in children:
            path.pop()  # the target says this one, so that the next round drafts the token behind it, which none has tried
        return path, Drafted(min(max(depths, default=0), len(rest) - 1), tuple(chances))

    def _chance(self, proposal: Proposal, target: Tensor, b: int, node: int, tried: list[int], wanted: int) -> float:
        """How likely it was that one of the drafts behind ``node`` survived."""
        raise NotImplementedError


class _ExactLeader(_Leader):
    """For rounds that leave nothing to chance: a draft survives if it is what comes next."""

    judges: ClassVar[Literal["probs", "tokens"]] = "tokens"

    def _chance(self, proposal: Proposal, target: Tensor, b: int, node: int, tried: list[int], wanted: int) -> float:
        return float(wanted in proposal.token_ids[b, tried].tolist())


class _SampledLeader(_Leader):
    """For sampled rounds: chances of rejection sampling, by the distributions where it stands."""

    judges: ClassVar[Literal["probs", "tokens"]] = "probs"

    def _chance(self, proposal: Proposal, target: Tensor, b: int, node: int, tried: list[int], wanted: int) -> float:
        left = target[b, node + 1]
        if proposal.probs is not None and len(tried) == 1:  # over all that might have been drawn: sum of min(target, draft)
            return float(torch.minimum(left, proposal.probs[b, tried[0]].to(left.device)).sum().clamp_max(1.0))
        refused = 1.0
        for child in tried:  # multi-round rejection, given what was drawn
            token = int(proposal.token_ids[b, child])
            if proposal.probs is None:
                draft = torch.zeros_like(left)
                draft[token] = 1.0
            else:
                draft = proposal.probs[b, child].to(left.device)
            refused *= 1 - float(accept_prob(left[token], draft[token]))
            left = residual(left, draft)
        return 1 - refused


def lead(
    runner: ModelRunner,
    proposer: Proposer,
    texts: Sequence[Text],
    k: int,
    batch: int,
    coupled: bool = False,
) -> list[Trace]:
    """Leads a proposer along recorded texts, k drafts a round and ``batch`` texts at a time.

    Raises ``OutriderError`` where target or proposer fails.
    """
    found = [Trace.of(text) for text in texts]
    numbered = {f"led-{index}": index for index, text in enumerate(texts) if len(text.output) > 1}
    requests = [_request(name, texts[index]) for name, index in numbered.items()]
    outputs = {name: texts[index].output for name, index in numbered.items()}
    traces = {name: found[index] for name, index in numbered.items()}
    leaders = _SampledLeader(outputs, traces), _ExactLeader(outputs, traces)
    engine = Engine(runner, proposer, leaders, FixedLength(k), Scheduler(batch, runner.max_len), coupled)
    try:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for emission in engine.step():
                if emission.finish_reason == "error":
                    raise OutriderError(emission.error or "the target failed")
            if engine.stats.faults:
                raise OutriderError(f"{proposer.name} failed while it was led along the traffic (--debug shows how)")
    finally:
        for request in requests:
            engine.abort(request.request_id)
    return found


def _request(name: str, text: Text) -> Request:
    params, seed = text.again, text.params.seed or 0
    return Request(name, list(text.prompt), len(text.prompt), params, seed, torch.Generator().manual_seed(seed))
