"""The compiled pass of a head equals the eager one, is cached on disk, and is compiled with the target's passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner.rounds import untouched
from torch import Tensor

from outrider import LLM, SamplingParams, native
from outrider.heads import block_formats, eagle_formats, mtp_formats
from outrider.heads.block_runner import BlockPass, BlockRunner
from outrider.heads.feature_head import RolloutHead
from outrider.heads.head_runner import HeadPass, RolloutRunner, Step
from outrider.runner import ModelRunner, RunnerConfig, compiled
from outrider.runner.passes import ProgramRunner

from .block_checkpoints import block_target, head_tensors, native_config, write
from .mtp_checkpoints import tiny_target, write_checkpoint
from .test_postprocessing import model_of
from .writers import HIDDEN, write_eagle1, write_eagle3

# one layer with a window, whose tokens attend to earlier ones only, and one without
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}

pytestmark = [
    pytest.mark.skipif(not native.load(), reason="no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # torch's own warnings during compilation
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(kind: str, folder: Path) -> tuple[ModelRunner, RolloutHead, int | None]:
    """Return a target, a head for it, and the head's bits."""
    torch.manual_seed(3)
    config = RunnerConfig(compile="always", max_batch=3)
    if kind == "mtp":
        model = tiny_target("qwen2")
        write_checkpoint("qwen2", folder, model)
        target = ModelRunner.load(str(folder), config)
        return target, mtp_formats.load(folder, target), None
    if kind == "eagle1":  # gemma2 scales its embedding and caps its logits
        model = model_of("gemma2", hidden_size=HIDDEN, head_dim=8)
    else:
        model = model_of("llama", hidden_size=HIDDEN, head_dim=8, num_hidden_layers=4)
    target, vocab = ModelRunner.load(untouched(model), config), model.config.vocab_size
    if kind == "eagle1":
        write_eagle1(folder, vocab)
    else:
        write_eagle3(folder, vocab, 23)
    return target, eagle_formats.load(folder, target, target.model), 8 if kind == "eagle3" else None


def drafted(runner: RolloutRunner, vocab: int, num_states: int) -> list[Step]:
    """Return the steps of two requests, the first of which is read in two parts, and of two levels of a tree."""
    runner.cache.release(["a", "b"])
    generator = torch.Generator().manual_seed(1)
    width = runner.head.target_hidden_size

    def read(name: str, count: int) -> tuple[str, list[int], list[Tensor]]:
        features = [torch.randn(count, width, generator=generator) for _ in range(num_states)]
        return name, torch.randint(vocab, (count,), generator=generator).tolist(), features

    steps = [runner.extend(*map(list, zip(*parts, strict=True))) for parts in ([read("a", 5)], [read("a", 4), read("b", 19)])]
    fed = steps[-1].feedback[:, None].expand(-1, 2, -1)
    steps.append(runner.level(["a", "b"], torch.tensor([[7, 8], [9, 10]]), fed, 1, torch.eye(2).bool().expand(2, -1, -1)))
    sees = torch.tensor(
        [[True, False, True, False, False], [False, True, False, True, False], [True, False, False, False, True]]
    )
    fed = steps[-1].feedback[:, torch.tensor([0, 1, 0])]
    steps.append(runner.level(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 6]]), fed, 2, sees.expand(2, -1, -1)))
    return steps


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp"])
def test_a_compiled_head_equals_the_eager_one(
    kind: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, head, bits = made(kind, tmp_path / "model")
    runner = RolloutRunner(head, target, bits)
    found = drafted(runner, target.vocab_size, len(head.hidden_states))
    assert runner._programs.is_compiled and "stay eager" not in caplog.text
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("compiled again"))
    for mode in ("auto", "never"):
        runner._programs = ProgramRunner(
            head, lambda _: HeadPass(head, runner.cache, target.model, target.vocab_size), runner.cache, mode
        )
        for ours, theirs in zip(found, drafted(runner, target.vocab_size, len(head.hidden_states)), strict=True):
            torch.testing.assert_close(ours.feedback, theirs.feedback, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        assert runner._programs.is_compiled is (mode == "auto")


def test_a_cap_of_the_targets_logits_is_part_of_the_key(tmp_path: Path) -> None:
    """The cap is a constant of the compiled pass: a head beside a target with another cap must not load it."""
    keys = []
    for cap in (1.5, 1.5, 30.0):
        model = model_of("gemma2", hidden_size=HIDDEN, head_dim=8, final_logit_softcapping=cap)
        target, vocab = ModelRunner.load(model, RunnerConfig(compile="never")), model.config.vocab_size
        write_eagle1(tmp_path, vocab)
        head = eagle_formats.load(tmp_path, target, target.model)
        keys.append(compiled._key(RolloutRunner(head, target)._program()))
    assert keys[0] == keys[1] != keys[2]


def test_a_head_is_compiled_with_its_target(tmp_path: Path, cache: Path) -> None:
    model = model_of("llama", hidden_size=HIDDEN, head_dim=8, num_hidden_layers=4)
    write_eagle3(tmp_path, model.config.vocab_size, 23)
    llm = LLM(untouched(model), draft=tmp_path, method="eagle", num_draft_tokens=3)
    assert not (cache / "passes").exists()
    llm.warmup()
    assert len(list((cache / "passes").glob("*.pt2"))) == 2
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    plain = LLM(untouched(model), method="plain")
    assert (
        llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == plain.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    )
    assert llm.stats.faults == 0


def test_a_compiled_block_drafter_equals_the_eager_one(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For requests without a new feature, with one, and with many."""
    torch.manual_seed(3)
    model = block_target()
    target = ModelRunner.load(model, RunnerConfig(compile="always", max_batch=3))
    head = block_formats.load(write(tmp_path, native_config(**MIXED), head_tensors()), target, model)
    runner = BlockRunner(head, target)
    outs: list[list[Tensor]] = []
    for mode in ("always", "never"):
        runner._programs = ProgramRunner(head, lambda _: BlockPass(head, runner.cache, model), runner.cache, mode)
        runner.cache.release(["a", "b", "c"])
        found, generator = [], torch.Generator().manual_seed(1)
        for lengths in ((4, 9, 1), (0, 1, 3), (2, 2, 30)):
            features = [[torch.randn(n, HIDDEN, generator=generator) for _ in head.hidden_states] for n in lengths]
            found.append(runner.draft(["a", "b", "c"], features, [5, 6, 7], [7, 1, 3]))
        assert runner._programs.is_compiled is (mode == "always")
        outs.append(found)
    assert "stay eager" not in caplog.text
    for ours, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
