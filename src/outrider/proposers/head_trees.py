"""Trees drafted level by level by a head that continues from the target's hidden states.

Greedy and coupled rounds use the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv 2406.16858), section 4: the ``top_k`` most
confident nodes of each level are expanded, then all candidates are ranked again and the best are kept; drafts are point masses.
Confidences are calibrated by the acceptance in earlier rounds. In sampled rounds the shape of the tree does not depend on the
samples, siblings are sampled without replacement, and the proposal contains their distributions, so the output is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from outrider.heads.feature_head import RolloutHead
from outrider.heads.head_runner import RolloutRunner, Step, newest
from outrider.options import option, whole
from outrider.proposers.base import rows_with_hidden
from outrider.proposers.tree_chances import RATES, Calibration, DraftedTree, DrawnTree, Floats, GrownTree, SiblingRates
from outrider.proposers.tree_sizes import TreeCosts, TreeProposer, TreeSizeConfig
from outrider.proposers.trees import TreeShape, draw_tree
from outrider.runner import ModelRunner
from outrider.types import Context, Proposal, Request, RequestFault


@dataclass(frozen=True)
class TreeConfig(TreeSizeConfig):
    """Shape of the trees, and precision of the head."""

    top_k: int = option(whole(1), 6, "Children per node, and expanded nodes per level.")
    max_depth: int = option(whole(1), 12, "Maximum length of a path.")
    acceptance: tuple[float, ...] = option(
        RATES,
        (0.72, 0.13, 0.05, 0.025, 0.01),
        "Acceptance of the first, second, ... sibling when sampling; values stored with a head replace the default.",
    )


class HeadProposer(TreeProposer):
    """Drafts with a head over the target's hidden states, which has its own KV cache."""

    def __init__(
        self,
        head: RolloutHead,
        target: ModelRunner,
        config: TreeConfig,
        runner: Callable[..., RolloutRunner] = RolloutRunner,
        hidden_states: tuple[int, ...] | None = None,
    ) -> None:
        """``hidden_states``: instead of the head's own. Raise ``OutriderError`` for a head that does not fit the target."""
        head.check_fit(target)
        if not target.supports_trees:  # the engine would reduce each tree to its first path
            config = replace(config, top_k=1, acceptance=config.acceptance[:1])
        self.head = runner(head, target, config.bits)
        super().__init__(target, config.max_nodes, hidden_states or head.hidden_states)
        self.max_drafts = config.max_depth
        self._config = config
        self._rates = SiblingRates([config.acceptance] * config.max_depth)
        self._calibrations = {is_greedy: Calibration() for is_greedy in (True, False)}
        self._sources: dict[str, str] = {}  # sample that the head has not read yet -> request with the same prompt

    def propose(self, context: Context, k: int) -> Proposal:
        started = perf_counter()
        batch, rows = len(context.requests), rows_with_hidden(context, self.needs_hidden[0])
        self._trees = {}
        if not rows:
            return Proposal.empty(batch)
        context = context.take(rows)
        k = min(k, self.max_drafts, max(context.limits))
        root = self._read(context)
        if context.sampler.is_deterministic:
            calibration = self._calibrations[all(request.params.is_greedy for request in context.requests)]
            found = _Candidates(self._sizes.max_nodes, calibration, self._sizes.costs(context), started)
            proposal = _confident_tree(self.head, context, k, root, self._config.top_k, found)
            depth, num_steps = found.depth, found.num_levels
            self._trees = found.trees
        else:
            shape = self._sizes.shape(self._rates.table[:k], context, is_levelwise=True)
            proposal = _drawn_tree(self.head, context, root, shape)
            depth = num_steps = max(shape.depths)
            if not self._sizes.is_fixed:  # a fixed tree keeps the output of a seed independent of other requests
                drawn = zip(context.request_ids, proposal.lens.tolist(), strict=True)
                self._trees = {request_id: DrawnTree(shape, count, self._rates) for request_id, count in drawn}
        self._sizes.learn(int(proposal.lens.max()), max(depth, 1), num_steps, started)
        return proposal.scatter(rows, batch)

    def start(self, request: Request) -> int:
        return self.head.start(request)

    def fork(self, source_id: str, request: Request) -> None:
        self._sources[request.request_id] = source_id

    def _read(self, context: Context) -> Step:
        """Process new hidden states; return the head's step after each request's last token, [B]."""
        step = self._extended(context)
        is_finite = torch.isfinite(step.feedback).all(-1).tolist()
        if not all(is_finite):
            broken = [request_id for request_id, is_fine in zip(context.request_ids, is_finite, strict=True) if not is_fine]
            raise RequestFault(broken, "the head's output is NaN or infinite")
        return step

    def _extended(self, context: Context) -> Step:
        """See ``_read``. A prompt is read once for all its samples: for the one from which the others were forked."""
        samples = [b for b, request_id in enumerate(context.request_ids) if request_id in self._sources]
        rest = [b for b in range(len(context.requests)) if b not in samples]
        steps = []
        for rows in filter(None, (rest, samples)):  # a prompt before its samples
            for b in rows:
                self._copy_prompt(context.requests[b])
            steps.append(self._feed(context, rows))
        if len(steps) == 1:
            return steps[0]
        order = torch.tensor([*rest, *samples]).argsort()
        return Step(*(torch.cat(parts)[order] for parts in zip(*steps, strict=True)))

    def _copy_prompt(self, request: Request) -> None:
        """Copy the cached prompt of the request that a new sample was forked from, if any."""
        source = self._sources.pop(request.request_id, None)
        if source is not None:
            cache = self.head.cache
            count = min(cache.cached_len(source), request.num_prompt_tokens - 2)  # the last entry's output is needed
            if count > 0:
                cache.copy_prefix(source, request.request_id, count)

    def _feed(self, context: Context, rows: list[int]) -> Step:
        """Feed the uncached tokens of the requests in these rows. See ``_read``."""
        requests = [context.requests[b] for b in rows]
        tokens, features = [], []
        for b, request in zip(rows, requests, strict=True):
            tokens.append(request.token_ids[self.head.cache.cached_len(request.request_id) + 1 :])
            features.append(newest([context.hidden[index][b] for index in self.needs_hidden], len(tokens[-1])))
        return self.head.extend([request.request_id for request in requests], tokens, features)

    def prepare(self) -> None:
        self.head.prepare()

    def retire(self, request_ids: Sequence[str]) -> None:
        self.head.cache.retire(request_ids)
        self.release(request_ids)

    def release(self, request_ids: Sequence[str]) -> None:
        self.head.cache.release(request_ids)
        for request_id in request_ids:
            self._sources.pop(request_id, None)


