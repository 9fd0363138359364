"""Log-probabilities of prompts, for ``echo``: each is generated again under a grammar that allows only its own next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outrider.engine.logprobs import TokenLogprobs
from outrider.errors import TARGET_FAILED
from outrider.server.bridge import TargetFailed
from outrider.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.llm import LLM
    from outrider.server.bridge import EngineBridge
    from outrider.server.config import Client


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt at the beginning of an answer."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token; the first, which nothing predicts, is empty


class ForcedSequence:
    """Grammar state that allows one sequence of tokens."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._token_ids, self._vocab_size = list(token_ids), vocab_size

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
        place = len(output) + len(path)
        if list(path) != self._token_ids[len(output) : place]:
            return None
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[self._token_ids[place : place + 1]] = True
        return mask


async def prompt_logprobs(
    llm: LLM, bridge: EngineBridge, prompts: Sequence[list[int]], num_top: int, deadline: float, client: Client
) -> list[list[TokenLogprobs]]:
    """Return the log-probabilities of each prompt's tokens. Raises ``TargetFailed`` if the target fails."""
    requests = [_request(llm, prompt, num_top) for prompt in prompts]
    found: dict[str, list[TokenLogprobs]] = {request.request_id: [TokenLogprobs(0.0)] for request in requests}
    longer = [[request] for request, prompt in zip(requests, prompts, strict=True) if len(prompt) > 1]
    stream = bridge.submit(longer, deadline, client, is_preparation=True)
    try:
        async for emission in stream:
            if emission.finish_reason == "error":
                raise TargetFailed(emission.error or TARGET_FAILED)
            found[emission.request_id] += emission.logprobs or []
    finally:
        stream.close()
    return list(found.values())


def _request(llm: LLM, prompt: list[int], num_top: int) -> Request:
    params = SamplingParams(max_tokens=max(len(prompt) - 1, 1), logprobs=num_top, ignore_eos=True)
    (request,) = llm.requests_for(prompt[:1], params)
    request.matcher = ForcedSequence(prompt[1:], llm.runner.vocab_size)
    return request
