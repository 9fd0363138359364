"""Typical acceptance. LOSSY: the output does not follow the target's distribution (Cai et al. 2024, Medusa, section 2.3.1).

A draft is accepted if target(x) > min(epsilon, delta exp(-entropy)). Of all accepted paths the longest is kept, on ties the
likeliest. At temperature 0 this is exact match.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.types import OutriderError, Proposal, Randomness, Verdict
from outrider.verifiers.base import TINY, Verifier


class TypicalVerifier(Verifier):
    """Accepts the longest path of drafts that are typical for the target. Lossy; must be requested by name."""

    lossless = False
    supports_trees = True
    target_input = "probs"

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        """``epsilon``, ``delta``: the paper's hard and entropy-dependent thresholds."""
        if not (0 < epsilon <= 1 and 0 < delta <= 1):
            raise OutriderError(f"invalid thresholds epsilon={epsilon}, delta={delta}: expected values in (0, 1]")
        self.epsilon, self.delta = epsilon, delta

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        """``target`` [B, N + 1, V] are target probabilities. See ``Verifier.verify``."""
        probs = target.nan_to_num(0.0)
        entropy = -(probs * probs.clamp_min(TINY).log()).sum(-1)  # [B, N + 1]
        limits = (self.delta * (-entropy).exp()).clamp_max(self.epsilon).tolist()
        drafts, batch = proposal.token_ids.tolist(), len(proposal.token_ids)
        parents = None if proposal.parents is None else proposal.parents.tolist()
        paths: list[list[int]] = []
        for b, length in enumerate(proposal.lens.tolist()):
            best: tuple[int, float, list[int]] = (0, 1.0, [])
            alive: dict[int, tuple[float, list[int]]] = {-1: (1.0, [])}  # node -> likelihood of its path, and the path
            for i in range(length):
                parent = i - 1 if parents is None else parents[b][i]
                if parent not in alive:
                    continue
                chance = float(probs[b, parent + 1, drafts[b][i]])
                if chance > limits[b][parent + 1]:
                    likelihood, path = alive[parent][0] * chance, [*alive[parent][1], i]
                    alive[i] = likelihood, path
                    best = max(best, (len(path), likelihood, path), key=lambda found: found[:2])
            paths.append(best[2])
        ends = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=target.device)
        return Verdict(paths, random.categorical(target[torch.arange(batch, device=target.device), ends]).tolist())
