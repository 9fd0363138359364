"""Data types of speculative decoding, shared by all modules. Independent of models, caches, methods and the loop.

A *round* is: propose -> score -> verify -> commit. Each arrow passes one of the dataclasses below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.errors import OutriderError as OutriderError
from outrider.sampling_params import Grammar as Grammar
from outrider.sampling_params import Matcher as Matcher
from outrider.sampling_params import SamplingParams as SamplingParams


class RequestFault(OutriderError):
    """Failure that concerns only some requests of a batch."""

    def __init__(self, request_ids: Sequence[str], message: str) -> None:
        self.request_ids = tuple(request_ids)
        super().__init__(message)


def owner_of(request_id: str) -> str:
    """Return the owner of a request, which comes before the last slash of its id, if any.

    Requests of different owners share no cached tokens and no earlier texts: usage and times would reveal them.
    """
    return request_id.rpartition("/")[0]


@dataclass(slots=True, eq=False)
class Request:
    """One running generation. Only the scheduler appends to ``token_ids``, and only the engine and the draft-length
    policy clear ``may_draft``; all other code only reads them.
    """

    request_id: str  # see ``owner_of``
    token_ids: list[int]  # committed tokens: the prompt, then the output
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # params.seed, or a random one; sample i of n has its own
    matcher: Matcher | None = None  # of params.grammar
    num_draft_tokens: int | None = None  # requested K, 0 for plain decoding; None: the policy decides
    delimiters: frozenset[int] = frozenset()  # special tokens that are not skipped in the text
    may_draft: bool = True  # False: the proposer never drafts for it, so its hidden states are not kept
    scores_prompt: bool = False  # report the log-probabilities of the prompt's tokens, too; needs params.logprobs

    @property
    def takes_drafts(self) -> bool:
        """Return whether the policy or its own K may ask for drafts: otherwise its hidden states are never read."""
        return self.may_draft and self.num_draft_tokens != 0

    @property
    def follows_policy(self) -> bool:
        """Return whether the policy chooses its K."""
        return self.may_draft and self.num_draft_tokens is None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class Randomness(Protocol):
    """The two random decisions of a verifier. Tests use an implementation that enumerates every outcome."""

    def bernoulli(self, probs: Tensor) -> Tensor:
        """Draw independent Bernoulli variables: float [B, N] in [0, 1] -> bool [B, N]."""
        ...

    def categorical(self, probs: Tensor) -> Tensor:
        """Sample one index per row, of positive probability: float [B, V] (each row sums to 1) -> int64 [B]."""
        ...


class BatchSampler(Randomness, Protocol):
    """Turn logits into probabilities and tokens for the B requests of a round; ``outrider.sampling.Sampler`` implements it.

    ``logits[:, j]`` follows draft ``start + j - 1``, -1 being the last committed token: with ``start`` 2, ``logits[:, 0]``
    follows draft 1. ``drafts`` [B, >= start + M - 1] are the round's drafts so far, a chain or, with ``parents``, a tree.
    ``lens`` [B]: valid drafts; logits after them are ignored.
    """

    requests: tuple[Request, ...]
    vocab_size: int

    @property
    def is_deterministic(self) -> bool:
        """Whether the round needs no random decisions: all requests are greedy, or noise is coupled."""
        ...

    def tokens(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """[B, M, V] -> int64 [B, M]: the argmax (of logits plus noise if coupled), or a sample. Raises ``InvalidLogits``."""
        ...

    def probs(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """[B, M, V] -> float32 (float64 for float64) after all settings; greedy rows are one-hot. Raises ``InvalidLogits``."""
        ...

    def likeliest(
        self, logits: Tensor, top_k: int, drafts: Tensor | None = None, parents: Tensor | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """[B, M, V] -> [B, M, K] each: tokens that ``tokens`` most likely returns in a deterministic round, and estimates of
        their probabilities: the softmax of the scores (greedy rows: at temperature 1; coupled rows: with noise).
        """
        ...

    def draw(self, probs: Tensor, index: int) -> Tensor:
        """Sample draft ``index`` of the round: [B, V] -> int64 [B]. The noise is keyed by (seed, committed length, index).

        Unlike ``categorical``, it is independent of how many drafts other requests have. The exact verifier draws the target's
        row ``index`` with the same numbers, which then tends to be that draft.
        """
        ...

    def for_batch(self, requests: Sequence[Request]) -> BatchSampler:
        """Return the sampler of another batch, which may share requests with this one."""
        ...

    def take(self, rows: Sequence[int]) -> BatchSampler:
        """Return the sampler of these requests, in this order."""
        ...

    def continued(self, requests: Mapping[int, Request]) -> BatchSampler:
        """Return the sampler of the same batch in which some requests, given by row, have more tokens."""
        ...


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """Prices of further drafts of a round: their time, in tokens that the batch would emit in it at its expected speed."""

    step: float  # of a drafting step, for all requests together
    row: float  # of a request's further row in the target's pass


@dataclass(frozen=True)
class Context:
    """The B running requests of a round. Row b of every tensor of this round belongs to ``requests[b]``."""

    requests: tuple[Request, ...]
    limits: tuple[int, ...]  # B maximum numbers of drafts, 0 allowed: what fits in the output, later also the request's K
    sampler: BatchSampler  # turns logits into probabilities or tokens, for draft and target alike
    hidden: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    # index -> B tensors [T_b, H]: target hidden states (see Scores) of the committed tokens processed since the last call, in
    # order. Over all calls each committed token appears once, except the last, which no pass has processed; after
    # ``Proposer.release`` they start again at the first.
    prices: DraftPrices | None = None  # a proposer may stop where a further draft brings less; None: draft as many as requested

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.requests)

    @property
    def cache_len(self) -> int:
        """Return the committed tokens of the longest request, by which costs of passes are recorded and found."""
        return max([len(request.token_ids) for request in self.requests])

    def take(self, rows: Sequence[int]) -> Context:
        """Return the context of these requests, in this order."""
        if list(rows) == list(range(len(self.requests))):
            return self
        hidden = {index: [states[b] for b in rows] for index, states in self.hidden.items()}
        requests, limits = tuple([self.requests[b] for b in rows]), tuple([self.limits[b] for b in rows])
        return Context(requests, limits, self.sampler.take(rows), hidden, self.prices)

    def limited(self, lengths: Sequence[int]) -> Context:
        """Return the same context with at most ``lengths[b]`` drafts for request b."""
        limits = tuple([min(pair) for pair in zip(self.limits, lengths, strict=True)])
        return replace(self, limits=limits)


@dataclass(frozen=True)
class PartialPass:
    """Hidden states that drafting computed with the target's first layers. Scoring reuses them and runs the other layers."""

    depth: int  # number of layers run
    starts: Mapping[str, int]  # request id -> tokens in the target's cache before the first of ``tokens``
    tokens: Mapping[str, Sequence[int]]  # request id -> T processed tokens
    hidden: Mapping[str, Tensor]  # request id -> [T, H]: output of those layers for each of the tokens

    def num_known(self, request_id: str, start: int, tokens: Sequence[int]) -> int:
        """Return the length of the prefix of ``tokens``, which follow ``start`` cached ones, whose hidden states it holds."""
        if self.starts.get(request_id) != start:
            return 0
        pairs = enumerate(zip(tokens, self.tokens[request_id], strict=False))
        return next((at for at, (token, known) in pairs if token != known), min(len(tokens), len(self.tokens[request_id])))


