"""Exact output distributions by enumeration of all drafts and all outcomes of the real verifier."""

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


class Played:
    """A Randomness that returns a given outcome in each row and computes the probability of that outcome."""

    def __init__(self, coins: Tensor, tokens: Tensor) -> None:
        """``coins`` bool [B, N]: outcomes of ``bernoulli`` in the order of calls; ``tokens`` [B]: those of ``categorical``."""
        self._coins, self._tokens, self._tossed = coins, tokens, 0
        self.weights = torch.ones(len(coins), dtype=torch.float64)

    def bernoulli(self, probs: Tensor) -> Tensor:
        falls = self._coins[:, self._tossed : self._tossed + probs.shape[1]]
        self._tossed += probs.shape[1]
        self.weights = self.weights * torch.where(falls, probs, 1 - probs).prod(dim=-1)
        return falls

    def categorical(self, probs: Tensor) -> Tensor:
        possible = self.weights > 0
        assert ((probs.sum(dim=-1) - 1).abs() < 1e-12)[possible].all()
        self.weights = self.weights * probs.gather(-1, self._tokens.unsqueeze(-1)).squeeze(-1)
        return self._tokens.clone()


@dataclass(frozen=True)
class Drafts:
    """All possible proposals, one per row, and their probabilities."""

    proposal: Proposal
    weights: Tensor  # [B]


def sampler_after(output: Text, params: SamplingParams, batch: int) -> Sampler:
    request = make_request(PROMPT + output, params, num_prompt=len(PROMPT))
    return Sampler([request] * batch, VOCAB)


def node_texts(proposal: Proposal, output: Text) -> list[list[Text]]:
    """Return, for each row, the output up to the root and up to each node."""
    texts = []
    for b, row in enumerate(proposal.token_ids.tolist()):
        parents = range(-1, len(row) - 1) if proposal.parents is None else proposal.parents[b].tolist()
        at_node = [output]
        for token, parent in zip(row, parents, strict=True):
            at_node.append((*at_node[parent + 1], token))
        texts.append(at_node)
    return texts


def score(proposal: Proposal, output: Text, params: SamplingParams) -> Tensor:
    """Return target probabilities [B, N + 1, V] as in the engine: logits of the table through the real sampler."""
    logits = torch.stack([TARGET.batch([PROMPT + text for text in row]) for row in node_texts(proposal, output)])
    return sampler_after(output, params, len(logits)).probs(logits, proposal.token_ids, proposal.parents)


def draw_drafts(
    output: Text,
    params: SamplingParams,
    parents: Sequence[int],
    replacement: bool = True,
    shown: SamplingParams | None = None,
    make_sampler: Callable[[Text, SamplingParams, int], Sampler] = sampler_after,
) -> Drafts:
    """Enumerate all trees sampled from the draft table. ``shown`` falsifies the probabilities in the proposal."""
    num_nodes, is_chain = len(parents), list(parents) == list(range(-1, len(parents) - 1))
    token_ids = torch.tensor(list(itertools.product(range(VOCAB), repeat=num_nodes))).view(-1, num_nodes)
    batch = len(token_ids)
    tree = torch.tensor(parents).expand(batch, -1)
    bare = Proposal(token_ids, torch.full((batch,), num_nodes), None, None if is_chain else tree)
    texts = node_texts(bare, output)

    def of_nodes(settings: SamplingParams) -> Tensor:
        """Return the distribution [batch, N, V] that each node is sampled from under these settings."""
        sampler, rows = make_sampler(output, settings, batch), []
        for i, parent in enumerate(parents):
            logits = DRAFT.batch([PROMPT + row[parent + 1] for row in texts]).unsqueeze(1)
            before = (token_ids[:, : parent + 1], bare.parents if bare.parents is None else tree[:, : parent + 1], parent + 1)
            probs = sampler.probs(logits, *before).squeeze(1)
            if not replacement:
                for sibling in (j for j in range(i) if parents[j] == parent):
                    probs = probs.scatter(-1, token_ids[:, sibling : sibling + 1], 0.0)
                mass = probs.sum(dim=-1, keepdim=True)
                probs = torch.where(mass > 0, probs / mass, 1 / VOCAB)  # nothing left to draw: any distribution is right
            rows.append(probs)
        return torch.stack(rows, dim=1)

    drawn = of_nodes(params)
    claimed = drawn if shown is None else of_nodes(shown)
    weights = drawn.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
    possible = weights > 0
    tree_rows = None if is_chain else tree[possible]
    return Drafts(Proposal(token_ids[possible], bare.lens[possible], claimed[possible], tree_rows), weights[possible])


