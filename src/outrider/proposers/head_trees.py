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
from outrider.proposers.tree_chances import RATES, Calibration, Drafted, DrawnTree, Floats, GrownTree, SiblingRates
from outrider.proposers.tree_sizes import TreeCosts, TreeProposer, TreeSizeConfig
from outrider.proposers.trees import TreeShape, draw_tree
from outrider.runner import ModelRunner
from outrider.types import Context, Proposal, Request, RequestFault, scatter_rows


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
        self._config, self._vocab_size = config, target.vocab_size
        self._rates = SiblingRates([config.acceptance] * config.max_depth)
        self._calibrations = {is_greedy: Calibration() for is_greedy in (True, False)}
        self._sources: dict[str, str] = {}  # sample that the head has not read yet -> request with the same prompt

    def propose(self, context: Context, k: int) -> Proposal:
        started = perf_counter()
        # A request has no hidden states before the target has prefilled its prompt.
        draftable = [b for b in range(len(context.requests)) if len(context.hidden[self.needs_hidden[0]][b])]
        k = min(k, self.max_drafts, max((context.limits[b] for b in draftable), default=0))
        self._drafted = {}
        if not draftable:
            return Proposal.empty(len(context.requests))
        root = self._read(context, draftable)
        if k <= 0:
            return Proposal.empty(len(context.requests))
        round_ = _Round(context, draftable, k, self._vocab_size)
        if context.sampler.is_deterministic:
            calibration = self._calibrations[all(request.params.is_greedy for request in context.requests)]
            found = _Candidates(self._sizes.max_nodes, calibration, self._sizes.costs(context), started)
            proposal = _confident_tree(self.head, round_, root, self._config.top_k, found)
            depth, num_steps = found.depth, found.num_levels
            self._drafted = found.drafted
        else:
            shape = self._sizes.shape(self._rates.table[:k], context, is_levelwise=True)
            proposal = _drawn_tree(self.head, round_, root, shape)
            depth = num_steps = max(shape.depths)
            if not self._sizes.is_fixed:  # a fixed tree keeps the output of a seed independent of other requests
                lens = proposal.lens.tolist()
                drawn = zip(round_.ids, [lens[b] for b in draftable], strict=True)
                self._drafted = {request_id: DrawnTree(shape, count, self._rates) for request_id, count in drawn}
        self._sizes.learn(int(proposal.lens.max()), max(depth, 1), num_steps, started)
        return proposal

    def start(self, request: Request) -> int:
        return self.head.start(request)

    def fork(self, source_id: str, request: Request) -> None:
        self._sources[request.request_id] = source_id

    def _read(self, context: Context, draftable: list[int]) -> Step:
        """Process new hidden states; return the head's step after each request's last token, [A]."""
        step = self._extended(context, draftable)
        is_finite = torch.isfinite(step.feedback).all(-1).tolist()
        if not all(is_finite):
            broken = [context.requests[b].request_id for b, is_fine in zip(draftable, is_finite, strict=True) if not is_fine]
            raise RequestFault(broken, "the head's output is NaN or infinite")
        return step

    def _extended(self, context: Context, draftable: list[int]) -> Step:
        """See ``_read``. A prompt is read once for all its samples: for the one from which the others were forked."""
        samples = [b for b in draftable if context.requests[b].request_id in self._sources]
        rest = [b for b in draftable if b not in samples]
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
                cache.copy(source, request.request_id, count)

    def _feed(self, context: Context, rows: list[int]) -> Step:
        """Feed the uncached tokens of the requests in these rows. See ``_read``."""
        requests = [context.requests[b] for b in rows]
        tokens, features = [], []
        for b, request in zip(rows, requests, strict=True):
            text = request.token_ids[self.head.cache.cached_len(request.request_id) + 1 :]
            tokens.append(text)
            features.append(newest([context.hidden[index][b] for index in self.needs_hidden], len(text)))
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


