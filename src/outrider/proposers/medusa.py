"""Medusa: heads on the target's last hidden state predict the next tokens all at once (Cai et al. 2024, arXiv 2401.10774).

The candidates of all heads form the tree with the most expected accepted drafts, estimated from the accuracies measured in
training and then from the target's acceptance. In greedy and coupled rounds candidates are the heads' likeliest tokens (point
masses). In sampled rounds siblings are sampled from a head's distribution without replacement: then the acceptance of the first
is the overlap of head and target, whereas the paper's likeliest token is accepted with its target probability only. Both are
lossless. The paper's typical acceptance is a separate, lossy verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from outrider.heads import findings
from outrider.heads.checkpoint import MEDUSA
from outrider.heads.medusa import Accuracies, MedusaHeads, check_fit, load
from outrider.heads.postprocessing import postprocess_of
from outrider.options import option, several
from outrider.proposers.base import rows_with_hidden
from outrider.proposers.head_method import HeadMethod, Loaded
from outrider.proposers.method import TargetFiles
from outrider.proposers.portable import Form
from outrider.proposers.tree_chances import RATES, DraftedTree, DrawnTree, SiblingRates
from outrider.proposers.tree_sizes import TreeProposer, TreeSizeConfig
from outrider.proposers.trees import TreeShape, draw_tree
from outrider.runner import ModelRunner
from outrider.runner.quantized import place_head
from outrider.types import Context, Proposal, Request

# For heads without measured accuracies: those of the first head by rank, and their ratio between successive heads.
TYPICAL_ACCURACIES = (0.55, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.01)
ACCURACY_DECAY = 0.75


@dataclass(frozen=True)
class MedusaConfig(TreeSizeConfig):
    """Shape of the trees, and precision of the heads."""

    accuracies: Accuracies | None = option(
        several(RATES, "a list of numbers from 0 to 1 for each head (0.6,0.2/0.5,0.1)", separator="/"),
        None,
        "Accuracies of each head's candidates by rank (default: those stored with the heads, else typical ones).",
    )


class MedusaProposer(TreeProposer):
    """Drafts a tree of the heads' candidates in one step, without a cache."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads, target: ModelRunner, config: MedusaConfig = MedusaConfig()) -> None:
        """Raise ``OutriderError`` for heads that do not fit the target."""
        check_fit(heads, target)
        self.heads, self.dtype = heads, place_head(heads, target.model, config.bits)
        self.device = target.device
        super().__init__(target, config.max_nodes, (target.num_layers,))
        count = heads.shape.num_heads
        typical = tuple(tuple(ACCURACY_DECAY**head * each for each in TYPICAL_ACCURACIES) for head in range(count))
        # A small vocabulary has fewer candidates than ranks.
        measured = [row[: heads.shape.vocab_size] for row in config.accuracies or typical]
        self._rates = {is_drawn: SiblingRates(measured) for is_drawn in (False, True)}
        self.max_drafts = min(count, len(measured))
        self._postprocess, self._vocab_size = postprocess_of(target.model), target.vocab_size

    def start(self, request: Request) -> int:
        """See ``Proposer.start``: the heads read the last token's hidden state only."""
        return len(request.token_ids) - 1

    @torch.inference_mode()
    def propose(self, context: Context, k: int) -> Proposal:
        started, self._trees = perf_counter(), {}
        batch, rows = len(context.requests), rows_with_hidden(context, self.needs_hidden[0])
        if not rows:
            return Proposal.empty(batch)
        context = context.take(rows)
        k = min(k, self.max_drafts, max(context.limits))
        is_drawn = not context.sampler.is_deterministic
        rates = self._rates[is_drawn]
        shape = self._sizes.shape(rates.table[:k], context, is_levelwise=False)
        states = context.hidden[self.needs_hidden[0]]
        last = torch.stack([each[-1] for each in states]).to(self.device, self.dtype)  # [A, H]
        lens = torch.tensor([shape.cut(limit) for limit in context.limits])
        trees: Sequence[DraftedTree]
        if is_drawn:
            logits = self._distributions(last, max(shape.depths))
            proposal = draw_tree(shape, context.sampler, len(rows), logits_by_depth(logits, shape))
            trees = [DrawnTree(shape, count, rates) for count in lens.tolist()]
        else:
            found = self.heads.candidates(last, k, 1 + max(shape.ranks))  # [A, heads, ranks]
            token_ids = found[:, torch.tensor(shape.depths) - 1, torch.tensor(shape.ranks)]  # [A, N]
            proposal = Proposal(token_ids, lens, None, torch.tensor(shape.parents).repeat(len(rows), 1))
            trees = [_Likeliest(shape, candidates, rates) for candidates in found.tolist()]
        if not self._sizes.is_fixed:  # a fixed tree keeps the output of a seed independent of other requests
            self._trees = dict(zip(context.request_ids, trees, strict=True))
        self._sizes.learn(len(shape.parents), max(shape.depths), 1, started)
        return replace(proposal, lens=lens).scatter(rows, batch)

    def _distributions(self, last: Tensor, depth: int) -> Tensor:
        """Map last hidden states [A, H] to logits [D, A, V] of the first D heads."""
        values = self.heads(last, depth)
        if self._postprocess is not None:
            values = self._postprocess(values)
        return self.heads.to_target_vocabulary(values, self._vocab_size)


class MedusaMethod(HeadMethod):
    proposer = MedusaProposer
    options = MedusaConfig
    exported = Form.PARALLEL_HEADS
    heads = MedusaHeads
    drafts_with = MEDUSA
    own_draft = "medusa"
    precedence = 1
    check_files = staticmethod(findings.of_medusa)

    def load(self, folder: Path, target: ModelRunner | TargetFiles) -> Loaded:
        heads, accuracies = load(folder, target)
        return Loaded(heads, "Medusa heads", {"accuracies": accuracies})


METHOD = MedusaMethod()


def logits_by_depth(logits: Tensor, shape: TreeShape) -> Callable[[list[int], Tensor], Tensor]:
    """Return the ``logits_after`` of ``trees.draw_tree`` from [D, B, V]: a head's logits are the same after every node."""

    def after(nodes: list[int], _: Tensor) -> Tensor:
        depth = 0 if nodes == [-1] else shape.depths[nodes[0]]
        return logits[depth][:, None].expand(-1, len(nodes), -1).contiguous()

    return after


@dataclass(frozen=True)
class _Likeliest:
    """A tree of point masses: the heads' candidates, the shape of the tree among them, and the rates to update."""

    shape: TreeShape
    tokens: list[list[int]]  # [head][rank]
    rates: SiblingRates

    def learn(self, path: list[int], next_token: int) -> None:
        """See ``DraftedTree.learn``. Candidates outside the tree are compared with the target's token, too."""
        taken: list[int | None] = [self.shape.ranks[node] for node in path]
        if len(path) < len(self.tokens):
            last = self.tokens[len(path)]
            taken.append(last.index(next_token) if next_token in last else None)
        self.rates.learn([len(each) for each in self.tokens], taken)
