"""Exact match: a draft is accepted iff it is the target's own token. For chains and trees.

Lossless where the target's tokens are determined by its logits (greedy) or by logits and noise keyed by position (coupled
sampling: Daliri, Musco, Suresh, arXiv 2408.07978): the emitted tokens are the target's own, whatever was drafted.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.types import Proposal, Randomness, Verdict
from outrider.verifiers.base import Verifier


class ExactMatchVerifier(Verifier):
    """Follows the target's own tokens through the drafts; makes no random decisions."""

    lossless: ClassVar[bool] = True
    handles_trees: ClassVar[bool] = True
    judges: ClassVar[Literal["probs", "tokens"]] = "tokens"

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        """``target`` int64 [B, N + 1] are the target's tokens after the root and after each draft. See ``Verifier.verify``."""
        drafts, said = proposal.token_ids.tolist(), target.tolist()
        parents = None if proposal.parents is None else proposal.parents.tolist()
        paths: list[list[int]] = []
        # plain ints: faster than tensor operations for a few nodes
        for b, length in enumerate(proposal.lens.tolist()):
            node, path = -1, []
            for i in range(length):
                if (i - 1 if parents is None else parents[b][i]) != node:
                    continue
                if drafts[b][i] == said[b][node + 1]:
                    node = i
                    path.append(i)
            paths.append(path)
        num_accepted = [len(path) for path in paths]
        next_token = [said[b][path[-1] + 1 if path else 0] for b, path in enumerate(paths)]
        depth = max(num_accepted)
        padded = [path + [-1] * (depth - len(path)) for path in paths]
        return Verdict(
            torch.tensor(padded, dtype=torch.long).view(len(paths), depth),
            torch.tensor(num_accepted),
            torch.tensor(next_token),
        )
