"""Data types of speculative decoding, shared by all modules.

This module knows nothing of models, caches, methods or the loop.

A *round* is: propose -> score -> verify -> commit. Each arrow is one of the dataclasses below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.errors import OutriderError as OutriderError
from outrider.errors import first_line as first_line
from outrider.sampling_params import Grammar as Grammar
from outrider.sampling_params import Matcher as Matcher
from outrider.sampling_params import SamplingParams as SamplingParams

# Logit of a token that a draft cannot emit. Its probability is zero unless masks (a grammar's) leave no other token; minus
# infinity would leave no distribution then. It stays finite in float32 under temperatures and penalties.
UNSAID = -1e30


@dataclass(slots=True, eq=False)
class Request:
    """One running generation. Only the scheduler appends to ``token_ids``; all other code only reads."""

    request_id: str
    token_ids: list[int]  # committed tokens: the prompt, then the output
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # params.seed, or a random one; sample i of n has its own
    generator: torch.Generator  # on the CPU, seeded with `seed`
    matcher: Matcher | None = None  # of params.grammar
    num_draft_tokens: int | None = None  # requested K, 0 for plain decoding; None: the policy decides

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class Randomness(Protocol):
    """The two random decisions of a verifier. Tests replace it by one that enumerates every outcome."""

    def bernoulli(self, probs: Tensor) -> Tensor:
        """Draw independent Bernoulli variables: float [B, N] in [0, 1] -> bool [B, N]."""
        ...

    def categorical(self, probs: Tensor) -> Tensor:
        """Sample one index per row: float [B, V] (each row sums to 1) -> int64 [B]."""
        ...


class BatchSampler(Randomness, Protocol):
    """Turn logits into probabilities and tokens for the B requests of a round; ``outrider.sampling.Sampler`` implements it.

    ``logits[:, j]`` follows draft ``start + j - 1`` (-1: the last committed token). ``drafts`` [B, >= start + M - 1] are the
    round's drafts so far, a chain or, with ``parents``, a tree. ``lens`` [B]: drafts that count; the logits beyond are ignored.
    """

    requests: tuple[Request, ...]
    vocab_size: int
    device: torch.device
    coupled: bool  # noise is keyed by (seed, position): the same text with drafts and without

    @property
    def is_deterministic(self) -> bool:
        """Whether ``tokens`` decides the round and no coin is needed: all requests are greedy, or noise is coupled."""
        ...

    def tokens(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """[B, M, V] -> int64 [B, M]: the argmax, with coupled noise where asked for, or a draw. Raises ``InvalidLogits``."""
        ...

    def probs(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """[B, M, V] -> float32 [B, M, V] after the whole sampler set; greedy rows are one-hots. Raises ``InvalidLogits``."""
        ...

    def confidences(
        self, logits: Tensor, drafts: Tensor | None = None, parents: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """[B, M, V] -> [B, M, V]: the probability that ``tokens`` returns each token in a deterministic round."""
        ...

    def draw(self, probs: Tensor, index: int) -> Tensor:
        """Draw draft ``index`` of the round: [B, V] -> int64 [B]; it depends on (seed, committed length, index) alone."""
        ...

    def take(self, rows: Sequence[int]) -> BatchSampler:
        """The sampler of these requests alone, in this order."""
        ...


@dataclass(frozen=True)
class Context:
    """The B running requests of a round. Row b of every tensor of this round belongs to ``requests[b]``."""

    requests: tuple[Request, ...]
    limits: tuple[int, ...]  # maximum useful drafts per request in this round (0 allowed); B entries
    sampler: BatchSampler  # turns logits into probabilities or tokens, for draft and target alike
    hidden: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    # index -> B tensors [T_b, H]: target features (see Scores) of the committed tokens read since the last call, in order. All
    # calls together cover the sequence from its first token, each token once, without the last one, which no pass has read
    # yet. They start again after ``Proposer.release``.

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.requests)

    def take(self, rows: Sequence[int]) -> Context:
        """The context of these requests alone, in this order."""
        if len(rows) == len(self.requests):
            return self
        hidden = {index: [states[b] for b in rows] for index, states in self.hidden.items()}
        requests, limits = tuple([self.requests[b] for b in rows]), tuple([self.limits[b] for b in rows])
        return Context(requests, limits, self.sampler.take(rows), hidden)

    def limited(self, lengths: Sequence[int]) -> Context:
        """Return the same context with at most ``lengths[b]`` drafts for request b."""
        limits = tuple([min(pair) for pair in zip(self.limits, lengths, strict=True)])
        return Context(self.requests, limits, self.sampler, self.hidden)


@dataclass(frozen=True)
class PartialPass:
    """What drafting computed with the target's own first layers. The score takes it over and runs the other layers only."""

    depth: int  # layers run
    starts: Mapping[str, int]  # request id -> tokens in the target's cache before the first of ``tokens``
    tokens: Mapping[str, Sequence[int]]
    hidden: Mapping[str, Tensor]  # [T, H]: states after those layers, of each of the tokens

    def num_known(self, request_id: str, start: int, tokens: Sequence[int]) -> int:
        """How many of these tokens, which follow ``start`` cached ones, it holds from the first on."""
        if self.starts.get(request_id) != start:
            return 0
        pairs = enumerate(zip(tokens, self.tokens[request_id], strict=False))
        return next((at for at, (token, known) in pairs if token != known), min(len(tokens), len(self.tokens[request_id])))


