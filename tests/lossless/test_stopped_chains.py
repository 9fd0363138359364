"""Losslessness of chains that end by their drafts' confidences, by enumeration of all samples of the real proposer.

A table replaces the draft model; everything else is real.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from toy import make_request

from outrider.proposers.draft_model import DraftModelProposer
from outrider.types import Context, DraftPrices, Proposal, SamplingParams
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.rejection import RejectionVerifier

from .enumeration import DRAFT, PROMPT, VOCAB, Drafts, Text, loss
from .test_tree_drafting import SETTINGS, Scripted

EXACT, LIMIT = 1e-12, 3


class TableDraft:
    """A draft model whose logits come from a table."""

    drafts_ahead, device, max_len, vocab_size, max_drafts = True, torch.device("cpu"), 99, VOCAB, None

    def rollout(
        self, ids: Sequence[str], texts: Sequence[Sequence[int]], steps: int, pick: Callable[[Tensor, int], Tensor | None]
    ) -> None:
        text = list(texts[0])
        for step in range(steps):
            token = pick(DRAFT.batch([tuple(text)])[None], step)
            if token is None:
                return
            text.append(int(token))


def drawn(output: Text, params: SamplingParams, prices: DraftPrices) -> Drafts:
    rows: dict[Text, tuple[Proposal, float]] = {}
    for script in itertools.product(range(VOCAB), repeat=LIMIT):
        request = make_request(PROMPT + output, params, num_prompt=len(PROMPT))
        sampler = Scripted(script, request)
        proposer = DraftModelProposer(TableDraft(), VOCAB)  # type: ignore[arg-type]
        proposal = proposer.propose(Context((request,), (LIMIT,), sampler, prices=prices), LIMIT)
        if sampler.weight > 0:
            rows[tuple(proposal.token_ids[0].tolist())] = proposal, sampler.weight
    lens = [len(tokens) for tokens in rows]
    weights = torch.tensor([weight for _, weight in rows.values()], dtype=torch.float64)
    found = [proposal for proposal, _ in rows.values()]
    if found[0].probs is None:  # point masses are not sampled
        return Drafts(found[0], torch.ones(1, dtype=torch.float64))
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    token_ids = torch.cat([functional.pad(each.token_ids, (0, LIMIT - n)) for each, n in zip(found, lens, strict=True)])
    probs = torch.cat([functional.pad(each.probs, (0, 0, 0, LIMIT - n)) for each, n in zip(found, lens, strict=True)])
    return Drafts(Proposal(token_ids, torch.tensor(lens), probs), weights)


@pytest.mark.parametrize("step", [0.15, 0.3])
@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()], ids=["rejection", "block"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("output", [(), (2, 0, 2)])
def test_chains_that_end_early_are_lossless(setting: str, output: Text, verifier: Verifier, step: float) -> None:
    prices = DraftPrices(step, 0.0)
    assert loss(verifier, SETTINGS[setting], output, lambda text, params: drawn(text, params, prices)) < EXACT


def test_the_enumerated_chains_end_at_different_depths() -> None:
    lens = drawn((), SETTINGS["warm"], DraftPrices(0.3, 0.0)).proposal.lens.tolist()
    assert {1, 2} <= {*lens} or {1, 3} <= {*lens}
