"""In vLLM, Outrider's proposers draft the same tokens as in Outrider, for any order of rows."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.export.vllm_adapter import FAULT_PAUSE, PATIENCE, TextProposer, build
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError, Request, SamplingParams

K, MAX_LEN, VOCAB = 6, 96, 12
METHODS = ["suffix", "suffix+ngram:min_first=3", "ngram:min_n=1:max_n=3"]


def config(method: str = "suffix", **more: Any) -> Any:
    """Return the fields of vLLM's ``VllmConfig`` that the adapter reads."""
    return SimpleNamespace(
        additional_config={"outrider": {"method": method}},
        speculative_config=SimpleNamespace(num_speculative_tokens=more.get("k", K)),
        model_config=SimpleNamespace(max_model_len=MAX_LEN, get_vocab_size=lambda: VOCAB),
    )


class Batch:
    """vLLM's persistent batch: rows of tokens; when a request ends, the last row takes its place."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def call(self, adapter: TextProposer, skipped: frozenset[int] = frozenset()) -> list[list[int]]:
        tokens = np.zeros((8, MAX_LEN), dtype=np.int32)
        for row, text in enumerate(self.texts):
            tokens[row, : len(text)] = text
        lens = np.array([len(text) for text in self.texts] + [0] * (8 - len(self.texts)), dtype=np.int32)
        sampled = [[] if row in skipped else text[-1:] for row, text in enumerate(self.texts)]
        return adapter.propose(sampled, lens, tokens, slot_mappings=None)

    def end(self, row: int) -> None:
        last = self.texts.pop()
        if row < len(self.texts):
            self.texts[row] = last


class Alone:
    """The same proposer called by Outrider's engine for a single request."""

    def __init__(self, method: str) -> None:
        self.proposer = build(method)
        self.request = Request("one", [], 0, SamplingParams(), 0)

    def drafts(self, text: list[int]) -> list[int]:
        self.request.token_ids.extend(text[len(self.request.token_ids) :])
        limit = max(0, min(K, MAX_LEN - len(text) - 1))
        proposal = self.proposer.propose(Context((self.request,), (limit,), Sampler((self.request,), VOCAB)), K)
        return list(proposal.token_ids[0, : int(proposal.lens[0])].tolist())


@pytest.mark.parametrize("method", METHODS)
def test_changing_rows_get_the_same_drafts_as_in_outrider(method: str) -> None:
    choose, batch, adapter = random.Random(1), Batch(), TextProposer(config(method))
    alone: list[Alone] = []
    num_drafts = 0
    for _ in range(120):
        if len(batch.texts) < 5 and choose.random() < 0.3:
            batch.texts.append([choose.randrange(4) for _ in range(choose.randrange(3, 20))])
            alone.append(Alone(method))
        if batch.texts and choose.random() < 0.1:
            row = choose.randrange(len(batch.texts))
            batch.end(row)
            last = alone.pop()
            if row < len(alone):
                alone[row] = last
        for text in batch.texts:
            text.extend(choose.randrange(4) for _ in range(choose.randrange(1, 4)))
            del text[MAX_LEN:]
        skipped = frozenset(row for row in range(len(batch.texts)) if choose.random() < 0.1)
        found = batch.call(adapter, skipped)
        assert len(found) == len(batch.texts)
        for row, text in enumerate(batch.texts):
            wanted = [] if row in skipped else alone[row].drafts(text)
            assert found[row] == wanted, (row, text)
            num_drafts += len(wanted)
    assert num_drafts > 200


def test_a_moved_row_is_kept_and_a_finished_one_released() -> None:
    adapter, batch = TextProposer(config()), Batch()
    batch.texts = [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4], [7, 8, 9]]
    batch.call(adapter)
    indexes = adapter._proposer._indexes  # type: ignore[attr-defined]
    before = dict(indexes)
    batch.end(0)  # the last row takes its place
    for text in batch.texts:
        text.append(1)
    batch.call(adapter)
    assert indexes == before
    for _ in range(PATIENCE):
        batch.call(adapter)
    assert len(indexes) == 2


def test_two_rows_of_the_same_text_are_two_requests() -> None:
    adapter, batch = TextProposer(config()), Batch()
    batch.texts = [[1, 2, 1, 2, 1], [1, 2, 1, 2, 1]]
    assert batch.call(adapter) == [[2, 1, 2, 1, 2, 1], [2, 1, 2, 1, 2, 1]]
    batch.texts[0] += [2]
    batch.texts[1] += [3, 1]
    assert [drafts[0] for drafts in batch.call(adapter)] == [1, 2]


def test_drafts_do_not_exceed_the_context() -> None:
    adapter, batch = TextProposer(config()), Batch()
    batch.texts = [([1, 2] * MAX_LEN)[:length] for length in (MAX_LEN - 3, MAX_LEN - 1, MAX_LEN)]
    assert [len(drafts) for drafts in batch.call(adapter)] == [2, 0, 0]


def test_earlier_outputs_are_used_by_methods_with_memory() -> None:
    adapter, batch = TextProposer(config("suffix:earlier_tokens=400")), Batch()
    batch.texts = [[1, 2, 3, 4, 5, 6, 7, 8]]
    batch.call(adapter)
    batch.texts = [[9, 10]]
    for _ in range(PATIENCE + 1):
        assert batch.call(adapter) == [[]]
    batch.texts = [[9, 10, 2, 3, 4]]
    assert batch.call(adapter) == [[5, 6, 7, 8]]


def test_a_failing_proposer_pauses_drafts_but_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, batch = TextProposer(config()), Batch()
    batch.texts = [[1, 2, 1, 2, 1]]
    monkeypatch.setattr(adapter._proposer, "propose", lambda context, k: 1 / 0)
    assert batch.call(adapter) == [[]]
    batch.texts[0] += [2, 1]
    assert [batch.call(adapter) for _ in range(FAULT_PAUSE - 1)] == [[[]]] * (FAULT_PAUSE - 1)
    assert batch.call(adapter) == [[2, 1, 2, 1, 2, 1]]


def test_methods_that_cannot_run_inside_vllm_are_refused() -> None:
    with pytest.raises(OutriderError, match="only text-based proposers"):
        TextProposer(config("draft"))
    with pytest.raises(OutriderError, match="additional-config"):
        TextProposer(SimpleNamespace(additional_config={}))


def test_the_adapter_does_not_import_transformers() -> None:
    program = "import sys, outrider.export.vllm_adapter; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
