"""Rounds of score and commit on a runner, compared with the model's own forward pass without a cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from architectures.tiny import randomised
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider import native
from outrider.runner import ModelRunner, kernels
from outrider.runner.kv_cache import KVCache
from outrider.runner.layouts import Layouts
from outrider.types import Context, Proposal, Request, SamplingParams, Verdict

VOCAB = 67  # a prime, so that no padding applies by chance
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # matrix units round their inputs


def make_model(config: PreTrainedConfig, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
    """Return a random float32 model with weights large enough that its greedy tokens vary."""
    torch.manual_seed(seed)
    return randomised(AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32))


@torch.no_grad()
def plain_logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Return [T, V] of the model's own forward pass: its own attention, no cache, no padding."""
    return model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].float()


def contents(cache: KVCache, request_id: str) -> list[Tensor]:
    """Return a request's committed keys and values: [L, Hkv, T, D] each."""
    row, used = cache.row(request_id), cache.cached_len(request_id)
    return [store[:, row, :, :used] for store in cache.stores]


def force_reference(monkeypatch) -> None:
    """Make the runner work as without a C++ compiler, even if the C++ operators are already loaded."""
    monkeypatch.setattr(native, "load", lambda: False)
    monkeypatch.setattr(torch.ops.outrider, "attend", kernels.reference_attend)


def force_padding(monkeypatch) -> None:
    """Pad passes to the longest request, as on a device where passes are captured."""
    init = Layouts.__init__

    def padded(self, *args) -> None:
        init(self, *args)
        self.is_padded = True

    monkeypatch.setattr(Layouts, "__init__", padded)


OPERATORS = ("kernels", "reference", "padded reference")


def force(operators: str, monkeypatch) -> None:
    """Make the runner use one of ``OPERATORS``."""
    if "reference" in operators:
        force_reference(monkeypatch)
    if "padded" in operators:
        force_padding(monkeypatch)


def make_request(name: str, tokens: Sequence[int]) -> Request:
    return Request(name, list(tokens), len(tokens), SamplingParams(), 0)


def make_text(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def proposal_of(chains: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None) -> Proposal:
    """Return ragged drafts, right-padded with token 0 (and, in trees, with children of the root)."""
    width = max(map(len, chains))
    tokens = [list(chain) + [0] * (width - len(chain)) for chain in chains]
    tree = None
    if parents is not None:
        tree = torch.tensor([list(row) + [-1] * (width - len(row)) for row in parents]).view(len(chains), width)
    lens = torch.tensor([len(chain) for chain in chains])
    return Proposal(torch.tensor(tokens, dtype=torch.long).view(len(chains), width), lens, None, tree)


def node_paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the path of each node, from a child of the root to the node."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def verdict_of(paths: Sequence[Sequence[int]], next_tokens: Sequence[int]) -> Verdict:
    return Verdict([list(path) for path in paths], list(next_tokens))


class Rounds:
    """A batch of requests on a runner. Every score is compared with the plain model; the caller decides each commit."""

    def __init__(self, runner: ModelRunner, model: PreTrainedModel, texts: Sequence[Sequence[int]], tolerance: float = 0):
        self.runner, self.model = runner, model
        self.tolerance = tolerance or TOLERANCE[runner.dtype]
        self.requests = [make_request(f"r{index}", text) for index, text in enumerate(texts)]
        self.largest_error = 0.0
        self.hidden: tuple[int, ...] = ()  # hidden states to report

    def step(
        self,
        chains: Sequence[Sequence[int]],
        accepted: Sequence[Sequence[int]],
        next_tokens: Sequence[int],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Score the drafts, check the logits of every node, and keep the nodes ``accepted`` of each request."""
        context = Context(tuple(self.requests), tuple(map(len, chains)), None)
        scores = self.runner.score(context, proposal_of(chains, parents), self.hidden)
        for b, (request, chain) in enumerate(zip(self.requests, chains, strict=True)):
            paths = node_paths(parents[b] if parents is not None else range(-1, len(chain) - 1))
            for node, path in enumerate([[], *paths]):
                text = request.token_ids + [chain[i] for i in path]
                self._compare(scores.logits[b, node], plain_logits(self.model, text)[-1], f"row {b}, node {node - 1}")
        self.runner.commit(context, verdict_of(accepted, next_tokens))
        for request, chain, path, token in zip(self.requests, chains, accepted, next_tokens, strict=True):
            request.token_ids += [*(chain[i] for i in path), token]

    def _compare(self, got: Tensor, expected: Tensor, where: str) -> None:
        error = (got - expected).abs().max().item()
        self.largest_error = max(self.largest_error, error)
        assert error <= self.tolerance * max(1.0, expected.abs().max().item()), f"{where}: logits are off by {error:.3g}"


def untouched(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model for the runner to modify."""
    return copy.deepcopy(model)
