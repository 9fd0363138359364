"""Training for targets whose steps, logits or checkpoints are large: passes of a step, progress, interruptions, disk space."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.runner import ModelRunner, RunnerConfig
from outrider.train import capture as capture_module
from outrider.train import runs
from outrider.train.capture import capture
from outrider.train.options import HeadPlan, MtpRun, Source
from outrider.train.plan import TrainingPlan
from outrider.train.runs import Workspace, train_mtp
from outrider.train.text import TextRows
from outrider.train.trainer import Trainer
from outrider.types import OutriderError

ROWS, SEQ = 40, 8


def trained(folder, steps=3, draws=None, **plan):
    """Return a trainer of a bigram model with steps of 6 rows, and the numbers of rows that its loss reads at once."""
    torch.manual_seed(1)
    model, read = nn.Embedding(32, 32), []

    def loss(ids, step, draw, progress):
        if draws is not None:
            draws.append((step, draw))
        read.append(len(ids))
        value = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        return value, {"loss": value.detach()}

    rows = TextRows(torch.randint(0, 32, (ROWS, SEQ)).int())
    how = TrainingPlan(steps * 6 * SEQ, 6 * SEQ, ((1.0, SEQ),), save_every_s=1e9, eval_every_s=1e9, **plan)
    return Trainer("bigrams", model, rows, loss, how, folder), read


@pytest.fixture(scope="module")
def runner():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ModelRunner.load(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), RunnerConfig(max_batch=4))


def test_a_step_in_several_passes_equals_one_in_a_single_pass(tmp_path):
    whole, read = trained(tmp_path / "whole")
    whole.run()
    assert read == [6] * 3
    parts, read = trained(tmp_path / "parts", draws=(draws := []), pass_tokens=2 * SEQ + 1)
    parts.run()
    assert read == [2] * 9 and draws == [(draw // 3, draw) for draw in range(9)]
    assert torch.allclose(whole.model.weight, parts.model.weight, atol=1e-5)
    assert [point["loss"] for point in parts.curve] == pytest.approx([point["loss"] for point in whole.curve], abs=1e-3)
    single, read = trained(tmp_path / "single", steps=1, pass_tokens=1)
    single.run()
    assert read == [1] * 6
    bounded, read = trained(tmp_path / "bounded", steps=1, pass_tokens=SEQ + 2)  # room for 1.25 rows
    bounded.run()
    assert read == [1] * 6


def test_a_pass_has_fewer_tokens_if_the_vocabulary_is_large():
    def tokens(size):
        return runs.pass_tokens(SimpleNamespace(device=torch.device("cpu"), config=LlamaConfig(vocab_size=size)))

    assert tokens(4096) == 16384 and tokens(262144) == 256


def test_the_first_interruption_says_that_a_step_is_finished_and_the_second_ends_it(tmp_path, caplog):
    trainer, _ = trained(tmp_path)
    whole = trainer.loss

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        assert "stopping after this step; again: at once" in caplog.text
        if trainer.step == 1:
            signal.raise_signal(signal.SIGINT)
        return whole(*args)

    trainer.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.step == 1 and trainer.checkpoint.exists()
    trainer.interrupted = False
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.step == 1  # the second step was not finished


def test_checkpoints_larger_than_the_disk_are_rejected_before_training(tmp_path, monkeypatch):
    trainer, read = trained(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4 * 6 * 32 * 32 - 1))
    with pytest.raises(OutriderError, match=r"take 0 MB, but .* has 0 MB of free disk space: train a smaller model or"):
        trainer.run()
    assert not read
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4 * 6 * 32 * 32))
    trainer.run()


def test_capture_says_its_size_and_reports_each_batch(runner, tmp_path, caplog):
    caplog.set_level("INFO")
    told = []
    capture(runner, torch.ones(10, 8).int(), [2], tmp_path, lambda *state: told.append(state))
    assert told == [(4, 10, ""), (8, 10, ""), (10, 10, "")]
    assert "hidden states of 10 rows of 8 tokens: 0 MB in" in caplog.text


def test_shards_of_long_rows_have_fewer_rows(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_module, "SHARD_TOKENS", 30)
    rows = torch.arange(50).view(5, 10).int()
    cache = capture(runner, rows, [2], tmp_path, lambda *_: None)
    assert sorted(load_file(file)["ids"].shape[0] for file in tmp_path.glob("*.safetensors")) == [2, 3]
    assert torch.equal(cache.read(range(5), [2])[0], rows.long())


def test_features_larger_than_the_disk_are_rejected_before_text_is_generated(runner, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("text was generated")

    monkeypatch.setattr(runs, "regenerate", never)
    monkeypatch.setattr(runs, "token_rows", lambda *_: torch.ones(70, 8).int())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2 * 64 * 8 * 16 * 2 - 1))
    workspace = Workspace(runner, object(), tmp_path, Source(seq_len=8, prompt_len=4, regenerate=True))
    with pytest.raises(OutriderError, match=r"training takes .*, but .* of free disk space: use less text"):
        train_mtp(workspace, tmp_path / "out", HeadPlan(), MtpRun(1))


@pytest.mark.parametrize("stage", ["capture", "regenerate"])
def test_an_interruption_before_training_says_how_to_resume(stage, runner, tmp_path, caplog, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, stage, interrupted)
    monkeypatch.setattr(runs, "token_rows", lambda *_: torch.ones(10, 8).int())
    with pytest.raises(KeyboardInterrupt):
        Workspace(runner, object(), tmp_path, Source(regenerate=stage == "regenerate")).features([2])
    assert "progress is saved: repeat the command to resume" in caplog.text
