"""An engine without a model: the next token depends on the last two tokens through a fixed random table."""

from __future__ import annotations

import torch

from outrider.engine.engine import Emission, Engine
from outrider.engine.policy import FixedLength
from outrider.engine.scheduler import Scheduler
from outrider.proposers.base import ScriptedProposer
from outrider.proposers.plain import PlainProposer
from outrider.runner.cost_book import CostBook
from outrider.types import Context, Proposal, Request, SamplingParams, Scores, Verdict
from outrider.verifiers.rejection import RejectionVerifier

VOCAB = 17
EOS = 0


class TableRunner:
    """Runner whose logits are rows of the table.

    Its "cache" copies the committed tokens and is compared with the requests each round.
    """

    vocab_size = VOCAB
    num_layers, hidden_size = 4, 3
    device = torch.device("cpu")
    supports_trees, max_drafts = True, None

    def __init__(self, max_batch=8, max_len=200, eos_bias=-100.0, seed=0, sharpness=2.0):
        self.max_batch, self.max_len = max_batch, max_len
        self.costs = CostBook()
        table = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness
        table[:, :, EOS] += eos_bias
        self.table = table
        self.cached: dict[str, list[int]] = {}
        self.num_scores = 0
        self.chunk: int | None = None  # prompt tokens prefilled per step
        self.short = max_len  # number of uncached tokens below which a prompt is short
        self.fails_for: set[str] = set()
        self.nan_for: set[str] = set()
        self.kept: list[list[int]] | None = None  # cached texts of finished requests; None: they are dropped

    def logits_after(self, text: list[int]) -> torch.Tensor:
        return self.table[_end(text)]

    def score(self, context: Context, proposal: Proposal, hidden: tuple[int, ...] = ()) -> Scores:
        self.num_scores += 1
        assert len(context.requests) <= self.max_batch
        width = proposal.num_nodes + 1
        logits = torch.full((len(context.requests), width, VOCAB), float("nan"))  # rows beyond lens are undefined
        drafts, lens = proposal.token_ids.tolist(), proposal.lens.tolist()
        parents = None if proposal.parents is None else proposal.parents.tolist()
        before = []  # committed tokens of each request that this pass reads, up to the root
        places, ends = [], []  # row of logits, and the last two tokens before it
        for b, request in enumerate(context.requests):
            if request.request_id in self.fails_for:
                raise RuntimeError("out of memory")
            known = self.cached.setdefault(request.request_id, [])
            assert known == request.token_ids[: len(known)], "the cache is not a prefix of the committed text"
            if hidden:
                before.append([request.token_ids[: i + 1] for i in range(len(known), len(request.token_ids) - 1)])
            after = {-1: _end(request.token_ids)}
            for i in range(lens[b]):
                after[i] = after[i - 1 if parents is None else parents[b][i]][1], drafts[b][i]
            if request.request_id not in self.nan_for:
                places += [(b, node + 1) for node in after]
                ends += after.values()
        if places:
            logits[tuple(zip(*places, strict=True))] = self.table[tuple(zip(*ends, strict=True))]
        self._drafts = drafts
        rows = [[*map(self.logits_after, texts), *logits[b, : 1 + lens[b]]] for b, texts in enumerate(before)]
        return Scores(logits, {layer: [torch.stack(row)[:, : self.hidden_size] + layer for row in rows] for layer in hidden})

    def commit(self, context: Context, verdict: Verdict) -> None:
        for request, drafts, path in zip(context.requests, self._drafts, verdict.paths, strict=True):
            self.cached[request.request_id] = request.token_ids + [drafts[i] for i in path]

    def prefill(self, request_ids, texts, hidden=()) -> list[bool]:
        """Prefill nothing, so that prompts are processed by the first round, unless a test sets ``chunk``."""
        if self.chunk is None:
            return [True] * len(texts)
        left, done = self.chunk, []
        for request_id, text in zip(request_ids, texts, strict=True):
            known = self.cached.setdefault(request_id, [])
            count = min(left, len(text) - 1 - len(known))
            known += text[len(known) : len(known) + count]
            left -= count
            done.append(len(known) == len(text) - 1)
        return done

    def is_prefilled(self, request_ids, texts) -> list[bool]:
        pairs = zip(request_ids, texts, strict=True)
        return [len(text) - 1 - len(self.cached.get(request_id, [])) < self.short for request_id, text in pairs]

    def admit(self, request_id, num_tokens) -> bool:
        return True

    def num_cached(self, request_id, text) -> int:
        return max([shared_length(known, text[:-1]) for known in self.kept or ()], default=0)

    def start(self, request_id, text, limit=None) -> int:
        known = self.cached[request_id] = list(text[: self.num_cached(request_id, text)][:limit])
        return len(known)

    def retire(self, request_ids) -> None:
        if self.kept is not None:
            self.kept += [self.cached[request_id] for request_id in request_ids if request_id in self.cached]
        self.release(request_ids)

    def release(self, request_ids) -> None:
        for request_id in request_ids:
            self.cached.pop(request_id, None)

    def fork(self, source_id, new_id, num_tokens) -> bool:
        self.cached[new_id] = list(self.cached[source_id][:num_tokens])
        return True

    def rollback(self, request_id, num_tokens) -> None:
        del self.cached[request_id][num_tokens:]

    def measure_pass(self, width, batch, cache_len, **_):
        return 0.001


def shared_length(first, second) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _end(text: list[int]) -> tuple[int, int]:
    """Return the two tokens that the next one depends on."""
    return (text[-2] if len(text) > 1 else 0, text[-1])


def make_engine(proposer=None, k=0, policy=None, runner=None, detokenizer=None, verifier=None, **options) -> Engine:
    runner = runner or TableRunner()
    scheduler = Scheduler(runner.max_batch, runner.max_len, [EOS], detokenizer)
    verifier, policy = verifier or RejectionVerifier(), policy or FixedLength(k)
    return Engine(runner, proposer or PlainProposer(), verifier, policy, scheduler, **options)


def make_request(request_id: str, prompt: list[int], **params) -> Request:
    seed = params.get("seed") or 0
    return Request(request_id, list(prompt), len(prompt), SamplingParams(**params), seed)


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Emission]]:
    """Run requests to their end and return all emissions of each."""
    for request in requests:
        engine.add(request)
    found: dict[str, list[Emission]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for emission in engine.step():
            found[emission.request_id].append(emission)
    return found


def outputs(emissions: dict[str, list[Emission]]) -> dict[str, tuple]:
    """Return the output of each request: tokens, text and finish reason."""
    return {
        request_id: (
            [token for emission in each for token in emission.token_ids],
            "".join(emission.text for emission in each),
            each[-1].finish_reason,
        )
        for request_id, each in emissions.items()
    }


def greedy_continuation(runner: TableRunner, text: list[int], count: int) -> list[int]:
    """Return the greedy continuation by the table."""
    text = list(text)
    for _ in range(count):
        text.append(int(runner.logits_after(text).argmax()))
    return text[-count:] if count else []


def oracle(runner: TableRunner, right: int | None = None) -> ScriptedProposer:
    """Draft k tokens: the first ``right`` (default: all) equal those of greedy decoding, and the next one differs."""

    def chains(context, k):
        drafts = []
        for request, limit in zip(context.requests, context.limits, strict=True):
            chain = greedy_continuation(runner, request.token_ids, min(k, limit))
            if right is not None and right < len(chain):
                chain[right] = 1 + chain[right] % (VOCAB - 1)
            drafts.append(chain)
        return drafts

    return ScriptedProposer.of_chains(chains)