def _extended_mask(sees: Tensor, parent: Tensor, width: int) -> Tensor:
    """Extend the attention mask ``sees`` over earlier drafts, [B, P, M], by a level of W nodes: bool [B, W, M + W]."""
    own = torch.eye(width, dtype=torch.bool, device=parent.device).expand(parent.shape[0], -1, -1)
    return torch.cat((_children_of(sees, parent), own), -1)


def _children_of(values: Tensor, parent: Tensor) -> Tensor:
    """Return each node's value of its parent: [B, P, H], parent [B, W] -> [B, W, H]."""
    return values.gather(1, parent[:, :, None].expand(-1, -1, values.shape[2]))


def _confident_tree(head: RolloutRunner, context: Context, k: int, root: Step, top_k: int, found: _Candidates) -> Proposal:
    """Expand and re-rank (EAGLE-2, sections 4.1 and 4.2), as long as another level pays."""
    ids, device = context.request_ids, root.logits.device
    beam = torch.full((len(ids), 1), -1, device=device)  # [B, W]: candidate index of each expanded node; -1: the root
    nodes = parents = torch.zeros(len(ids), 0, dtype=torch.long, device=device)  # expanded so far, for the sampler
    sees = torch.zeros(len(ids), 1, 0, dtype=torch.bool, device=device)
    at = torch.zeros(len(ids), 1, dtype=torch.float64, device=device)
    step = root.view(len(ids), 1)  # [B, W]
    for depth in range(1, k + 1):
        first_node = nodes.shape[1] - step.logits.shape[1]  # of the level, in ``nodes``; -1: the root
        most = min(top_k, step.logits.shape[-1])
        # [B, W, top_k] each
        children, confidences = context.sampler.likeliest(step.logits, most, nodes, parents, first_node + 1)
        logprobs = found.chances(confidences).log_().clamp_(max=-1e-9)  # a child's value is below its parent's
        values = (at[:, :, None] + logprobs).flatten(1)  # [B, W * top_k]
        first = found.add(children.flatten(1), values, beam, depth)
        if depth == k or not found.can_grow(values):
            break
        at, chosen = values.topk(min(top_k, values.shape[1]), -1)  # [B, W]
        beam, in_level = first + chosen, chosen // most
        token_ids = found.tokens.gather(1, beam)
        sees = _extended_mask(sees, in_level, token_ids.shape[1])
        nodes, parents = torch.cat((nodes, token_ids), 1), torch.cat((parents, in_level + first_node), 1)
        step = head.level(ids, token_ids, _children_of(step.feedback, in_level), depth, sees)
    return found.proposal(context)