@dataclass(frozen=True)
class Proposal:
    """Drafts for B requests: a chain (``parents=None``) or a tree of N nodes.

    In a tree ``parents[b, i] < i`` (-1 is the root, the last committed token), and the verifier tries siblings in index order.
    ``probs[b, i]`` is the distribution that draft i was sampled from, *given that its earlier siblings were sampled and
    rejected*: the proposer may sample with or without replacement, and the verifier is independent of the method.
    """

    token_ids: Tensor  # [B, N] int64; root and bonus excluded; right-padded
    lens: Tensor  # [B] int64, on the CPU: valid drafts per request; 0 allowed
    probs: Tensor | None = None  # [B, N, V] float32; None: every draft is a point mass
    parents: Tensor | None = None  # [B, N] int64; None: a chain
    partial_pass: PartialPass | None = None  # where the target's own first layers drafted
    # [B, N] bool each, on the CPU, both or neither, set by the engine only:
    is_grammar: Tensor | None = None  # drafts of a grammar, forced or guessed
    is_proposed: Tensor | None = None  # the proposer's drafts, also those that the grammar forces

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu") -> Proposal:
        """Return a proposal without drafts for ``batch`` requests: plain decoding."""
        return Proposal(torch.zeros(batch, 0, dtype=torch.long, device=device), torch.zeros(batch, dtype=torch.long))

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[1]

    @property
    def is_tree(self) -> bool:
        """Return whether there are drafts, and they are a tree."""
        return self.parents is not None and self.num_nodes > 0

    def take(self, rows: Sequence[int]) -> Proposal:
        """Return the drafts of these requests, in this order."""
        index = list(rows)
        if index == list(range(len(self.lens))):
            return self
        return self._with(lambda values: values[index], self.lens[index])

    def narrow(self, lens: Sequence[int]) -> Proposal:
        """Return the first ``lens[b]`` drafts of each request, without common padding."""
        width = max(lens, default=0)
        if width == 0:
            return replace(Proposal.empty(len(lens), self.token_ids.device), partial_pass=self.partial_pass)
        return self._with(lambda values: values[:, :width], torch.tensor(lens, dtype=torch.long))

    def gather(self, nodes: Sequence[Sequence[int]]) -> Proposal:
        """Return the drafts ``nodes[b]`` of each request; their parents are still indices in the whole proposal."""
        lens = torch.tensor([len(own) for own in nodes], dtype=torch.long)
        width = max(map(len, nodes), default=0)
        columns = torch.tensor([[*own, *[0] * (width - len(own))] for own in nodes], dtype=torch.long).view(len(nodes), width)
        rows = torch.arange(len(nodes))[:, None]
        return self._with(lambda values: values[rows, columns], lens)

    def first_paths(self) -> tuple[Proposal, list[list[int]]]:
        """Reduce each request's tree to its chain of first children; also return their indices in the tree.

        The chain is lossless: first children were sampled before any sibling, so ``probs`` are still their distributions.
        """
        assert self.parents is not None
        paths: list[list[int]] = []
        for parents, count in zip(self.parents.tolist(), self.lens.tolist(), strict=True):
            path: list[int] = []
            for node in range(count):
                if parents[node] == (path[-1] if path else -1):
                    path.append(node)
            paths.append(path)
        return replace(self.gather(paths), parents=None), paths

    def scatter(self, rows: Sequence[int], batch: int) -> Proposal:
        """Return these drafts as rows ``rows`` of a larger batch; its other requests have no drafts."""
        return self._with(lambda values: scatter_rows(values, rows, batch), scatter_rows(self.lens, rows, batch))

    def _with(self, change: Callable[[Tensor], Tensor], lens: Tensor) -> Proposal:
        probs = None if self.probs is None else change(self.probs)
        parents = None if self.parents is None else change(self.parents)
        is_grammar, is_proposed = (None if mask is None else change(mask) for mask in (self.is_grammar, self.is_proposed))
        return Proposal(change(self.token_ids), lens, probs, parents, self.partial_pass, is_grammar, is_proposed)


