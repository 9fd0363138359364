"""Hidden states that wait for the proposer, and those of prompts for samples of the same prompt."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.features import FeatureStore
from outrider.types import Request, SamplingParams

LAYER, PROMPT = 2, list(range(8))


def request(request_id: str, num_generated: int = 0) -> Request:
    return Request(request_id, PROMPT + [9] * num_generated, len(PROMPT), SamplingParams(), 0)


def read(store: FeatureStore, source: Request) -> None:
    """Keep the states of a pass that reads all tokens of a request."""
    count = len(source.token_ids)
    hidden = {LAYER: [torch.arange(float(count))[:, None]]}
    store.keep(source, count, hidden, row=0, num_drafts=0, path=[])


@pytest.mark.parametrize("num_generated", [0, 5])
def test_a_sample_gets_the_states_of_its_prompt_only(num_generated: int) -> None:
    """After a failure the source is read again with its output: those states are no prompt's, so the sample is prefilled."""
    store, source = FeatureStore([LAYER]), request("source", num_generated)
    store.keep_prompt("source")
    read(store, source)
    assert store.fork("source", request("sample")) == (num_generated == 0)
    found = [states.kept(LAYER) for states in store._unseen.get("sample", [])]
    assert [len(states) for states in found] == ([len(PROMPT) - 1] if num_generated == 0 else [])


def test_a_sample_of_a_sample_has_no_states_of_its_own_prompt() -> None:
    store = FeatureStore([LAYER])
    store.keep_prompt("source")
    read(store, request("source"))
    assert store.fork("source", request("first"))
    store.keep_prompt("first")
    last = {LAYER: [torch.zeros(1, 1)]}  # its first pass reads the prompt's last token only
    store.keep(request("first"), len(PROMPT), last, row=0, num_drafts=0, path=[])
    assert not store.fork("first", request("second"))
