"""Grammar masks: allowed tokens at each position, given the committed and drafted tokens before it.

A dead end is a sequence after which the grammar and the token masks of a request allow no token, or for which its matcher
fails. A committed dead end is an error of the request. Drafts that lead into one are harmless: drafts after them are dropped,
and if the target accepts them, the last one becomes the round's next token, as in plain decoding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.types import OutriderError, Proposal, Request, RequestFault, SamplingParams, Verdict

logger = logging.getLogger(__name__)

NO_TOKENS = torch.zeros(0, dtype=torch.bool)


class GrammarMasks:
    """Masks of requests with grammars."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = [(b, request) for b, request in enumerate(requests) if request.matcher is not None]
        self.is_empty = not self._requests

    def apply_(self, scores: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, widths: Sequence[int]) -> None:
        """Mask tokens in the first ``widths[b]`` rows of scores [B, M, V], in place.

        Rows after a draft that violates the grammar or leads into a dead end are unchanged.
        """
        for b, request in self._requests:
            draft_ids = [] if drafts is None else drafts[b].tolist()
            parent_ids = None if parents is None else parents[b].tolist()
            banned = torch.zeros(widths[b], scores.shape[-1], dtype=torch.bool)
            for row in range(widths[b]):
                path = path_to(start + row - 1, draft_ids, parent_ids)
                allowed = allowed_after(request, path) if path else allowed_tokens(request, path)
                if allowed is not None and not (path and is_empty(allowed)):
                    banned[row] = ~allowed
            scores[b, : widths[b]].masked_fill_(banned.to(scores.device), -math.inf)  # one copy to a GPU


def allowed_tokens(request: Request, path: Sequence[int]) -> Tensor | None:
    """Return bool [V]: tokens that a request's grammar and token masks allow after its output and the drafts of ``path``.

    None without a grammar, and after drafts that violate it or end the text. Raises ``RequestFault`` if the matcher fails.
    """
    if request.matcher is None:
        return None
    try:
        allowed = request.matcher.allowed(request.token_ids[request.num_prompt_tokens :], path)
        mask = None if allowed is None else token_mask(request.params, len(allowed))
        return allowed if allowed is None or mask is None else allowed & mask
    except Exception as error:
        failed = f"the grammar failed: {type(error).__name__}: {error}"
        raise RequestFault([request.request_id], str(error) if isinstance(error, OutriderError) else failed) from error


def banned_tokens(params: SamplingParams) -> set[int]:
    """Return the tokens that a request bans, also by a bias of minus infinity."""
    return {*params.banned_token_ids, *(token for token, bias in params.logit_bias.items() if bias == -math.inf)}


def token_mask(params: SamplingParams, vocab_size: int) -> Tensor | None:
    """Return bool [V]: tokens that the token masks of a request allow; None without any."""
    banned = banned_tokens(params)
    if params.allowed_token_ids is None and not banned:
        return None
    mask = torch.full((vocab_size,), params.allowed_token_ids is None)
    mask[list(params.allowed_token_ids or ())] = True
    mask[list(banned)] = False
    return mask


def allowed_after(request: Request, path: Sequence[int]) -> Tensor | None:
    """Return ``allowed_tokens``, or an empty mask if the matcher fails; the target reports that once tokens are committed."""
    try:
        return allowed_tokens(request, path)
    except RequestFault:
        logger.debug("no drafts after %s for request %s", list(path), request.request_id, exc_info=True)
        return NO_TOKENS


def is_empty(allowed: Tensor) -> bool:
    """Return whether a mask on the CPU allows no token."""
    return not allowed.numpy().any()


def is_dead_end(request: Request, path: Sequence[int]) -> bool:
    """Return whether no token may follow a request's output and the drafts of ``path``."""
    allowed = allowed_after(request, path)
    return allowed is not None and is_empty(allowed)


def without_dead_ends(verdict: Verdict, proposal: Proposal, requests: Sequence[Request]) -> Verdict:
    """Return the verdict with the last accepted draft as the round's next token if it leads into a dead end.

    No token can follow it, and the verifier's next token was sampled from unmasked logits. The output distribution is
    unchanged.
    """
    paths, next_tokens = list(verdict.paths), list(verdict.next_tokens)
    for b, request in enumerate(requests):
        if request.matcher is not None and paths[b]:
            tokens = proposal.token_ids[b, paths[b]].tolist()
            if is_dead_end(request, tokens):
                paths[b], next_tokens[b] = paths[b][:-1], tokens[-1]
    return Verdict(paths, next_tokens)


def path_to(node: int, drafts: Sequence[int], parents: Sequence[int] | None) -> list[int]:
    """Return the drafts from the root to a node, inclusive; -1 is the root."""
    if parents is None:
        return list(drafts[: node + 1])
    path = []
    while node >= 0:
        path.append(drafts[node])
        node = min(parents[node], node - 1)  # rows of requests without drafts are undefined
    return path[::-1]
