"""Heads on the target's last hidden state guess the next tokens all at once (Cai et al. 2024, Medusa, arXiv 2401.10774).

The candidates of all heads form a tree, chosen from the heads' accuracies so that most drafts are expected to be accepted: at
first from those that were measured in training, then from those on the text at hand. The target scores it in one pass.
Candidates are the heads' likeliest tokens, so they are point masses, and the text is the target's whatever they are worth. The
paper's typical acceptance is a verifier of its own, and lossy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch

from outrider.heads import findings
from outrider.heads.checkpoint import MEDUSA, folder_of
from outrider.heads.medusa import Accuracies, MedusaHeads, check_fit, load
from outrider.proposers.base import Proposer, Setting
from outrider.proposers.portable import ParallelHeads
from outrider.proposers.sample_text import TEXT
from outrider.proposers.tree_chances import SiblingRates
from outrider.proposers.tree_sizes import TreeSizes
from outrider.proposers.trees import TreeShape
from outrider.runner import ModelRunner
from outrider.runner.linear import place
from outrider.types import Context, Finding, OutriderError, Proposal, Verdict

# What heads of the paper's kind reach by rank, falling by head: for heads whose accuracies were never measured.
USUAL = (0.55, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.01)
FALL = 0.75


@dataclass(frozen=True)
class MedusaConfig:
    """The tree."""

    accuracies: Accuracies | None = None  # [head][rank]; None: the usual ones
    max_nodes: int | None = None  # drafts in a proposal; None: as many as pay

    def __post_init__(self) -> None:
        if (self.max_nodes is not None and self.max_nodes < 1) or (self.accuracies is not None and not self.accuracies):
            raise OutriderError("max_nodes must be at least 1, and accuracies must not be empty")


class MedusaProposer(Proposer):
    """Drafts a static tree of the heads' likeliest tokens: no cache, one small step whatever the depth."""

    name = "medusa"
    drafts_trees = True
    takes_draft = True
    drafts_with = MEDUSA
    own_draft = "medusa"

    def __init__(self, heads: MedusaHeads, target: ModelRunner, config: MedusaConfig = MedusaConfig()) -> None:
        """Raises ``OutriderError`` for heads that do not fit the target."""
        check_fit(heads, target)
        self.heads, self.dtype = heads, place(heads, target.model)
        self.device = target.device
        self.needs_hidden = (target.num_layers,)
        count = heads.shape.num_heads
        usual = tuple(tuple(FALL**head * each for each in USUAL) for head in range(count))
        # A head has no more candidates than tokens.
        self._rates = SiblingRates([row[: heads.shape.vocab_size] for row in config.accuracies or usual])
        self.max_drafts = min(count, len(self._rates.table))
        # Of each request the tree and the tokens by [head][rank], until it is known what the target took.
        self._drafted: dict[str, tuple[TreeShape, list[list[int]]]] = {}
        self._sizes = TreeSizes(target, config.max_nodes)

    @classmethod
    def build(cls, setting: Setting) -> MedusaProposer:
        """Loads the heads. Raises ``OutriderError`` where there are none or they do not fit the target."""
        setting = setting.of(cls)
        target, source = setting.target, setting.draft
        if isinstance(source, MedusaHeads):
            return cls(source, target, setting.config(MedusaConfig))
        heads, accuracies = load(folder_of(source), target.vocab_size)
        return cls(heads, target, setting.config(MedusaConfig, accuracies=accuracies))

    @classmethod
    def portable(cls, setting: Setting) -> ParallelHeads:
        setting = setting.of(cls)
        setting.config(MedusaConfig)
        return ParallelHeads(str(setting.draft))

    @classmethod
    def examine(cls, setting: Setting) -> Iterator[Finding]:
        """Sizes, vocabulary, number of heads and dtype, from their files."""
        setting = setting.of(cls)
        if not isinstance(setting.draft, MedusaHeads):
            sample = setting.tokenizer.encode(TEXT) if setting.tokenizer is not None else []
            yield from findings.of_medusa(folder_of(setting.draft), setting.target, sample)

    def num_nodes(self, k: int) -> int:
        return self._sizes.expected(k)

    @torch.inference_mode()
    def propose(self, context: Context, k: int) -> Proposal:
        started, self._drafted = perf_counter(), {}
        (states,) = (context.hidden[index] for index in self.needs_hidden)
        k = min(k, self.max_drafts, max(context.limits))
        # Before its prompt has been read by the target, a request has no features.
        able = [b for b, each in enumerate(states) if len(each) and context.limits[b] > 0]
        if k <= 0 or not able:
            return Proposal.empty(len(states))
        shape = self._sizes.shape(self._rates.table[:k], context, is_levelwise=False)
        last = torch.stack([states[b][-1] for b in able]).to(self.device, self.dtype)  # [A, H]
        found = self.heads.candidates(last, k, 1 + max(shape.ranks))  # [A, heads, ranks]
        nodes = found[:, torch.tensor(shape.depths) - 1, torch.tensor(shape.ranks)]  # [A, N]
        token_ids = torch.zeros(len(states), len(shape.parents), dtype=torch.long, device=self.device)
        token_ids[able] = nodes
        lens = torch.tensor([shape.cut(min(k, limit)) if b in able else 0 for b, limit in enumerate(context.limits)])
        if not self._sizes.is_fixed:  # where the user fixed the size, a seed's text depends on no other
            texts = zip(able, found.tolist(), strict=True)
            self._drafted = {context.requests[b].request_id: (shape, candidates) for b, candidates in texts}
        self._sizes.learn(len(shape.parents), max(shape.depths), 1, started)
        return Proposal(token_ids, lens, None, torch.tensor(shape.parents).repeat(len(states), 1))

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Compares the heads' candidates with what the target took, whether they became drafts or not."""
        for b, request in enumerate(context.requests):
            if request.request_id in self._drafted:
                shape, candidates = self._drafted.pop(request.request_id)
                path, next_token = verdict.path[b, : int(verdict.num_accepted[b])].tolist(), int(verdict.next_token[b])
                taken: list[int | None] = [shape.ranks[node] for node in path]
                if len(path) < len(candidates):
                    last = candidates[len(path)]
                    taken.append(last.index(next_token) if next_token in last else None)
                self._rates.learn([len(each) for each in candidates], taken)