class _Round:
    """The A of B requests of a round that can be drafted for."""

    def __init__(self, context: Context, draftable: list[int], k: int, vocab_size: int) -> None:
        self.batch, self.draftable, self.k, self.vocab_size = len(context.requests), draftable, k, vocab_size
        self.sampler = context.sampler
        self.ids = [context.requests[b].request_id for b in draftable]
        self.limits = [min(k, context.limits[b]) for b in draftable]
        self.is_whole = len(draftable) == self.batch

    def spread(self, values: Tensor, fill: int = 0) -> Tensor:
        """[A, ...] -> [B, ...]; the rows of other requests are ``fill``."""
        return scatter_rows(values, self.draftable, self.batch, fill)

    def pick(self, values: Tensor) -> Tensor:
        """[B, ...] -> [A, ...]."""
        return values if self.is_whole else values[self.draftable]


def _extended_mask(sees: Tensor, parent: Tensor, width: int) -> Tensor:
    """Extend the attention mask ``sees`` over earlier drafts, [A, P, M], by a level of W nodes: bool [A, W, M + W]."""
    own = torch.eye(width, dtype=torch.bool, device=parent.device).expand(parent.shape[0], -1, -1)
    return torch.cat((_children_of(sees, parent), own), -1)


def _children_of(values: Tensor, parent: Tensor) -> Tensor:
    """Return each node's value of its parent: [A, P, H], parent [A, W] -> [A, W, H]."""
    return values.gather(1, parent[:, :, None].expand(-1, -1, values.shape[2]))


def _confident_tree(head: RolloutRunner, round_: _Round, root: Step, top_k: int, found: _Candidates) -> Proposal:
    """Expand and re-rank (EAGLE-2, sections 4.1 and 4.2), as long as another level pays."""
    num_draftable, device = len(round_.draftable), root.logits.device
    beam = torch.full((num_draftable, 1), -1, device=device)  # [A, W]: candidate index of each expanded node; -1: the root
    nodes = parents = torch.zeros(num_draftable, 0, dtype=torch.long, device=device)  # expanded so far, for the sampler
    sees = torch.zeros(num_draftable, 1, 0, dtype=torch.bool, device=device)
    at = torch.zeros(num_draftable, 1, dtype=torch.float64, device=device)
    step = root.view(num_draftable, 1)  # [A, W]
    for depth in range(1, round_.k + 1):
        first_node = nodes.shape[1] - step.logits.shape[1]  # of the level, in ``nodes``; -1: the root
        logits, drafts, above = round_.spread(step.logits), round_.spread(nodes), round_.spread(parents, fill=-1)
        most = min(top_k, logits.shape[-1])
        best = round_.sampler.likeliest(logits, most, drafts, above, first_node + 1)
        children, confidences = map(round_.pick, best)  # [A, W, top_k] each
        logprobs = found.chances(confidences).log_().clamp_(max=-1e-9)  # a child's value is below its parent's
        values = (at[:, :, None] + logprobs).flatten(1)  # [A, W * top_k]
        first = found.add(children.flatten(1), values, beam, depth)
        if depth == round_.k or not found.can_grow(values):
            break
        at, chosen = values.topk(min(top_k, values.shape[1]), -1)  # [A, W]
        beam, in_level = first + chosen, chosen // most
        token_ids = found.tokens.gather(1, beam)
        sees = _extended_mask(sees, in_level, token_ids.shape[1])
        nodes, parents = torch.cat((nodes, token_ids), 1), torch.cat((parents, in_level + first_node), 1)
        step = head.level(round_.ids, token_ids, _children_of(step.feedback, in_level), depth, sees)
    return found.proposal(round_)