@dataclass(frozen=True)
class Scores:
    """The target's scores of a proposal. Row 0 follows the root (the last committed token), row i + 1 follows draft i.

    Rows beyond ``lens[b]`` are undefined. Hidden states are numbered as transformers' ``hidden_states``: 0 is the embedding's
    output, i the input of layer i (the output of layer i - 1), and L, the number of layers, the output after the final norm.
    There are none if no request takes drafts.
    """

    logits: Tensor  # [B, N + 1, V] float32
    hidden: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    # index -> B tensors [T_b + 1 + lens[b], H]: of the committed tokens before the root that this pass processed, in order,
    # then of the root and of its drafts
    first_layer: int = 0  # first layer of the pass: drafting already ran the layers before it


@dataclass(frozen=True)
class Verdict:
    """A verifier's decision. Request b emits the drafts of ``paths[b]``, then ``next_tokens[b]``."""

    paths: list[list[int]]  # [B]: indices of accepted drafts, root to leaf
    next_tokens: list[int]  # [B]: corrected (after a rejection) or bonus (all accepted) token

    def take(self, rows: Sequence[int]) -> Verdict:
        """Return the verdict for these requests, in this order."""
        return Verdict([self.paths[b] for b in rows], [self.next_tokens[b] for b in rows])


@dataclass(slots=True)
class PhaseTimes:
    """Seconds by phase of a round. ``host`` is all time outside the other phases."""

    draft: float = 0.0
    score: float = 0.0
    verify: float = 0.0
    host: float = 0.0
    prefill: float = 0.0  # of prompts by the target, between rounds
    draft_prefill: float = 0.0  # of prompts by the proposer, between rounds

    @property
    def total(self) -> float:
        return self.draft + self.score + self.verify + self.host + self.prefill + self.draft_prefill

    @property
    def overhead(self) -> float:
        """Return the seconds of verifier and host."""
        return self.verify + self.host

    def by_phase(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, other: PhaseTimes) -> None:
        # Not a loop over the fields, which takes several times as long: it runs for each request of a round.
        self.draft += other.draft
        self.score += other.score
        self.verify += other.verify
        self.host += other.host
        self.prefill += other.prefill
        self.draft_prefill += other.draft_prefill