@dataclass(frozen=True)
class Proposal:
    """Drafts for B requests: a chain (``parents=None``) or a tree of N nodes.

    In a tree ``parents[b, i] < i`` (-1 is the root, the last committed token) and siblings are ordered as they are to be tried.
    ``probs[b, i]`` is the distribution that draft i was sampled from, *given that its earlier siblings were sampled and
    rejected*: sampling without replacement is up to the proposer, and the verifier is independent of the method.
    """

    token_ids: Tensor  # [B, N] int64; root and bonus excluded; right-padded
    lens: Tensor  # [B] int64, on the CPU: valid drafts per request; 0 allowed
    probs: Tensor | None = None  # [B, N, V] float32; None: every draft is a point mass
    parents: Tensor | None = None  # [B, N] int64; None: a chain
    partial_pass: PartialPass | None = None  # where the target's own first layers drafted
    forced: Tensor | None = None  # [B, N] bool, on the CPU: drafts that a grammar determines; set by the engine only
    own: Tensor | None = None  # [B, N] bool, on the CPU: drafts that are the proposer's; given with ``forced``

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu") -> Proposal:
        """Return a proposal without drafts for ``batch`` requests: plain decoding."""
        return Proposal(torch.zeros(batch, 0, dtype=torch.long, device=device), torch.zeros(batch, dtype=torch.long))

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[1]

    def take(self, rows: Sequence[int]) -> Proposal:
        """The drafts of these requests, in this order."""
        index = list(rows)
        return self._with(lambda values: values[index], self.lens[index])

    def narrow(self, lens: Sequence[int]) -> Proposal:
        """The first ``lens[b]`` drafts of each request, no wider than the longest."""
        width = max(lens, default=0)
        if width == 0:
            return replace(Proposal.empty(len(lens), self.token_ids.device), partial_pass=self.partial_pass)
        return self._with(lambda values: values[:, :width], torch.tensor(lens, dtype=torch.long))

    def first_paths(self) -> tuple[Proposal, Tensor]:
        """Of each request's tree the chain of first children, and the index of each of its drafts in the tree: [B, D].

        What depends on no draws but those of the drafts themselves: their distributions stay true.
        """
        assert self.parents is not None
        paths: list[list[int]] = []
        for parents, count in zip(self.parents.tolist(), self.lens.tolist(), strict=True):
            path: list[int] = []
            for node in range(count):
                if parents[node] == (path[-1] if path else -1):
                    path.append(node)
            paths.append(path)
        depth = max(map(len, paths), default=0)
        nodes = torch.tensor([path + [0] * (depth - len(path)) for path in paths], dtype=torch.long).view(len(paths), depth)
        index = (torch.arange(len(paths))[:, None], nodes)
        lens = torch.tensor([len(path) for path in paths], dtype=torch.long)
        return replace(self._with(lambda values: values[index], lens), parents=None), nodes

    def scatter(self, rows: Sequence[int], batch: int) -> Proposal:
        """The same drafts as those of requests ``rows`` of a larger batch, whose other requests have none."""
        index = torch.tensor(rows, dtype=torch.long)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(batch, *values.shape[1:]).index_copy_(0, index.to(values.device), values)

        return self._with(spread, spread(self.lens))

    def _with(self, change: Callable[[Tensor], Tensor], lens: Tensor) -> Proposal:
        probs = None if self.probs is None else change(self.probs)
        parents = None if self.parents is None else change(self.parents)
        forced, own = (None if mask is None else change(mask) for mask in (self.forced, self.own))
        return replace(self, token_ids=change(self.token_ids), lens=lens, probs=probs, parents=parents, forced=forced, own=own)


