"""Losslessness of block drafting by enumeration of all samples of the real proposer with their probabilities.

A table replaces the head; everything else is real.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from toy import make_request

from outrider.heads.block import CandidateSelector
from outrider.proposers.dflash import BlockProposer
from outrider.sampling import Sampler
from outrider.types import Context, Proposal, SamplingParams
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.rejection import RejectionVerifier

from .enumeration import DRAFT, PROMPT, VOCAB, Drafts, Text, loss
from .test_tree_drafting import SETTINGS, Scripted

EXACT, COUNT = 1e-12, 2
BIAS = torch.tensor([[0.9, -0.4, 0.0], [-1.1, 0.3, 0.8], [0.2, 1.4, -0.6]], dtype=torch.float64)  # after each token


def pair_scores() -> CandidateSelector:
    """Return a real selector over two of the three tokens whose pair scores are those of BIAS."""
    selector = CandidateSelector(VOCAB, 1, VOCAB, 2).double().requires_grad_(False)
    selector.predecessor_codebook.copy_(BIAS)
    selector.successor_codebook.copy_(torch.eye(VOCAB))
    selector.hidden_projection.weight.fill_(1.0)
    return selector


SELECTOR = pair_scores()


class TableBlock:
    """A BlockRunner whose logits come from a table by position, with a bias or a selector for the previous token."""

    def __init__(self, text: Text, kind: str) -> None:
        self._text, self._kind = text, kind
        self.head = SimpleNamespace(logits=lambda out: DRAFT.batch([self._text + (0,) * int(at) for at in out.flatten()])[None])
        self.cache = SimpleNamespace(cached_len=lambda request_id: 0)

    def draft(self, ids: list[str], features: list[list[Tensor]], tokens: list[int], counts: list[int]) -> Tensor:
        assert len(features[0][0]) == len(self._text) - 1 and tokens == [self._text[-1]]
        return torch.arange(counts[0]).view(1, -1, 1)

    def after(self, out: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
        if self._kind == "selector":
            return SELECTOR(torch.ones(*token_ids.shape, 1, dtype=torch.float64), logits, token_ids)
        return logits + BIAS[token_ids] if self._kind == "bias" else logits


def proposed(sampler: Sampler, text: Text, kind: str) -> Proposal:
    proposer = object.__new__(BlockProposer)
    proposer.needs_hidden, proposer.max_drafts, proposer.head = (0,), 7, TableBlock(text, kind)
    return proposer.propose(Context(sampler.requests, (COUNT,), sampler, {0: [torch.zeros(len(text) - 1, 1)]}), 5)


@pytest.mark.parametrize("kind", ["plain", "bias", "selector"])
@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()], ids=["rejection", "block"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("output", [(), (2, 0, 2)])
def test_a_sampled_block_is_lossless(setting: str, output: Text, verifier: Verifier, kind: str) -> None:
    def drawn(output: Text, params: SamplingParams) -> Drafts:
        rows, weights, text = [], [], PROMPT + output
        for script in itertools.product(range(VOCAB), repeat=COUNT):
            sampler = Scripted(script, make_request(text, params, num_prompt=len(PROMPT)))
            proposal = proposed(sampler, text, kind)
            if proposal.probs is None:  # point masses are not sampled
                return Drafts(proposal, torch.ones(1, dtype=torch.float64))
            if sampler.weight > 0:
                rows.append(proposal)
                weights.append(sampler.weight)
        assert sum(weights) == pytest.approx(1, abs=1e-12)
        joined = [torch.cat([getattr(row, name) for row in rows]) for name in ("token_ids", "lens", "probs")]
        return Drafts(Proposal(*joined), torch.tensor(weights, dtype=torch.float64))

    assert loss(verifier, SETTINGS[setting], output, drawn) < EXACT


def test_a_bias_or_selector_makes_drafts_depend_on_the_previous_draft() -> None:
    """The enumeration above would not detect a missing bias, because it would use the same wrong distribution."""
    request = make_request(PROMPT, SamplingParams(temperature=1.0), num_prompt=len(PROMPT))
    for kind in ("plain", "bias", "selector"):
        seconds = {}
        for first in range(VOCAB):
            proposal = proposed(Scripted((first, 0), request), PROMPT, kind)
            assert proposal.probs is not None
            seconds[first] = proposal.probs[0, 1]
        logits = DRAFT.batch([(*PROMPT, 0)])[0]
        for first, probs in seconds.items():
            scores = logits + BIAS[first] if kind != "plain" else logits
            if kind == "selector":
                scores = scores.masked_fill(logits == logits.min(), float("-inf"))
            wanted = scores.softmax(-1)
            torch.testing.assert_close(probs.double(), wanted, rtol=1e-6, atol=1e-6)