class _Candidates:
    """Candidate nodes as tensors [B, C], to which levels are added, and the choice of the best nodes.

    The value of a node is the logarithm of the probability that its path is accepted.
    """

    def __init__(self, num_nodes: int, calibration: Calibration, costs: TreeCosts | None = None, started: float = 0.0) -> None:
        """``num_nodes``: maximum size. With ``costs`` the best size is chosen; ``started``: when drafting began."""
        self.num_nodes, self._calibration, self._costs, self._started = num_nodes, calibration, costs, started
        self.tokens = self.values = self.parents = torch.empty(0)
        self.depths: list[int] = []
        self.depth = 0  # depth of the chosen tree
        self.trees: dict[str, DraftedTree] = {}  # the chosen tree of each request
        self._confidences: list[Floats] = []  # per level, [B, W * top_k]

    def chances(self, confidences: Tensor) -> Tensor:
        """Return float64 [B, W, top_k]: the probability that each node is accepted after its parent; 0 for NaN confidences."""
        found = np.nan_to_num(confidences.double().cpu().numpy())
        self._confidences.append(found.reshape(len(found), -1))
        return torch.from_numpy(self._calibration.chances(found)).to(confidences.device)

    def add(self, token_ids: Tensor, values: Tensor, beam: Tensor, depth: int) -> int:
        """Add the children [B, W * top_k] of the nodes ``beam`` [B, W]. Return the index of the first."""
        first, count = len(self.depths), token_ids.shape[1]
        new = (token_ids, values, beam.repeat_interleave(count // beam.shape[1], 1))
        so_far = zip((self.tokens, self.values, self.parents), new, strict=True)
        self.tokens, self.values, self.parents = (torch.cat(pair, 1) for pair in so_far) if first else new
        self.depths += [depth] * count
        return first

    @property
    def num_levels(self) -> int:
        """Return the number of levels so far."""
        return self.depths[-1]

    def can_grow(self, values: Tensor) -> bool:
        """Return whether children of the last level, which has these values, can be among the best nodes and pay."""
        likeliest, best = values.amax(-1), self.values.topk(min(self.num_nodes, len(self.depths)), -1).values
        if best.shape[1] == self.num_nodes and not bool((likeliest > best[:, -1]).any()):
            return False
        if self._costs is None:
            return True
        so_far = self._costs_so_far()
        return so_far.level_pays(float(likeliest.exp().sum()), so_far.draft_seconds / self.num_levels, _gains(best))

    def _costs_so_far(self) -> TreeCosts:
        """Return the costs with the time spent on drafting until now."""
        assert self._costs is not None
        return replace(self._costs, draft_seconds=perf_counter() - self._started)

    def proposal(self, context: Context) -> Proposal:
        """Return the most confident nodes of each request as point masses, parents first, siblings by confidence."""
        is_beyond = torch.tensor(self.depths)[None] > torch.tensor(context.limits)[:, None]
        values = self.values.cpu().masked_fill(is_beyond, float("-inf"))
        best = values.topk(min(self.num_nodes, values.shape[1]), -1)
        size = best.values.shape[1] if self._costs is None else self._costs_so_far().best_size(_gains(best.values))[0]
        tokens, above, confidences = self.tokens.tolist(), self.parents.tolist(), np.concatenate(self._confidences, 1).tolist()
        token_ids = torch.zeros(len(context.requests), size, dtype=torch.long)
        parents, lens = torch.full_like(token_ids, -1), torch.zeros(len(context.requests), dtype=torch.long)
        for b, request_id in enumerate(context.request_ids):
            ranked = zip(best.indices[b, :size].tolist(), best.values[b, :size].tolist(), strict=True)
            kept = [node for node, value in ranked if value > -1e30]
            kept.sort(key=lambda node: self.depths[node])  # stable sort: by value within a depth
            place = {node: index for index, node in enumerate(kept)} | {-1: -1}
            self.trees[request_id] = GrownTree(tokens[b], above[b], confidences[b], kept, self._calibration)
            lens[b] = len(kept)
            if kept:
                self.depth = max(self.depth, self.depths[kept[-1]])
                token_ids[b, : len(kept)] = torch.tensor([tokens[b][node] for node in kept])
                parents[b, : len(kept)] = torch.tensor([place[above[b][node]] for node in kept])
        return Proposal(token_ids, lens, None, parents)


def _gains(best: Tensor) -> list[float]:
    """Return the expected accepted drafts that each further node adds over the batch, from the best values [B, N]."""
    return best.exp().sum(0).tolist()


def _drawn_tree(head: RolloutRunner, context: Context, root: Step, shape: TreeShape) -> Proposal:
    """Sample a tree of the shape level by level, up to each request's maximum depth."""
    batch = len(context.requests)
    step = root.view(batch, 1)  # [B, I]
    sees = torch.zeros(batch, 1, 0, dtype=torch.bool, device=root.logits.device)
    above: list[int] = []  # inner nodes of the previous level

    def logits_after(inner: list[int], token_ids: Tensor) -> Tensor:
        nonlocal step, sees, above
        if above:
            in_level = torch.tensor([above.index(shape.parents[node]) for node in inner], device=token_ids.device)
            in_level = in_level.expand(batch, -1)
            sees, feedback = _extended_mask(sees, in_level, len(inner)), _children_of(step.feedback, in_level)
            step = head.level(context.request_ids, token_ids[:, inner], feedback, shape.depths[inner[0]], sees)
        above = inner
        return step.logits

    proposal = draw_tree(shape, context.sampler, batch, logits_after)
    return replace(proposal, lens=torch.tensor([shape.cut(limit) for limit in context.limits]))
