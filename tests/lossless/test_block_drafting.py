"""The blocks that a block drafter draws, by enumeration: every draw of the real proposer, with its weight.

A table stands in for the head. Nothing else is replaced.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from toy import make_request

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


class TableBlock:
    """A BlockRunner whose logits are a table's, by position, plus a bias by the previous token if ``is_markov``."""

    def __init__(self, text: Text, is_markov: bool) -> None:
        self._text, self._is_markov = text, is_markov
        self.head = SimpleNamespace(logits=lambda out: DRAFT.batch([self._text + (0,) * int(at) for at in out.flatten()])[None])

    def cached_len(self, request_id: str) -> int:
        return 0

    def draft(self, ids: list[str], features: list[list[Tensor]], tokens: list[int], counts: list[int]) -> Tensor:
        assert len(features[0][0]) == len(self._text) - 1 and tokens == [self._text[-1]]
        return torch.arange(counts[0]).view(1, -1, 1)

    def after(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        return logits + BIAS[token_ids] if self._is_markov else logits


def proposed(sampler: Sampler, text: Text, is_markov: bool) -> Proposal:
    proposer = object.__new__(BlockProposer)
    proposer.needs_hidden, proposer.max_drafts, proposer.head = (0,), 7, TableBlock(text, is_markov)
    return proposer.propose(Context(sampler.requests, (COUNT,), sampler, {0: [torch.zeros(len(text) - 1, 1)]}), 5)


@pytest.mark.parametrize("is_markov", [False, True])
@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()], ids=["rejection", "block"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("output", [(), (2, 0, 2)])
def test_a_sampled_block_is_lossless(setting: str, output: Text, verifier: Verifier, is_markov: bool) -> None:
    def drawn(output: Text, params: SamplingParams) -> Drafts:
        rows, weights, text = [], [], PROMPT + output
        for script in itertools.product(range(VOCAB), repeat=COUNT):
            sampler = Scripted(script, make_request(text, params, num_prompt=len(PROMPT)))
            proposal = proposed(sampler, text, is_markov)
            if proposal.probs is None:  # point masses: there is nothing to draw
                return Drafts(proposal, torch.ones(1, dtype=torch.float64))
            if sampler.weight > 0:
                rows.append(proposal)
                weights.append(sampler.weight)
        assert sum(weights) == pytest.approx(1, abs=1e-12)
        joined = [torch.cat([getattr(row, name) for row in rows]) for name in ("token_ids", "lens", "probs")]
        return Drafts(Proposal(*joined), torch.tensor(weights, dtype=torch.float64))

    assert loss(verifier, SETTINGS[setting], output, drawn) < EXACT


def test_a_bias_makes_drafts_depend_on_the_previous_draft() -> None:
    """The enumeration above would not detect a missing bias, because it would use the same wrong distribution."""
    request = make_request(PROMPT, SamplingParams(temperature=1.0), num_prompt=len(PROMPT))
    for is_markov in (False, True):
        seconds = {}
        for first in range(VOCAB):
            proposal = proposed(Scripted((first, 0), request), PROMPT, is_markov)
            assert proposal.probs is not None
            seconds[first] = proposal.probs[0, 1]
        logits = DRAFT.batch([(*PROMPT, 0)])[0]
        for first, probs in seconds.items():
            wanted = (logits + BIAS[first] if is_markov else logits).softmax(-1)
            torch.testing.assert_close(probs.double(), wanted, rtol=1e-6, atol=1e-6)
