"""Adapter for text-based proposers in vLLM: the class for ``speculative_config = {"method": "custom_class", ...}``.

vLLM 0.32 (``v1/spec_decode/custom_class_proposer.py``) creates it from its ``VllmConfig`` and, after each step, calls
``propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...)``. It does not identify requests: rows move,
and requests leave and return. So a row is matched to the longest known sequence that is its prefix. This module does not
import vLLM, so that it can be tested without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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
FAULT_PAUSE = 64  # steps without drafts after a fault; each further one doubles it
MAX_DOUBLINGS = 6
PATIENCE = 64  # steps until an unmatched sequence counts as ended; it may have been preempted


@dataclass(eq=False, slots=True)
class Known:
    """The last known tokens of a sequence, and its request in the proposer."""

    request: Request
    tokens: Tokens
    last_seen: int = 0


class TextProposer:
    """A text-based proposer with vLLM's interface."""

    def __init__(self, vllm_config: Any) -> None:
        """Raise ``OutriderError`` if the config names no method, or one that is not text-based."""
        named = (vllm_config.additional_config or {}).get(KEY)
        if not isinstance(named, dict) or "method" not in named:
            raise OutriderError('--additional-config must contain {"outrider": {"method": ...}}: see outrider export --to vllm')
        self._method = str(named["method"])
        self._proposer = build(self._method)
        self._k = min(int(vllm_config.speculative_config.num_speculative_tokens), self._proposer.max_drafts)
        self._max_len = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._texts: list[Known] = []  # of the rows, then unmatched ones
        self._sampler: Sampler | None = None
        self._num_steps = self._num_requests = self._num_faults = self._resumes_at = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. vLLM calls this for every proposer, but there is no model."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **unused: Any
    ) -> list[list[int]]:
        """Return drafts for each row; none for rows without a sampled token (prefill) or with a full context.

        ``num_tokens_no_spec`` [rows]: lengths including the sampled tokens; ``token_ids_cpu`` [rows, max_len].
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
        except Exception:  # an exception would stop vLLM's engine
            pause = FAULT_PAUSE << min(self._num_faults, MAX_DOUBLINGS)
            logger.exception("the proposer failed: no drafts for %d steps, then a new start with all sequences", pause)
            self._num_faults, self._resumes_at = self._num_faults + 1, self._num_steps + pause
            self._texts.clear()
            self._proposer = build(self._method)
        return drafts

    def _drafts(self, known: Sequence[Known]) -> list[list[int]]:
        """Return drafts for each sequence."""
        requests = tuple(text.request for text in known)
        limits = tuple(max(0, min(self._k, self._max_len - len(request.token_ids) - 1)) for request in requests)
        if self._sampler is None or self._sampler.requests != requests:
            self._sampler = Sampler(requests, self._vocab_size)
        proposal = self._proposer.propose(Context(requests, limits, self._sampler), self._k)
        found = zip(proposal.token_ids.tolist(), proposal.lens.tolist(), limits, strict=True)
        return [ids[: min(count, limit)] for ids, count, limit in found]

    def _recognise(self, texts: Sequence[Tokens]) -> list[Known]:
        """Return the updated request of each sequence; a new one if no known sequence is its prefix."""
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
        return Request(f"vllm-{self._num_requests}", [], 0, SamplingParams(), 0)

    def _forget(self) -> None:
        """Release sequences that remain unmatched. Only afterwards do they count as earlier texts."""
        ended = [text for text in self._texts if self._num_steps - text.last_seen >= PATIENCE]
        if ended:
            self._texts = [text for text in self._texts if text not in ended]
            self._proposer.retire([text.request.request_id for text in ended])


def _begins(tokens: Tokens, text: Known | None) -> bool:
    """Return whether a known sequence is a prefix of the tokens; its end is compared first, where sequences differ."""
    if text is None or not 0 < len(text.tokens) <= len(tokens):
        return False
    last = len(text.tokens) - 1
    return bool(tokens[last] == text.tokens[last]) and np.array_equal(tokens[: last + 1], text.tokens)


def build(method: str) -> Proposer:
    """Build a proposer without a target. Raises ``OutriderError`` for a method that needs one."""
    name, options = split_method(method)
    factory = PROPOSERS.get(name)
    if not factory.is_model_free:
        raise OutriderError(f"method {name!r} is not text-based: only text-based proposers run inside vLLM")
    return factory.build(Setting.without_target(options=options))