class _Candidates:
    """Candidate nodes as tensors [A, C], to which levels are added, and the choice of the best nodes.

    The value of a node is the logarithm of the probability that its path is accepted.
    """

    def __init__(self, num_nodes: int, calibration: Calibration, costs: TreeCosts | None = None, started: float = 0.0) -> None:
        """``num_nodes``: maximum size. With ``costs`` the best size is chosen; ``started``: when drafting began."""
        self.num_nodes, self._calibration, self._costs, self._started = num_nodes, calibration, costs, started
        self.tokens = self.values = self.parents = torch.empty(0)
        self.depths: list[int] = []
        self.depth = 0  # depth of the chosen tree
        self.drafted: dict[str, Drafted] = {}  # the chosen tree of each request
        self._confidences: list[Floats] = []  # per level, [A, W * top_k]

    def chances(self, confidences: Tensor) -> Tensor:
        """Return float64 [A, W, top_k]: the probability that each node is accepted after its parent; 0 for NaN confidences."""
        found = np.nan_to_num(confidences.double().cpu().numpy())
        self._confidences.append(found.reshape(len(found), -1))
        return torch.from_numpy(self._calibration.chances(found)).to(confidences.device)

    def add(self, token_ids: Tensor, values: Tensor, beam: Tensor, depth: int) -> int:
        """Add the children [A, W * top_k] of the nodes ``beam`` [A, W]. Return the index of the first."""
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
        return so_far.level_pays(float(likeliest.exp().sum()), so_far.drafted / self.num_levels, _gains(best))

    def _costs_so_far(self) -> TreeCosts:
        """Return the costs with the time spent on drafting until now."""
        assert self._costs is not None
        return replace(self._costs, drafted=perf_counter() - self._started)

    def proposal(self, round_: _Round) -> Proposal:
        """Return the most confident nodes of each request as point masses, parents first, siblings by confidence."""
        is_beyond = torch.tensor(self.depths)[None] > torch.tensor(round_.limits)[:, None]
        values = self.values.cpu().masked_fill(is_beyond, float("-inf"))
        best = values.topk(min(self.num_nodes, values.shape[1]), -1)
        size = best.values.shape[1] if self._costs is None else self._costs_so_far().best_size(_gains(best.values))[0]
        tokens, above, confidences = self.tokens.tolist(), self.parents.tolist(), np.concatenate(self._confidences, 1).tolist()
        token_ids = torch.zeros(round_.batch, size, dtype=torch.long)
        parents, lens = torch.full_like(token_ids, -1), torch.zeros(round_.batch, dtype=torch.long)
        for a, b in enumerate(round_.draftable):
            ranked = zip(best.indices[a, :size].tolist(), best.values[a, :size].tolist(), strict=True)
            kept = [node for node, value in ranked if value > -1e30]
            kept.sort(key=lambda node: self.depths[node])  # stable sort: by value within a depth
            place = {node: index for index, node in enumerate(kept)} | {-1: -1}
            self.drafted[round_.ids[a]] = GrownTree(tokens[a], above[a], confidences[a], kept, self._calibration)
            lens[b] = len(kept)
            if kept:
                self.depth = max(self.depth, self.depths[kept[-1]])
                token_ids[b, : len(kept)] = torch.tensor([tokens[a][node] for node in kept])
                parents[b, : len(kept)] = torch.tensor([place[above[a][node]] for node in kept])
        return Proposal(token_ids, lens, None, parents)


def _gains(best: Tensor) -> list[float]:
    """Return the expected accepted drafts that each further node adds over the batch, from the best values [A, N]."""
    return best.exp().sum(0).tolist()


def _drawn_tree(head: RolloutRunner, round_: _Round, root: Step, shape: TreeShape) -> Proposal:
    """Sample a tree of the shape level by level, up to each request's maximum depth."""
    step = root.view(len(round_.draftable), 1)  # [A, I]
    sees = torch.zeros(len(round_.draftable), 1, 0, dtype=torch.bool, device=root.logits.device)
    above: list[int] = []  # inner nodes of the previous level

    def logits_after(inner: list[int], token_ids: Tensor) -> Tensor:
        nonlocal step, sees, above
        if above:
            in_level = torch.tensor([above.index(shape.parents[node]) for node in inner], device=token_ids.device)
            in_level = in_level.expand(len(round_.draftable), -1)
            sees, feedback = _extended_mask(sees, in_level, len(inner)), _children_of(step.feedback, in_level)
            step = head.level(round_.ids, round_.pick(token_ids)[:, inner], feedback, shape.depths[inner[0]], sees)
        above = inner
        return round_.spread(step.logits)

    proposal = draw_tree(shape, round_.sampler, round_.batch, logits_after)
    lens = torch.zeros(round_.batch, dtype=torch.long)
    lens[round_.draftable] = torch.tensor([shape.cut(limit) for limit in round_.limits])
    return replace(proposal, lens=lens)