@dataclass(frozen=True)
class Scores:
    """The target's scores of a proposal. Row 0 follows the root (the last committed token), row i + 1 follows draft i.

    Rows beyond ``lens[b]`` are undefined. Hidden states are numbered as transformers' ``hidden_states``: 0 is the embedding's
    output, i the input of layer i (the output of layer i - 1), and L, the number of layers, the output after the final norm.
    """

    logits: Tensor  # [B, N + 1, V] float32
    hidden: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    # index -> B tensors [T_b + 1 + lens[b], H]: of the committed tokens before the root that this round read, in order, then of
    # the root and of its drafts
    first_layer: int = 0  # first layer of the pass: drafting already ran those before it


@dataclass(frozen=True)
class Verdict:
    """A verifier's decision. The round emits ``num_accepted[b] + 1`` tokens: the drafts on the path, then ``next_token``."""

    path: Tensor  # [B, D] int64, on the CPU: indices of accepted drafts, root to leaf, -1 padded
    num_accepted: Tensor  # [B] int64, on the CPU
    next_token: Tensor  # [B] int64, on the CPU: recovered (after a rejection) or bonus (all accepted) token

    def take(self, rows: Sequence[int]) -> Verdict:
        """The verdict on these requests, in this order."""
        index = list(rows)
        return Verdict(self.path[index], self.num_accepted[index], self.next_token[index])


@dataclass(slots=True)
class PhaseTimes:
    """Seconds by phase of a round. ``host`` is everything that no other phase is."""

    draft: float = 0.0
    score: float = 0.0
    verify: float = 0.0
    host: float = 0.0
    read: float = 0.0  # prefill of prompts by the target, between rounds
    draft_prefill: float = 0.0  # prefill of prompts by the proposer, between rounds

    @property
    def total(self) -> float:
        return self.draft + self.score + self.verify + self.host + self.read + self.draft_prefill

    def by_phase(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, other: PhaseTimes) -> None:
        self.draft += other.draft
        self.score += other.score
        self.verify += other.verify
        self.host += other.host
        self.read += other.read
        self.draft_prefill += other.draft_prefill


@dataclass(frozen=True, slots=True)
class Round:
    """One round in numbers, as the ledger booked it: drafts asked for, proposed and accepted, and seconds.

    Depths and what was accepted are those of the proposer's drafts, without those that a grammar left no choice about.
    """

    k: int  # drafts asked for
    lens: list[int]  # drafts scored, per request
    depths: list[int]  # the longest path of drafts, per request: lens, unless they are trees
    num_accepted: list[int]
    times: PhaseTimes
    first_layer: int = 0  # of the target pass: drafting ran the layers before it
    is_cold: bool = False  # a plain round with cold CPU caches, soon after a model drafted
    judged: list[int] | None = None  # steps of depth reached; given for trees, whose accepted path may end at a leaf early
    forced: list[int] | None = None  # drafts per request, among ``lens``, that a grammar left no choice about; None: no such
    reaches: list[int] | None = None  # the longest path of the proposer's drafts, forced ones included; None: ``depths``

    @property
    def num_judged(self) -> list[int]:
        """Steps of depth that the verifier reached: all drafts before them were accepted."""
        if self.judged is not None:
            return self.judged
        return [min(accepted + 1, depth) for accepted, depth in zip(self.num_accepted, self.depths, strict=True)]


@dataclass(frozen=True)
class Finding:
    """One check before serving, and its result."""

    level: Literal["ok", "note", "suspicious", "wrong"]  # wrong: it does not fit
    topic: str  # "vocabulary"
    text: str  # one sentence
