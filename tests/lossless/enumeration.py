"""Exact laws: every draft and every random decision of the real verifier, with its weight, instead of samples."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from toy import TableLM, make_request, reference_probs

from outrider.sampling import Sampler
from outrider.types import Proposal, SamplingParams
from outrider.verifiers.base import Verifier

VOCAB = 3
PROMPT = (0, 1)
TARGET, DRAFT = TableLM(VOCAB, seed=11), TableLM(VOCAB, seed=47)
Text = tuple[int, ...]
Law = dict[Text, float]  # emitted tokens -> probability


class OneOutcome:
    """A Randomness that plays one outcome, the same for every row, and multiplies up each row's probability of it."""

    def __init__(self, coins: Sequence[bool], token: int, batch: int) -> None:
        self._coins, self._token, self._tossed = coins, token, 0
        self.weights = torch.ones(batch, dtype=torch.float64)

    def bernoulli(self, probs: Tensor) -> Tensor:
        falls = torch.tensor(self._coins[self._tossed : self._tossed + probs.shape[1]]).expand(probs.shape)
        self._tossed += probs.shape[1]
        self.weights = self.weights * torch.where(falls, probs, 1 - probs).prod(dim=-1)
        return falls

    def categorical(self, probs: Tensor) -> Tensor:
        possible = self.weights > 0
        assert ((probs.sum(dim=-1) - 1).abs() < 1e-12)[possible].all()
        self.weights = self.weights * probs[:, self._token]
        return torch.full(probs.shape[:1], self._token)


@dataclass(frozen=True)
class Drafts:
    """Every proposal that drafting can end in, one a row, and its probability."""

    proposal: Proposal
    weights: Tensor  # [B]


def sampler_after(output: Text, params: SamplingParams, batch: int) -> Sampler:
    request = make_request(PROMPT + output, params, num_prompt=len(PROMPT))
    return Sampler([request] * batch, VOCAB)


def node_texts(proposal: Proposal, output: Text) -> list[list[Text]]:
    """Per row: the output at the root, then at each node."""
    texts = []
    for b, row in enumerate(proposal.token_ids.tolist()):
        parents = range(-1, len(row) - 1) if proposal.parents is None else proposal.parents[b].tolist()
        at_node = [output]
        for token, parent in zip(row, parents, strict=True):
            at_node.append((*at_node[parent + 1], token))
        texts.append(at_node)
    return texts


def score(proposal: Proposal, output: Text, params: SamplingParams) -> Tensor:
    """Target probabilities [B, N + 1, V] as the engine gets them: logits of the table through the real sampler."""
    logits = torch.stack([TARGET.batch([PROMPT + text for text in row]) for row in node_texts(proposal, output)])
    return sampler_after(output, params, len(logits)).probs(logits, proposal.token_ids, proposal.parents)