def draw_in_parallel(output: Text, params: SamplingParams, num_drafts: int) -> Drafts:
    """Enumerate all chains drafted with mask tokens, which depend on earlier drafts through penalties only."""
    mask = VOCAB  # id of the mask token
    token_ids = torch.tensor(list(itertools.product(range(VOCAB), repeat=num_drafts)))
    batch, sampler = len(token_ids), sampler_after(output, params, len(token_ids))
    logits = [DRAFT.logits(PROMPT + output + (mask,) * depth).expand(batch, 1, -1) for depth in range(num_drafts)]
    probs = torch.cat([sampler.probs(each, token_ids[:, :depth], start=depth) for depth, each in enumerate(logits)], 1)
    weights = probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
    possible, lens = weights > 0, torch.full((batch,), num_drafts)
    return Drafts(Proposal(token_ids[possible], lens[possible], probs[possible]), weights[possible])


def fixed_drafts(rows: Sequence[Sequence[int]], parents: Sequence[int] | None = None) -> Drafts:
    """Return the single proposal of a deterministic proposer: point masses."""
    token_ids = torch.tensor(rows)
    tree = None if parents is None else torch.tensor([list(parents)] * len(rows))
    lens = torch.full((len(rows),), token_ids.shape[1])
    return Drafts(Proposal(token_ids, lens, None, tree), torch.ones(len(rows), dtype=torch.float64))


def round_law(verifier: Verifier, drafts: Drafts, target_probs: Tensor) -> Law:
    """Return the distribution of a round's output, from all drafts and outcomes of the verifier in one batch."""
    proposal, batch = drafts.proposal, len(drafts.weights)
    outcomes = torch.tensor(list(itertools.product(*[(0, 1)] * proposal.num_nodes, range(VOCAB))))
    times = len(outcomes)
    outcomes = outcomes.repeat_interleave(batch, dim=0)  # [times * B, N + 1]

    def repeated(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat(times, *[1] * (values.ndim - 1))

    random = Played(outcomes[:, :-1].bool(), outcomes[:, -1])
    every = Proposal(*map(repeated, (proposal.token_ids, proposal.lens, proposal.probs, proposal.parents)))
    verdict = verifier.verify(every, repeated(target_probs), random)
    weights = drafts.weights.repeat(times) * random.weights
    weights = torch.where(weights > 0, weights, 0.0)  # NaN has no probability
    counts = torch.tensor([[len(path)] for path in verdict.paths])
    place = torch.arange(int(counts.max()) + 1)
    paths = torch.tensor([[*path, *[0] * (len(place) - 1 - len(path))] for path in verdict.paths], dtype=torch.long)
    kept = torch.nn.functional.pad(every.token_ids.gather(1, paths), (0, 1))
    emitted = torch.where(place < counts, kept, torch.where(place == counts, torch.tensor(verdict.next_tokens)[:, None], -1))
    # each sequence as one number whose last digit is its first token
    numbers = ((emitted + 1) * (VOCAB + 1) ** place).sum(dim=-1)
    sums = torch.bincount(numbers, weights)
    return defaultdict(float, {_digits(number): float(sums[number]) for number in sums.nonzero().flatten().tolist()})


def _digits(number: int) -> Text:
    text: Text = ()
    while number:
        number, digit = divmod(number, VOCAB + 1)
        text = (*text, digit - 1)
    return text


_known: dict[str, dict[Text, list[float]]] = {}  # settings -> output -> law of the next token


def next_law(params: SamplingParams) -> Callable[[Text], list[float]]:
    """Return a function from an output to the target's distribution of the next token, by the slow reference sampler."""
    known = _known.setdefault(repr(params), {})

    def law(output: Text) -> list[float]:
        if output not in known:
            known[output] = reference_probs(TARGET.logits(PROMPT + output), PROMPT, output, params)
        return known[output]

    return law


def target_law(output: Text, params: SamplingParams, length: int) -> Law:
    """Return the target's distribution of the next ``length`` tokens."""
    return continued({(): 1.0}, output, params, length)


def continued(law: Law, output: Text, params: SamplingParams, length: int) -> Law:
    """Extend the distribution of a round's output to ``length`` tokens: the target continues shorter outputs."""
    next_token, total = next_law(params), dict(law)
    for short in range(length):
        for text in [text for text in total if len(text) == short]:
            weight = total.pop(text)
            for token, prob in enumerate(next_token(output + text)):
                total[(*text, token)] = total.get((*text, token), 0.0) + weight * prob
    return total


def distance(first: Law, second: Law) -> float:
    return max(abs(first.get(text, 0.0) - second.get(text, 0.0)) for text in {*first, *second})


def loss(verifier: Verifier, params: SamplingParams, output: Text, draft: Callable[[Text, SamplingParams], Drafts]) -> float:
    """Return the distance between the distributions of one round after ``output`` and of the target: 0 if lossless."""
    drafts = draft(output, params)
    law = round_law(verifier, drafts, score(drafts.proposal, output, params))
    longest = drafts.proposal.num_nodes + 1
    return distance(continued(law, output, params, longest), target_law(output, params, longest))


def generation_law(
    verifier: Verifier, params: SamplingParams, length: int, draft: Callable[[Text, SamplingParams], Drafts]
) -> Law:
    """Return the distribution of the first ``length`` tokens, generated in as many rounds as needed."""
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
