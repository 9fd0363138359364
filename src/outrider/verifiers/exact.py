"""Exact match: a draft is accepted iff it equals the target's token. For chains and trees.

Each emitted token is the target's own at its position: greedy, sampled, or coupled to the drafts (Daliri, Musco, Suresh, arXiv
2408.07978). Lossless if the noise of a position is independent of that of the positions before it. Rows of a tree at one depth
may share theirs, because only one of them is used.
"""

from __future__ import annotations

from torch import Tensor

from outrider.types import Proposal, Randomness, Verdict
from outrider.verifiers.base import Verifier


class ExactMatchVerifier(Verifier):
    """Follows the target's tokens through the drafts; makes no random decisions."""

    lossless = True
    supports_trees = True
    target_input = "tokens"

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        """``target`` int64 [B, N + 1] are the target's tokens after the root and after each draft. See ``Verifier.verify``."""
        drafts, target_tokens = proposal.token_ids.tolist(), target.tolist()
        parents = None if proposal.parents is None else proposal.parents.tolist()
        paths: list[list[int]] = []
        next_tokens: list[int] = []
        # Python integers are faster than tensor operations for a few nodes.
        for b, length in enumerate(proposal.lens.tolist()):
            node, path = -1, []
            for i in range(length):
                if (i - 1 if parents is None else parents[b][i]) != node:
                    continue
                if drafts[b][i] == target_tokens[b][node + 1]:
                    node = i
                    path.append(i)
            paths.append(path)
            next_tokens.append(target_tokens[b][node + 1])
        return Verdict(paths, next_tokens)