def draw_drafts(
    output: Text, params: SamplingParams, parents: Sequence[int], replacement: bool = True, shown: SamplingParams | None = None
) -> Drafts:
    """All ways to draw the nodes from the draft table; ``shown`` falsifies the probabilities the proposal carries."""
    num_nodes, is_chain = len(parents), list(parents) == list(range(-1, len(parents) - 1))
    token_ids = torch.tensor(list(itertools.product(range(VOCAB), repeat=num_nodes))).view(-1, num_nodes)
    batch = len(token_ids)
    tree = torch.tensor(parents).expand(batch, -1)
    bare = Proposal(token_ids, torch.full((batch,), num_nodes), None, None if is_chain else tree)
    texts = node_texts(bare, output)
    drawn, claimed = [], []
    for settings, rows in ((params, drawn), (shown or params, claimed)):
        sampler = sampler_after(output, settings, batch)
        for i, parent in enumerate(parents):
            logits = DRAFT.batch([PROMPT + row[parent + 1] for row in texts]).unsqueeze(1)
            before = (token_ids[:, : parent + 1], bare.parents if bare.parents is None else tree[:, : parent + 1], parent + 1)
            probs = sampler.probs(logits, *before).squeeze(1)
            if not replacement:
                for sibling in (j for j in range(i) if parents[j] == parent):
                    probs = probs.scatter(-1, token_ids[:, sibling : sibling + 1], 0.0)
                mass = probs.sum(dim=-1, keepdim=True)
                probs = torch.where(mass > 0, probs / mass, 1 / VOCAB)  # nothing left to draw: anything will do
            rows.append(probs)
    weights = torch.stack(drawn, dim=1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
    possible = weights > 0
    tree_rows = None if is_chain else tree[possible]
    carried = torch.stack(claimed, dim=1)[possible]
    return Drafts(Proposal(token_ids[possible], bare.lens[possible], carried, tree_rows), weights[possible])


def fixed_drafts(rows: Sequence[Sequence[int]], parents: Sequence[int] | None = None) -> Drafts:
    """A deterministic proposer: point masses, one proposal."""
    token_ids = torch.tensor(rows)
    tree = None if parents is None else torch.tensor([list(parents)] * len(rows))
    lens = torch.full((len(rows),), token_ids.shape[1])
    return Drafts(Proposal(token_ids, lens, None, tree), torch.ones(len(rows), dtype=torch.float64))


def round_law(verifier: Verifier, drafts: Drafts, target_probs: Tensor) -> Law:
    """The law of what a round emits: drafts and every outcome of the verifier's coins and final draw."""
    law: Law = defaultdict(float)
    proposal, batch = drafts.proposal, len(drafts.weights)
    token_ids = proposal.token_ids.tolist()
    for coins in itertools.product((False, True), repeat=proposal.num_nodes):
        for token in range(VOCAB):
            random = OneOutcome(coins, token, batch)
            verdict = verifier.verify(proposal, target_probs, random)
            weights = (drafts.weights * random.weights).tolist()
            rows = zip(weights, verdict.path.tolist(), verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True)
            for b, (weight, path, count, next_token) in enumerate(rows):
                if weight > 0:
                    law[(*(token_ids[b][i] for i in path[:count]), next_token)] += weight
    return law


def target_law(output: Text, params: SamplingParams, length: int) -> Law:
    """The target's own law of the next ``length`` tokens, by the slow reference sampler."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, token): weight * prob
            for text, weight in law.items()
            for token, prob in enumerate(reference_probs(TARGET.logits(PROMPT + output + text), PROMPT, output + text, params))
        }
    return law


def continued(law: Law, output: Text, params: SamplingParams, length: int) -> Law:
    """A round's law, shorter texts continued by the target to ``length`` tokens."""
    total: Law = defaultdict(float)
    for text, weight in law.items():
        for rest, prob in target_law(output + text, params, length - len(text)).items():
            total[text + rest] += weight * prob
    return total


def distance(first: Law, second: Law) -> float:
    return max(abs(first.get(text, 0.0) - second.get(text, 0.0)) for text in {*first, *second})


def loss(verifier: Verifier, params: SamplingParams, output: Text, draft: Callable[[Text, SamplingParams], Drafts]) -> float:
    """How far one round after ``output`` is from the target: 0 for a lossless verifier."""
    drafts = draft(output, params)
    law = round_law(verifier, drafts, score(drafts.proposal, output, params))
    longest = drafts.proposal.num_nodes + 1
    return distance(continued(law, output, params, longest), target_law(output, params, longest))


def generation_law(
    verifier: Verifier, params: SamplingParams, length: int, draft: Callable[[Text, SamplingParams], Drafts]
) -> Law:
    """The law of the first ``length`` tokens of whole generations: rounds until they are there."""
    texts: Law = {(): 1.0}
    done: Law = defaultdict(float)
    while texts:
        longer: Law = defaultdict(float)
        for text, weight in texts.items():
            drafts = draft(text, params)
            for emitted, prob in round_law(verifier, drafts, score(drafts.proposal, text, params)).items():
                grown = text + emitted
                (done if len(grown) >= length else longer)[grown[:length]] += weight * prob
        texts = longer
    return done


def expected_accepted(law: Law) -> float:
    return sum(weight * (len(text) - 1) for text, weight in law.items())