@dataclass(frozen=True)
class Round:
    """Counts and times of one round, as the ledger recorded them.

    All lists are per request. ``depths``, ``num_accepted`` and ``num_reached`` count the proposer's drafts, without those
    that a grammar determines.
    """

    k: int  # drafts requested from the proposer
    lens: list[int]  # drafts scored
    depths: list[int]  # longest path of drafts; equal to the number of drafts for chains
    proposed_depths: list[int]  # longest path that the proposer drafted, those determined by a grammar included
    num_accepted: list[int]
    num_reached: list[int]  # depths that the verifier reached: all drafts before each of them were accepted
    times: PhaseTimes
    first_layer: int = 0  # of the target pass: drafting ran the layers before it
    is_cold: bool = False  # a plain round with cold CPU caches, soon after a model drafted
    num_grammar: list[int] | None = None  # drafts of a grammar, included in ``lens``; None: none
    is_prefill: bool = False  # the pass also prefilled prompts: its time is not the cost of a decoding pass

    @cached_property
    def has_drafts(self) -> bool:
        """Return whether drafts were scored."""
        return any(self.lens)

    @cached_property
    def most_proposed(self) -> int:
        """Return the length of the longest path that the proposer drafted."""
        return max(self.proposed_depths, default=0)

    @property
    def num_drafts(self) -> list[int]:
        """Return the number of scored drafts that are not a grammar's."""
        if self.num_grammar is None:
            return self.lens
        return [scored - others for scored, others in zip(self.lens, self.num_grammar, strict=True)]


@dataclass(frozen=True)
class Finding:
    """One check before serving, and its result."""

    level: Literal["ok", "note", "suspicious", "wrong"]  # wrong: the method does not fit the target
    topic: str  # such as "vocabulary"
    text: str  # one sentence


# --- tensors ----------------------------------------------------------------------------------------------------------------

# Logit of a token that a draft cannot emit. Its probability is zero, unless a grammar mask leaves only such tokens: with minus
# infinity there would be no distribution then. It stays finite in float32 under temperatures and penalties.
IMPOSSIBLE_LOGIT = -1e30


def over_vocabulary(logits: Tensor, size: int, ids: Tensor | None = None) -> Tensor:
    """Expand a draft's logits [..., C] to [..., V] over ``size`` tokens, ``IMPOSSIBLE_LOGIT`` for those that it lacks.

    ``ids`` [C]: the token of each logit; None: the first ones, in order.
    """
    if ids is None and logits.shape[-1] >= size:
        return logits[..., :size]
    full = logits.new_full((*logits.shape[:-1], size), IMPOSSIBLE_LOGIT)
    if ids is not None:
        return full.index_copy_(-1, ids, logits)
    full[..., : logits.shape[-1]] = logits
    return full


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"int32"``."""
    return str(dtype).removeprefix("torch.")


def joined(chunks: Sequence[Tensor]) -> Tensor:
    """Concatenate chunks of rows; a single one is not copied, and none give an empty tensor."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(list(chunks)) if chunks else torch.empty(0)


def scatter_rows(values: Tensor, rows: Sequence[int], batch: int, fill: int = 0) -> Tensor:
    """Scatter values [A, ...] of the requests ``rows`` to [B, ...]; the other rows are ``fill``."""
    if list(rows) == list(range(batch)):
        return values
    index = torch.tensor(rows, device=values.device)
    return values.new_full((batch, *values.shape[1:]), fill).index_copy_(0, index, values)


def ancestor_matrix(parents: Tensor) -> Tensor:
    """Return bool [B, N, N], on the CPU, from parents [B, N] (-1: the root): [b, i, j] is set if j is i or an ancestor of i."""
    # numpy copies a row of a small matrix ten times faster than torch
    batch, nodes = parents.shape
    sees = np.zeros((batch, nodes, nodes), dtype=bool)
    for tree, above in zip(sees, parents.tolist(), strict=True):
        for node, parent in enumerate(above):  # parents precede their children, so the ancestors are known
            if parent >= 0:
                tree[node] = tree[parent]
            tree[node, node] = True
    return torch.from_numpy(sees)
