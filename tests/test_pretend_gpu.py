"""Every method on a GPU that is pretended (``pretend_gpu.py``), because CI has none. ``test_gpu.py`` needs a real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_gpu import GpuTensor, pretend_gpu, register_guard
from tiny_hybrids import PROMPTS as HYBRID_PROMPTS
from tiny_hybrids import hybrid

from outrider import LLM, OutriderError, SamplingParams
from outrider.family import TARGET
from outrider.native.build import find_compiler
from outrider.runner import ModelRunner, RunnerConfig, graphs
from outrider.train.text import regenerate

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch built for CPUs; test_gpu.py is for the others"),
    pytest.mark.skipif(sys.platform != "linux" or find_compiler() is None, reason="needs Linux and a C++ compiler"),
]

LONG = "She wrote the number down, and the next, and went on. " * 6  # prefilled before its first round
PROMPTS = ["def quicksort(", LONG, LONG + "Then"]
METHODS = ("plain", "draft", "eagle", "eagle:draft=eagle1", "mtp", "dflash", "medusa", "early-exit", "suffix+draft", "ngram")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=3, max_tokens=8)
SETTINGS = {
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "logprobs": replace(SAMPLED, logprobs=3, min_p=0.05),
    "bias": replace(SAMPLED, logit_bias={5: 3.0, 9: -100.0}, banned_token_ids=[7], min_tokens=4, stop=["e"]),
    "samples": replace(SAMPLED, n=2),
}


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    register_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretend_gpu():
        yield


@pytest.fixture(scope="module")
def greedy() -> list[str]:
    return texts("plain", "cpu", GREEDY)


def texts(method: str, device: str, params: SamplingParams, dtype: str = "float32", same_text: bool = False) -> list[str]:
    k = 4 if method != "plain" else "auto"
    with LLM(method=method, device=device, dtype=dtype, num_draft_tokens=k, compile="auto", same_text=same_text) as llm:
        return [each.text for found in llm.generate(PROMPTS, params) for each in found.outputs]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_emits_the_text_of_plain_decoding(method: str, greedy: list[str], gpu: None) -> None:
    assert texts(method, "cuda", GREEDY) == greedy


@pytest.mark.parametrize("name", SETTINGS)
def test_coupled_samples_are_those_of_plain_decoding_on_a_cpu(name: str) -> None:
    expected = texts("plain", "cpu", SETTINGS[name], same_text=True)
    with pretend_gpu():
        assert texts("draft", "cuda", SETTINGS[name], same_text=True) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["draft", "eagle", "dflash"])
def test_sixteen_bits_run(method: str, dtype: str, gpu: None) -> None:
    assert all(texts(method, "cuda", SAMPLED, dtype))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "bamba", "mamba2"])
def test_recurrent_layers_run(kind: str) -> None:
    def tokens(device: str, method: str) -> list[list[int]]:
        model = hybrid(kind).to(device)  # type: ignore[arg-type]
        with LLM(model, method=method, num_draft_tokens="auto" if method == "plain" else 4, prefill_chunk=20) as llm:
            return [list(found.outputs[0].token_ids) for found in llm.generate(HYBRID_PROMPTS, GREEDY)]

    expected = tokens("cpu", "plain")
    with pretend_gpu():
        assert tokens("cuda", "plain") == tokens("cuda", "ngram") == expected


def test_passes_replay_graphs(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    replayed = []
    capture = graphs.GraphRunner._capture

    def counted(self: graphs.GraphRunner, *args: list[torch.Tensor]) -> graphs.Captured:
        inputs, replay, outputs = capture(self, *args)

        def recorded() -> None:
            replayed.append(self)
            replay()

        return inputs, recorded, outputs

    monkeypatch.setattr(graphs.GraphRunner, "_capture", counted)
    texts("draft", "cuda", GREEDY)
    assert len(set(replayed)) >= 2, "neither the target's nor the draft's passes"
    assert not any(each._is_eager for each in replayed)


def test_prompts_of_many_lengths_are_captured_in_few_widths(gpu: None) -> None:
    with LLM(method="plain", device="cuda", dtype="float32") as llm:
        for length in range(17, 50, 4):
            llm.generate(list(range(50 * length, 51 * length)), GREEDY)
        (run,) = llm.runner.passes._runs.values()
        assert isinstance(run, graphs.GraphRunner)
        widths = {width for *_, (_, width, _) in run._captured}
    assert widths <= {1, 16, 32, 48, 64}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_training_text_is_written(tmp_path: Path, temperature: float, gpu: None) -> None:
    runner = ModelRunner.load(TARGET, RunnerConfig(device="cuda"))
    rows = torch.randint(3, 1000, (8, 24), dtype=torch.int32)
    written = regenerate(runner, rows, 8, temperature, 0, tmp_path, lambda *_: None)
    assert written.shape == rows.shape and torch.equal(written[:, :8], rows[:, :8])
    assert not torch.equal(written[:, 8:], rows[:, 8:])


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"weights": "int4"}, {"method": "low-bit"}])
def test_what_needs_the_kernels_of_a_cpu_is_refused(options: dict[str, Any], gpu: None) -> None:
    with pytest.raises(OutriderError, match="CPU"):
        LLM(device="cuda", **options)


def test_the_pretended_device_refuses_what_a_real_one_refuses(gpu: None) -> None:
    on_gpu, on_cpu = torch.ones(4, device="cuda"), torch.arange(4)
    assert isinstance(on_gpu, GpuTensor) and on_gpu.device == torch.device("cuda", 0)
    for others in ([on_gpu, on_cpu.float()], [on_cpu.float(), on_gpu]):
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat(others)
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(*others)
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        on_gpu.numpy()
    with pytest.raises(NotImplementedError, match="CUDA"):
        torch.ops.outrider.activate(on_gpu, "silu")
    with pytest.raises(RuntimeError, match="generator"):
        torch.multinomial(on_gpu, 1, generator=torch.Generator())
    assert (on_gpu * torch.tensor(2.0))[on_cpu].tolist() == [2.0] * 4  # scalars and indices may be on the CPU
    assert torch.equal(on_gpu.cpu(), torch.ones(4))


def test_a_replay_repeats_operators_on_the_memory_of_the_recording(gpu: None) -> None:
    given = torch.ones(3, device="cuda")
    factor = [2.0]
    runner = graphs.GraphRunner(lambda inputs: [inputs[0] * factor[0]], num_stores=1)
    visible, store = torch.ones(1, 1, 1, dtype=torch.bool, device="cuda"), torch.zeros(1, device="cuda")
    assert runner([given, visible, store])[0].tolist() == [2.0] * 3
    factor[0] = 5.0  # Python's part of a program is not in its graph
    assert runner([given + 1, visible, store])[0].tolist() == [4.0] * 3


def test_a_capture_that_waits_for_the_device_is_given_up(gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    visible, store = torch.ones(1, 1, 1, dtype=torch.bool, device="cuda"), torch.zeros(1, device="cuda")
    runner = graphs.GraphRunner(lambda inputs: [inputs[0] * float(inputs[0][0])], num_stores=1)
    assert runner([torch.full((2,), 3.0, device="cuda"), visible, store])[0].tolist() == [9.0, 9.0]
    assert "without CUDA graphs" in caplog.text
