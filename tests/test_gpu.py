"""What only a CUDA device shows, on the embedded models. Run it where there is one: scripts/test tests/test_gpu.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.family import TARGET
from outrider.runner import ModelRunner, RunnerConfig
from outrider.train.text import regenerate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
PROMPTS = ["def quicksort(", "Once upon a time", 'class Queue:\n    """A queue.']
METHODS = ("draft", "eagle", "eagle:draft=eagle1", "mtp", "dflash", "medusa", "early-exit", "suffix", "ngram", "suffix+draft")


def texts(method: str, compile: str = "auto") -> list[str]:
    """Return greedy continuations in float32: passes of different widths round alike often enough to be compared."""
    k = 4 if method != "plain" else "auto"
    llm = LLM(method=method, device=DEVICE, dtype="float32", num_draft_tokens=k, compile=compile)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=48, ignore_eos=True))
    return [each.outputs[0].text for each in found]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return texts("plain")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_emits_the_text_of_plain_decoding(method: str, plain: list[str]) -> None:
    assert texts(method) == plain


def test_compiled_passes_emit_the_text_of_plain_decoding(plain: list[str]) -> None:
    assert texts("draft", compile="always") == texts("eagle", compile="always") == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_training_text_is_written(tmp_path: Path, temperature: float) -> None:
    runner = ModelRunner.load(TARGET, RunnerConfig(device=DEVICE))
    rows = torch.randint(3, 1000, (8, 24), dtype=torch.int32)
    written = regenerate(runner, rows, 8, temperature, 0, tmp_path, lambda *_: None)
    assert written.shape == rows.shape and torch.equal(written[:, :8], rows[:, :8])
    assert not torch.equal(written[:, 8:], rows[:, 8:])


def test_a_pass_takes_longer_to_score_than_to_verify() -> None:
    llm = LLM(method="plain", device=DEVICE)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=16))  # captures graphs
    stats = llm.generate(PROMPTS[0], SamplingParams(max_tokens=64, ignore_eos=True))[0].outputs[0].stats
    assert stats.times.score > stats.times.verify
