"""Outrider's proposers of the text inside vLLM: the class that ``speculative_config = {"method": "custom_class", ...}`` names.

vLLM 0.32 (``v1/spec_decode/custom_class_proposer.py``) makes it from its ``VllmConfig`` and, after each step, calls
``propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...)``. It does not say which request a row is:
rows move, and requests leave and come back. So requests are known by their text: a row goes on with the longest known
text that it begins with. This module imports no vLLM, so that it can be tested without one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.method_text import split_method
from outrider.proposers.base import Proposer
from outrider.proposers.method import Setting
from outrider.registry import PROPOSERS
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError, Request, SamplingParams

logger = logging.getLogger(__name__)

Tokens = NDArray[np.int32]
KEY = "outrider"  # in vLLM's additional_config: {"method": "name:option=value"}
FAULT_PAUSE = 64  # steps without drafts after a fault; each further one doubles it, as in outrider.engine.guard
MAX_DOUBLINGS = 6
PATIENCE = 64  # steps after which a text that no row goes on with has ended: it may only have been put off


@dataclass(eq=False, slots=True)
class Known:
    """A text as it stood when it was last seen, and the request that the proposer knows it by."""

    request: Request
    tokens: Tokens
    last_seen: int = 0


class TextProposer:
    """A proposer that reads the text alone, as vLLM calls it."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ``OutriderError`` where the config names no method, or one that needs more than the text."""
        named = (vllm_config.additional_config or {}).get(KEY)
        if not isinstance(named, dict) or "method" not in named:
            raise OutriderError('--additional-config must hold {"outrider": {"method": ...}}: see outrider export --to vllm')
        self._method = str(named["method"])
        self._proposer = build(self._method)
        self._k = min(int(vllm_config.speculative_config.num_speculative_tokens), self._proposer.max_drafts)
        self._max_len = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._texts: list[Known] = []  # of the rows, then those that no row went on with
        self._sampler: Sampler | None = None
        self._num_steps = self._num_requests = self._num_faults = self._resumes_at = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none; vLLM asks every proposer."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **unused: Any
    ) -> list[list[int]]:
        """Drafts for each row; none for one that sampled nothing, as in the middle of a prompt, or whose context is full.

        ``num_tokens_no_spec`` [rows]: lengths of the texts with what was just sampled; ``token_ids_cpu`` [rows, max_len].
        """
        self._num_steps += 1
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._num_steps < self._resumes_at:
            return drafts
        rows = [row for row, sampled in enumerate(sampled_token_ids) if len(sampled)]
        try:
            known = self._recognise([token_ids_cpu[row, : int(num_tokens_no_spec[row])] for row in rows])
            self._forget()
            for row, chain in zip(rows, self._drafts(known) if rows else (), strict=True):
                drafts[row] = chain
        except Exception:  # in vLLM it would end the engine, with every request
            pause = FAULT_PAUSE << min(self._num_faults, MAX_DOUBLINGS)
            logger.exception("the proposer failed: no drafts for %d steps, then every text is read again", pause)
            self._num_faults, self._resumes_at = self._num_faults + 1, self._num_steps + pause
            self._texts.clear()
            self._proposer = build(self._method)
        return drafts

    def _drafts(self, known: Sequence[Known]) -> list[list[int]]:
        """Drafts for each text."""
        requests = tuple(text.request for text in known)
        limits = tuple(max(0, min(self._k, self._max_len - len(request.token_ids) - 1)) for request in requests)
        if self._sampler is None or self._sampler.requests != requests:
            self._sampler = Sampler(requests, self._vocab_size)
        proposal = self._proposer.propose(Context(requests, limits, self._sampler), self._k)
        found = zip(proposal.token_ids.tolist(), proposal.lens.tolist(), limits, strict=True)
        return [ids[: min(count, limit)] for ids, count, limit in found]

    def _recognise(self, texts: Sequence[Tokens]) -> list[Known]:
        """The request of each text, with its new tokens read; a new one where no known text is its beginning."""
        free = list(self._texts)
        found: list[Known] = []
        for place, tokens in enumerate(texts):
            expected = self._texts[place] if place < len(self._texts) else None
            known = expected if expected in free and _begins(tokens, expected) else None
            if known is None:
                known = max((text for text in free if _begins(tokens, text)), key=lambda text: len(text.tokens), default=None)
            if known is None:
                known = Known(self._new_request(), tokens[:0])
            else:
                free.remove(known)
            known.request.token_ids.extend(tokens[len(known.tokens) :].tolist())
            known.tokens, known.last_seen = np.array(tokens), self._num_steps
            found.append(known)
        self._texts = found + free
        return found

    def _new_request(self) -> Request:
        self._num_requests += 1
        return Request(f"vllm-{self._num_requests}", [], 0, SamplingParams(), 0, torch.Generator())

    def _forget(self) -> None:
        """Releases what no row went on with for long: only then may the proposer count it among earlier texts."""
        ended = [text for text in self._texts if self._num_steps - text.last_seen >= PATIENCE]
        if ended:
            self._texts = [text for text in self._texts if text not in ended]
            self._proposer.retire([text.request.request_id for text in ended])


def _begins(tokens: Tokens, text: Known | None) -> bool:
    """Whether the tokens begin with a known text. Its end is looked at first: that is where texts differ."""
    if text is None or not 0 < len(text.tokens) <= len(tokens):
        return False
    last = len(text.tokens) - 1
    return bool(tokens[last] == text.tokens[last]) and np.array_equal(tokens[: last + 1], text.tokens)


def build(method: str) -> Proposer:
    """A proposer without a target. Raises ``OutriderError`` for a method that needs one."""
    name, options = split_method(method)
    factory = PROPOSERS.get(name)
    if not factory.reads_text_only:
        raise OutriderError(f"method {name!r} needs more than the text: only proposers that read nothing else run inside vLLM")
    proposer: Proposer = factory.build(Setting.without_target(options=options))
    return proposer
