"""Training heads on a tiny target: captured features, learning, and resuming after interruptions."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cut import run_until
from heads import writers
from heads.mtp_checkpoints import tiny_target
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_folder import letter_tokenizer, make_folder
from toy import outputs_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, LlamaConfig

from outrider import LLM, SamplingParams
from outrider.heads import block_formats, eagle_formats, findings, mtp_formats
from outrider.heads import medusa as medusa_heads
from outrider.heads.block_runner import BlockRunner
from outrider.heads.checkpoint import write_folder
from outrider.heads.eagle import default_hidden_states
from outrider.heads.head_runner import RolloutRunner
from outrider.runner import ModelRunner, RunnerConfig
from outrider.train import precision, runs, shapes
from outrider.train.block_loss import BlockLoss
from outrider.train.capture import capture
from outrider.train.claims import exclusive, fingerprint
from outrider.train.medusa import MedusaLoss
from outrider.train.options import BlockRun, EagleRun, HeadPlan, MedusaRun, MtpRun, Source
from outrider.train.rollout_loss import RolloutLoss
from outrider.train.runs import Workspace, eagle_sizes, plan_of, train_block, train_eagle, train_medusa, train_mtp
from outrider.train.text import RowOrder, regenerate
from outrider.train.trainer import Trainer
from outrider.types import OutriderError

LAYERS, SEQ = 6, 24


def silent(done, total, what):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS, hidden_size=32, initializer_range=0.5)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), method="plain", compile="never")


@pytest.fixture(scope="module")
def runner(llm):
    return llm.runner


@pytest.fixture(scope="module")
def rows():
    pattern = torch.arange(8, 8 + 2 * SEQ)  # the next token is predictable
    return torch.stack([pattern.roll(shift)[:SEQ] for shift in range(70)]).int()


@pytest.fixture(scope="module")
def cache(runner, rows, tmp_path_factory):
    return capture(runner, rows, [0, 2, 3, LAYERS], tmp_path_factory.mktemp("features"), silent)


@torch.no_grad()
def test_captured_features_equal_the_plain_forwards_hidden_states(runner, rows, cache, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    numbers = [0, 13, 69]  # of both shards
    ids, features = cache.read(numbers, [0, 2, 3, LAYERS])
    assert torch.equal(ids, rows[numbers].long())
    wanted = model(rows[numbers].long(), output_hidden_states=True).hidden_states
    for layer in (0, 2, 3, LAYERS):
        torch.testing.assert_close(features[layer], wanted[layer], rtol=2e-2, atol=2e-2)


def test_an_interrupted_capture_resumes(runner, rows, tmp_path, monkeypatch):
    capture(runner, rows, [2, LAYERS], tmp_path, silent)
    kept, lost = tmp_path / "features_00000.safetensors", tmp_path / "features_00001.safetensors"
    content, before = lost.read_bytes(), kept.stat().st_mtime_ns
    lost.unlink()
    capture(runner, rows, [LAYERS], tmp_path, silent)  # a subset of the layers is captured already
    assert lost.read_bytes() == content and kept.stat().st_mtime_ns == before
    with pytest.raises(OutriderError, match="another target or text, or in shards of another size: give another folder"):
        capture(runner, rows.flip(0), [2], tmp_path, silent)
    with pytest.raises(
        OutriderError, match=r"has hidden states 2,6, and this run reads 1: give another folder .*delete this one"
    ):
        capture(runner, rows, [1], tmp_path, silent)
    with pytest.raises(OutriderError, match="has 0 to 6"):
        capture(runner, rows, [7], tmp_path / "other", silent)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp"])
def test_training_rollouts_equal_drafting_rollouts(kind, runner, cache):
    torch.manual_seed(3)
    head = shapes.new_mtp(runner) if kind == "mtp" else shapes.new_eagle(runner, int(kind[-1]), (0, 2, 3), None)
    check_rollouts(head, runner, cache)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "mistral"])
def test_training_rollouts_have_the_cap_sinks_and_window_of_the_targets_attention(kind, rows, tmp_path):
    """An MTP head has the attention of its target's layers."""
    own = {"gemma2": {"attn_logit_softcapping": 2.0}, "gpt_oss": {"num_local_experts": 4}, "mistral": {"sliding_window": 5}}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**sizes, **heads, **own[kind], max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    runner = ModelRunner.load(str(tmp_path / "target"), RunnerConfig(compile="never"))
    check_rollouts(shapes.new_mtp(runner), runner, capture(runner, rows[:6], [2], tmp_path / "features", silent))


@torch.no_grad()
def check_rollouts(head, runner, cache):
    """Training-time test: the head's output at depth d over a sequence equals that of the runner's cache and levels."""
    for parameter in head.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    last = runner.num_layers
    loss = RolloutLoss(head, cache, last, steps=3)
    ids, features, _ = loss.read([5])
    outs = loss._rollout(ids, features, loss.steps)
    head.set_attention("outrider")
    drafting = RolloutRunner(head, runner)
    for length in (1, 4, 12):
        name = f"text-{length}"
        seen = [feature[0, :length] for feature in features]
        step = drafting.extend([name], [ids[0, 1 : 1 + length].tolist()], [seen]).view(1, 1)
        torch.testing.assert_close(step.feedback[0, 0], head.feedback(outs[0][0, length - 1]), rtol=2e-3, atol=2e-3)
        for depth in (1, 2):
            token = ids[:, length + depth : length + depth + 1]
            sees = torch.ones(1, 1, depth, dtype=torch.bool)
            step = drafting.level([name], token, step.feedback, depth, sees)
            torch.testing.assert_close(step.feedback[0, 0], head.feedback(outs[depth][0, length - 1]), rtol=2e-3, atol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("markov_rank, selector_rank", [(0, 0), (4, 0), (0, 4)])
def test_training_blocks_equal_drafted_blocks(markov_rank, selector_rank, runner, cache):
    """The head's output after an anchor within a row equals the runner's drafts after the same tokens."""
    torch.manual_seed(3)
    head = shapes.new_block(runner, shapes.BlockSizes((2, 3), 2, 6, markov_rank, selector_rank), 319)
    head.shape = replace(head.shape, windows=(0, 7), causal_windows=True)
    for attention in head.attentions:
        attention.window = head.shape.windows[attention.layer_idx]
        attention.sees_earlier_only = attention.window > 0
    for parameter in head.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    loss = BlockLoss(head, cache, LAYERS)
    ids, features, _ = loss.read([5])
    anchors = torch.tensor([[1, 3, 4, 11, 18]])
    blocks = loss._blocks(ids, features, anchors)[0]
    drafting, count = BlockRunner(head, runner), head.shape.max_drafts
    assert blocks.shape == (5, count, 32) and count == (6 if markov_rank else 5)
    for anchor, block in zip(anchors[0].tolist(), blocks, strict=True):
        seen = [feature[0, :anchor] for feature in features]
        out = drafting.draft([f"text-{anchor}"], [seen], [int(ids[0, anchor])], [count])
        torch.testing.assert_close(out[0], block, rtol=2e-3, atol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("markov_rank, selector_rank", [(0, 0), (4, 0), (0, 4)])
def test_the_loss_of_each_draft_is_its_cross_entropy(markov_rank, selector_rank, runner, cache, monkeypatch):
    torch.manual_seed(3)
    head = shapes.new_block(runner, shapes.BlockSizes((2, 3), 1, 6, markov_rank, selector_rank), 319)
    for parameter in head.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    loss, drawn = BlockLoss(head, cache, LAYERS), []
    blocks = loss._blocks
    monkeypatch.setattr(loss, "_blocks", lambda *given: drawn.append((*given, blocks(*given))) or drawn[-1][-1])
    parts = loss(torch.tensor([0, 5, 9]), 0, 0, 0.5)[1]
    ids, _, anchors, out = drawn[0]
    last = loss.read([0, 5, 9])[2]
    for draft in (0, 1, 3):
        one, places = out[:, :, draft], anchors + draft
        rows = torch.arange(3)[:, None]
        probs = head.target_logits(last[rows, places]).softmax(-1)
        before, logits = ids[rows, places], head.logits(one)
        if selector_rank:
            candidates, scores = head.candidate_selector.scores(one, logits, before)
            expected = -(probs.gather(-1, candidates) * scores.log_softmax(-1)).sum(-1).mean()
        else:
            expected, logits = 0.0, head.logits_after(one, logits, before)
        expected = expected - (probs * logits.log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(parts[f"draft_{draft + 1}"], expected, rtol=1e-4, atol=1e-4)
        hits = (probs.argmax(-1) == logits.argmax(-1)).float().mean()
        torch.testing.assert_close(parts[f"hit_{draft + 1}"], hits)


def test_the_mask_token_is_unused_and_has_an_embedding(runner):
    rows = torch.arange(0, 300).view(10, 30).int()
    assert shapes.mask_token(rows, runner) == runner.vocab_size - 1
    table = torch.ones(320, 8)
    table[310:] = 0.0
    lent = SimpleNamespace(get_input_embeddings=lambda: lambda ids: table[ids])
    other = SimpleNamespace(vocab_size=320, device=torch.device("cpu"), model=lent)
    assert shapes.mask_token(rows, other) == 309
    every = torch.arange(0, 320).repeat(2)[:-1].view(1, -1)
    assert shapes.mask_token(every[:, :630], other) == 309  # tokens that occur once have no embedding


@torch.no_grad()
def test_a_run_starts_with_one_step_of_depth(runner, cache):
    loss = RolloutLoss(shapes.new_eagle(runner, 3, (0, 2, 3), None), cache, LAYERS, steps=3)
    assert [loss.depth(progress) for progress in (0.0, 0.2, 0.24, 0.28, 0.3, 1.0)] == [1, 1, 2, 3, 3, 3]
    assert RolloutLoss(loss.head, cache, LAYERS, steps=1).depth(1.0) == 1
    for progress, depth in ((0.1, 1), (0.24, 2), (0.9, 3)):
        parts = loss(torch.tensor([0, 1]), 0, 0, progress)[1]
        assert [name for name in parts if name.startswith("step_")] == [f"step_{step + 1}" for step in range(depth)]
        assert sum(0.8**step * parts[f"step_{step + 1}"] for step in range(depth)) == pytest.approx(
            float(parts["loss"]) * sum(0.8**step for step in range(depth))
        )


@torch.no_grad()
def test_passes_of_a_step_draw_their_own_anchors_and_noise(runner, cache):
    block = shapes.new_block(runner, shapes.BlockSizes((2, 3), 1, 4), 319)
    for loss in (BlockLoss(block, cache, LAYERS), RolloutLoss(shapes.new_eagle(runner, 1, (), None), cache, LAYERS, steps=1)):
        first, second, again = (loss(torch.tensor([0, 1]), step, draw, 0.5)[0] for step, draw in ((1, 2), (1, 3), (2, 2)))
        assert torch.equal(first, again) and not torch.equal(first, second)


def run_of(kind, runner, cache, folder, steps=6):
    torch.manual_seed(0)
    if kind == "medusa":
        head = shapes.new_medusa(runner, 2, 1)
        loss = MedusaLoss(head, cache, LAYERS, shapes.output_layer(runner))
    elif kind == "mtp":
        head = shapes.new_mtp(runner)
        loss = RolloutLoss(head, cache, LAYERS, 2)
    elif kind in ("dflash", "dflash2"):
        rank = {"markov_rank" if kind == "dflash" else "selector_rank": 4}
        head = shapes.new_block(runner, shapes.BlockSizes((2, 3), 2, 4, **rank), 319)
        loss = BlockLoss(head, cache, LAYERS)
    else:
        ids = shapes.frequent_tokens(cache.read(range(70), [])[0], runner.vocab_size, 60) if kind == "eagle3" else None
        head = shapes.new_eagle(runner, int(kind[-1]), (0, 2, 3), ids)
        loss = RolloutLoss(head, cache, LAYERS, 2)
    order = RowOrder(cache.num_training, cache.seq_len)
    plan = plan_of(HeadPlan(batch_tokens=6 * SEQ, epochs=1.0), order)
    plan = replace(plan, max_tokens=steps * 6 * SEQ, save_every_s=1e9, eval_every_s=1e9)
    return Trainer(kind, head, order, loss, plan, folder)


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "mtp", "dflash", "dflash2"])
def test_an_interrupted_run_ends_with_the_same_weights(kind, runner, cache, tmp_path):
    whole = run_of(kind, runner, cache, tmp_path / "whole")
    whole.run()
    run_until(2, run_of(kind, runner, cache, tmp_path / "cut"))
    resumed = run_of(kind, runner, cache, tmp_path / "cut")
    assert resumed.step == 2
    resumed.run()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert [point["loss"] for point in whole.curve] == [point["loss"] for point in resumed.curve]


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "mtp", "dflash", "dflash2"])
def test_a_head_learns_the_targets_distribution(kind, runner, rows, cache, tmp_path):
    trainer = run_of(kind, runner, cache, tmp_path, steps=25)
    trainer.run()
    first, last = trainer.curve[0], trainer.curve[-3:]
    # most of the remaining loss is the target's own entropy
    assert sum(point["loss"] for point in last) / 3 < 0.95 * first["loss"]


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "mtp", "dflash"])
def test_a_trained_head_is_written_with_measurements_and_drafts(kind, folder, llm, rows, tmp_path):
    workspace = Workspace(ModelRunner.load(str(folder), RunnerConfig(compile="never")), None, tmp_path / "work", rows=rows)
    how = HeadPlan(epochs=0.2, batch_tokens=6 * SEQ)
    if kind == "medusa":
        train_medusa(workspace, tmp_path / "out", how, MedusaRun(2))
    elif kind == "mtp":
        train_mtp(workspace, tmp_path / "out", how, MtpRun(2))
    elif kind == "dflash":
        train_block(workspace, tmp_path / "out", how, BlockRun(4, layers=2, selector_rank=4))
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert len(config["outrider"]["acceptance_by_position"]) == 3
        assert config["architectures"] == ["DFlash2DraftModel"] and config["dflash_config"]["selector_rank"] == 4
        assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    else:
        formats = ("native",) if kind == "eagle1" else ("native", "speculators")
        run = EagleRun(int(kind[-1]), 2, (1, 2, 3), 60 if kind == "eagle3" else None, formats)
        train_eagle(workspace, tmp_path / "out", how, run)
    measured = json.loads((tmp_path / "out" / "measured.json").read_text())
    assert measured and (tmp_path / "out" / f"{kind}_curve.json").exists() and (tmp_path / "out" / f"{kind}_curve.png").exists()
    prompt, params = rows[3, :10].tolist(), SamplingParams(max_tokens=16, ignore_eos=True)
    wanted = llm.generate([prompt], params)[0].outputs[0].token_ids
    places = [tmp_path / "out"]
    if kind == "eagle3":
        places.append(tmp_path / "out-speculators")
        for place in places:
            assert eagle_formats.load(place, llm.runner).shape.hidden_states == (1, 2, 3)
    for place in places:
        drafted = LLM(str(folder), method=kind.rstrip("13"), draft=str(place), num_draft_tokens=2, compile="never")
        assert drafted.generate([prompt], params)[0].outputs[0].token_ids == wanted
        assert drafted.stats.faults == 0 and drafted.stats.num_drafts > 0


@pytest.mark.parametrize("kind", ["medusa", "medusa of fewer tokens", "eagle1", "eagle3", "mtp", "dflash"])
def test_a_head_is_continued_with_its_sizes(kind, folder, rows, tmp_path):
    def trained(name, rate, *, start=None):
        workspace = Workspace(
            ModelRunner.load(str(folder), RunnerConfig(compile="never")), None, tmp_path / f"{name}-work", rows=rows
        )
        how = HeadPlan(epochs=0.1, batch_tokens=6 * SEQ, muon_lr=rate, adam_lr=rate)
        train, first, later = {
            "medusa": (train_medusa, MedusaRun(2, 2), MedusaRun(start=start)),
            "medusa of fewer tokens": (train_medusa, MedusaRun(2, 2, 60), MedusaRun(start=start)),
            "eagle1": (train_eagle, EagleRun(1, 2), EagleRun(steps=2, start=start)),
            "eagle3": (train_eagle, EagleRun(3, 2, (1, 2, 3), 60), EagleRun(steps=2, start=start)),
            "mtp": (train_mtp, MtpRun(2), MtpRun(2, start)),
            "dflash": (train_block, BlockRun(4, 2, (1, 3), selector_rank=4), BlockRun(start=start)),
        }[kind]
        train(workspace, tmp_path / name, how, later if start else first)
        return load_file(tmp_path / name / "model.safetensors")

    first = trained("first", 0.01)
    same, further = (trained(name, rate, start=str(tmp_path / "first")) for name, rate in (("same", 1e-9), ("further", 0.01)))
    assert first.keys() == same.keys() == further.keys()
    assert all(torch.allclose(tensor, same[name], atol=1e-6) for name, tensor in first.items())
    assert any(not torch.allclose(tensor, further[name], atol=1e-4) for name, tensor in first.items())


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_that_could_not_be_written_is_refused_before_text_is_read(kind, runner, tmp_path):
    start, size = tmp_path / "start", runner.vocab_size
    if kind == "eagle3":
        tensors = writers.write_eagle3(start, size, size)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}
        train, run, message = train_eagle, EagleRun(start=str(start)), "output head cannot be exported"
    else:
        block_formats.export(shapes.new_block(runner, shapes.BlockSizes((2, 3), 1, 4), 319), start, LAYERS)
        tensors = load_file(start / "model.safetensors") | {"lm_head.weight": torch.zeros(size, runner.hidden_size)}
        train, run, message = train_block, BlockRun(start=str(start)), "cannot be written in z-lab's layout"
    save_file(tensors, start / "model.safetensors")
    workspace = Workspace(runner, None, tmp_path / "work", Source(paths=(tmp_path / "missing.txt",)))
    with pytest.raises(OutriderError, match=message):
        train(workspace, tmp_path / "out", HeadPlan(), run)


@torch.no_grad()
def test_a_block_drafter_with_a_cap_of_its_own_has_the_logits_of_drafting(tmp_path):
    """Its cap replaces the target's, which the labels keep."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = CONFIG_MAPPING["gemma2"](**sizes, **heads, max_position_embeddings=64, final_logit_softcapping=20.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    runner = ModelRunner.load(str(tmp_path), RunnerConfig(compile="never"))
    head = shapes.new_block(runner, shapes.BlockSizes((1, 2), 1, 4), 5)
    head.shape = replace(head.shape, softcap=10.0)
    out = 300 * torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))
    raw = runner.model.get_output_embeddings()(out)
    assert raw.abs().max() > 20
    torch.testing.assert_close(head.logits(out), 10 * (raw / 10).tanh())
    torch.testing.assert_close(head.target_logits(out), 20 * (raw / 20).tanh())


@torch.no_grad()
def test_an_untrained_mtp_head_repeats_the_feature(runner, cache):
    head = shapes.new_mtp(runner)
    loss = RolloutLoss(head, cache, LAYERS, 1)
    ids, features, _ = loss.read([3])
    out = loss._rollout(ids, features, 1)[0]
    assert torch.cosine_similarity(out, features[0][:, : out.shape[1]], -1).min() > 0.95
    scale = out.square().mean().sqrt() / features[0].square().mean().sqrt()
    assert 0.8 < scale < 1.25


@pytest.mark.parametrize(("family", "kind"), [("qwen3_next", "qwen3_next"), ("deepseek_v3", "deepseek_v3"), ("gpt2", "llama")])
def test_an_mtp_head_is_trained_for_targets_of_other_kinds_and_continued(family, kind, tmp_path):
    """Its layer has the target's kind, with experts if the target has them, or Llama's kind if that is not supported."""
    if family == "gpt2":
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        model = tiny_target(family)
    model.save_pretrained(tmp_path / "target")
    rows = torch.arange(4, 60).repeat(2)[None].expand(9, -1)[:, :SEQ].contiguous().int()
    how, config = HeadPlan(epochs=0.5, batch_tokens=4 * SEQ), RunnerConfig(compile="never")

    def trained(name, **options):
        workspace = Workspace(ModelRunner.load(str(tmp_path / "target"), config), None, tmp_path / f"{name}-work", rows=rows)
        train_mtp(workspace, tmp_path / name, how, MtpRun(2, **options))
        return mtp_formats.load(tmp_path / name, workspace.runner)

    first = trained("first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["model_type"] == kind
    assert any("experts" in name for name in first.state_dict()) is (family != "gpt2")
    second = trained("second", start=str(tmp_path / "first"), format="mimo")
    assert not torch.equal(first.fc.weight, second.fc.weight)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for options in ({"method": "plain"}, {"method": "mtp", "draft": str(tmp_path / "second"), "num_draft_tokens": 3}):
        llm = LLM(str(tmp_path / "target"), compile="never", tokenizer=letter_tokenizer(61, 1), **options)
        texts.append(llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1] and llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_regeneration_by_the_target_resumes_after_an_interruption(llm, runner, rows, tmp_path):
    written = regenerate(runner, rows[:11], 5, 0.0, 1, tmp_path, silent)
    assert torch.equal(written[:, :5], rows[:11, :5])
    params = SamplingParams(max_tokens=SEQ - 5, ignore_eos=True)
    wanted = outputs_of(llm.generate([row[:5].tolist() for row in rows[:11]], params))
    assert written[:, 5:].tolist() == [completion.token_ids for completion in wanted]
    sampled = regenerate(runner, rows[:11], 5, 1.0, 1, tmp_path / "sampled", silent)
    (tmp_path / "sampled" / "text_00001.safetensors").unlink()
    assert torch.equal(regenerate(runner, rows[:11], 5, 1.0, 1, tmp_path / "sampled", silent), sampled)
    assert not torch.equal(sampled, written)


def test_regenerated_text_with_other_settings_is_not_reused(runner, rows, tmp_path):
    regenerate(runner, rows[:3], 5, 0.0, 1, tmp_path, silent)
    others = [
        (lambda: regenerate(runner, rows[3:6], 5, 0.0, 1, tmp_path, silent), "other text:"),
        (lambda: regenerate(runner, rows[:3], 6, 0.0, 1, tmp_path, silent), "other prompt length:"),
        (lambda: regenerate(runner, rows[:3], 5, 0.7, 1, tmp_path, silent), "other temperature:"),
    ]
    for write, message in others:
        with pytest.raises(OutriderError, match=message):
            write()
    assert len(regenerate(runner, rows[:3], 5, 0.0, 1, tmp_path, silent)) == 3
    with pytest.raises(OutriderError, match=r"temperature -1.0: expected a finite number"):
        Source(temperature=-1.0)
    with pytest.raises(OutriderError, match="seq_len 1: expected a whole number, at least 2"):
        Source(seq_len=1)  # a begin token would leave no room for text


def test_remaining_time_ignores_finished_work(runner, rows, tmp_path):
    told = []
    capture(runner, rows, [2], tmp_path / "features", silent)
    regenerate(runner, rows[:33], 20, 0.0, 1, tmp_path / "text", silent)
    (tmp_path / "features" / "features_00001.safetensors").unlink()
    (tmp_path / "text" / "text_00002.safetensors").unlink()
    capture(runner, rows, [2], tmp_path / "features", lambda done, total, _: told.append(done / total))
    regenerate(runner, rows[:33], 20, 0.0, 1, tmp_path / "text", lambda done, total, _: told.append(done / total))
    assert told[0] == 1.0 and told[1:] == [24 / 33]  # finished work is not counted


def test_fine_tuning_any_layer_changes_the_target_fingerprint(folder, tmp_path):
    """Merged adapters do not change config, embedding and output head."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = RunnerConfig(compile="never")
    first = fingerprint(ModelRunner.load(model, options).model)
    assert fingerprint(ModelRunner.load(model, options).model) == first
    model.model.layers[3].mlp.up_proj.weight.data.add_(0.01)
    assert fingerprint(ModelRunner.load(model, options).model) != first


def test_targets_that_differ_only_in_quantised_weights_have_different_fingerprints(tmp_path):
    found = []
    for name, seed in (("first", 1), ("second", 2)):
        make_folder(tmp_path / name, seed=seed, hidden_size=64)
        found.append(ModelRunner.load(str(tmp_path / name), RunnerConfig(compile="never", weights="int8")))
    first, second = found
    with torch.no_grad():
        for name, tensor in first.model.named_parameters():
            tensor.copy_(second.model.get_parameter(name))
        for name, tensor in first.model.named_buffers():
            if tensor.is_floating_point():
                tensor.copy_(second.model.get_buffer(name))
    assert fingerprint(first.model) != fingerprint(second.model)


def test_a_run_without_room_on_the_disk_records_nothing(runner, rows, tmp_path, monkeypatch):
    """So that the same folder takes a smaller one."""
    room = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2 * 32 * 2 * rows.numel()))
    how = HeadPlan(epochs=0.1, batch_tokens=6 * SEQ)
    with pytest.raises(OutriderError, match=r"training takes .*: use less text \(--max-tokens\), a smaller model or another"):
        train_mtp(Workspace(runner, None, tmp_path / "work", rows=rows), tmp_path / "out", how, MtpRun(2))
    assert not [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    train_mtp(Workspace(runner, None, tmp_path / "work", rows=rows[:20]), tmp_path / "out", how, MtpRun(2))


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(runner, cache, tmp_path):
    trainer = run_of("medusa", runner, cache, tmp_path)
    run_until(2, trainer)
    kept = trainer.checkpoint.read_bytes()
    again = run_of("medusa", runner, cache, tmp_path)
    again.model.lm_heads[0].weight.data.fill_(float("nan"))
    with pytest.raises(OutriderError, match="loss nan at step 3: lower the learning rates") as error:
        again.run()
    assert "\n" not in str(error.value) and trainer.checkpoint.read_bytes() == kept


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_an_update_that_spoils_the_weights_is_not_saved(has_checkpoint, runner, cache, tmp_path):
    """The loss before the last update says nothing of it."""
    trainer = run_of("medusa", runner, cache, tmp_path)
    if has_checkpoint:
        run_until(2, trainer)
    again = run_of("medusa", runner, cache, tmp_path)
    step = again.train_step

    def spoiling():
        point = step()
        again.interrupted = True
        again.model.lm_heads[0].weight.data.fill_(float("inf"))
        return point

    again.train_step = spoiling
    with pytest.raises(OutriderError, match=r"non-finite values in .* after step .*: lower the learning rates") as error:
        again.run()
    assert again.checkpoint.exists() == has_checkpoint == ("is the last good checkpoint" in str(error.value))


def test_a_full_disk_keeps_the_last_checkpoint_and_leaves_no_part_of_the_next(runner, cache, tmp_path, monkeypatch):
    trainer = run_of("medusa", runner, cache, tmp_path)
    run_until(2, trainer)
    kept, files = trainer.checkpoint.read_bytes(), sorted(trainer.folder.iterdir())

    def stop_half_way(state: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 17837824 vs 17837716")

    monkeypatch.setattr(torch, "save", stop_half_way)
    with pytest.raises(OSError, match="the disk may be full; with more space the same command resumes"):
        trainer.save()
    assert trainer.checkpoint.read_bytes() == kept and sorted(trainer.folder.iterdir()) == files


def test_an_interruption_ends_the_final_measurement_which_a_resumed_run_makes(runner, cache, tmp_path):
    def interrupted(final):
        raise KeyboardInterrupt

    cut = run_of("medusa", runner, cache, tmp_path, steps=2)
    cut.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    resumed = run_of("medusa", runner, cache, tmp_path, steps=2)
    resumed.evaluate = lambda final: {"held_1": 0.5}
    assert resumed.step == 2
    resumed.run()
    assert resumed.curve[-1]["held_1"] == 0.5
    ended = run_of("medusa", runner, cache, tmp_path, steps=2)
    assert json.loads((tmp_path / "curve.json").read_text()) == ended.curve == resumed.curve


@pytest.mark.parametrize("is_supported", [True, False])
def test_a_gpu_without_bfloat16_trains_in_float32(is_supported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: is_supported or including_emulation)
    chosen = precision.arithmetic_dtype(torch.device("cuda"))
    assert chosen == (torch.bfloat16 if is_supported else torch.float32)


def test_a_full_disk_is_reported_with_the_file_and_leaves_no_part(tmp_path, monkeypatch):
    def stop_half_way(tensors, path, metadata=None):
        path.write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("outrider.heads.checkpoint.save_file", stop_half_way)
    with pytest.raises(OSError, match=r"with more space the same command resumes .*No space left.*: '.*model.safetensors'"):
        write_folder(tmp_path, {}, {"weight": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_siblings_of_a_large_vocabulary_are_measured_at_some_positions(runner, cache, tmp_path, monkeypatch):
    def measured(tokens):
        drawn, multinomial = [], torch.multinomial
        monkeypatch.setattr("outrider.train.rollout_loss.MANY_TOKENS", tokens)
        with monkeypatch.context() as patch:
            patch.setattr(
                torch, "multinomial", lambda probs, *rest, **how: drawn.append(len(probs)) or multinomial(probs, *rest, **how)
            )
            found = run_of("mtp", runner, cache, tmp_path).loss.sibling_acceptance()
        return found, drawn[0]

    (whole, positions), (part, fewer) = measured(2 * runner.vocab_size), measured(runner.vocab_size)
    assert fewer == (positions + 1) // 2 and len(whole) == len(part)


def test_a_reduced_vocabulary_is_counted_without_held_out_rows(runner, rows, tmp_path, monkeypatch):
    counted = []

    def stop(found, *_):
        counted.append(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes, "frequent_tokens", stop)
    with pytest.raises(KeyboardInterrupt):
        train_eagle(Workspace(runner, None, tmp_path, rows=rows), tmp_path, HeadPlan(), EagleRun(3, 2, (1, 2, 3), 60))
    assert torch.equal(counted[0], rows[:-3])


@pytest.mark.parametrize(
    ("train", "kind", "memory"),
    [
        (train_medusa, MedusaRun(1, 10**5), 10**9),
        (train_block, BlockRun(4, 1, (2,), markov_rank=10**6), 10**9),
        (train_eagle, EagleRun(3, 2, (1, 2, 3)), 10**5),
        (train_mtp, MtpRun(2), 10**4),
    ],
)
def test_heads_that_do_not_fit_into_memory_are_refused_before_text_is_read(train, kind, memory, runner, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.memory.total_memory", lambda: memory)
    monkeypatch.setattr(shapes, "_add_nothing", None)  # a built head is initialised
    workspace = Workspace(runner, None, tmp_path, Source(paths=(tmp_path / "missing.txt",)))
    with pytest.raises(OutriderError, match=r"gradients and optimizer state, takes at least .* of memory: train a smaller"):
        train(workspace, tmp_path, HeadPlan(), kind)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp", "dflash"])
def test_a_continued_head_that_does_not_fit_into_memory_is_refused_before_text_is_read(kind, runner, tmp_path, monkeypatch):
    start = tmp_path / "start"
    if kind == "medusa":
        medusa_heads.export(shapes.new_medusa(runner, 2, 1), start, runner.vocab_size)
    elif kind == "eagle3":
        eagle_formats.export(shapes.new_eagle(runner, 3, (0, 2, 3), None), start)
    elif kind == "mtp":
        mtp_formats.export(shapes.new_mtp(runner), start)
    else:
        block_formats.export(shapes.new_block(runner, shapes.BlockSizes((2, 3), 1, 4), 319), start, LAYERS)
    train, run = {
        "medusa": (train_medusa, MedusaRun(start=str(start))),
        "eagle3": (train_eagle, EagleRun(start=str(start))),
        "mtp": (train_mtp, MtpRun(start=str(start))),
        "dflash": (train_block, BlockRun(start=str(start))),
    }[kind]
    monkeypatch.setattr("outrider.memory.total_memory", lambda: 10**4)
    workspace = Workspace(runner, None, tmp_path, Source(paths=(tmp_path / "missing.txt",)))
    with pytest.raises(OutriderError, match=r"gradients and optimizer state, takes at least .* of memory: train a smaller"):
        train(workspace, tmp_path / "out", HeadPlan(), run)


def test_the_memory_of_an_mtp_head_includes_its_projection(runner, monkeypatch):
    counted = []
    monkeypatch.setattr(shapes, "_check_fits", lambda head, _: counted.append(sum(each.numel() for each in head.parameters())))
    head = shapes.new_mtp(runner)
    assert counted == [sum(each.numel() for each in (*head.fc.parameters(), *head.layers.parameters()))]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "speculators", "dflash"])
def test_a_new_head_has_the_rope_of_its_target_also_when_it_is_read_back(kind, tmp_path):
    target = make_folder(tmp_path / "target", num_hidden_layers=LAYERS, hidden_size=32, rope_parameters=dict(LLAMA3))
    runner = ModelRunner.load(str(target), RunnerConfig(compile="never"))
    if kind == "dflash":
        head = shapes.new_block(runner, shapes.BlockSizes((2, 3), 1, 4), 319)
        block_formats.export(head, tmp_path / "head", LAYERS)
        again = block_formats.load(tmp_path / "head", runner)
    else:
        head = shapes.new_eagle(runner, 1 if kind == "eagle1" else 3, (0, 2, 3), None)
        eagle_formats.export(head, tmp_path / "head", "speculators" if kind == "speculators" else "native")
        again = eagle_formats.load(tmp_path / "head", runner)
    assert head.shape.config.rope_parameters == again.shape.config.rope_parameters == LLAMA3
    assert not list(findings._context(again, runner))  # the doctor has no remark


@pytest.mark.parametrize(
    ("kind", "rope", "expected"),
    [
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        ),
        (
            "llama",
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
        (
            "glm4",
            {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
    ],
)
def test_a_new_head_has_the_theta_of_any_target(kind, rope, expected):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    config = CONFIG_MAPPING[kind](**sizes, num_hidden_layers=2, num_key_value_heads=2, rope_parameters=rope, pad_token_id=0)
    target = SimpleNamespace(model=SimpleNamespace(config=config), hidden_size=32, vocab_size=64, max_len=64)
    assert shapes.head_config(target, LlamaConfig).rope_parameters == expected


def test_rows_too_short_for_medusa_heads_are_refused_before_the_heads_are_built(runner, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "new_medusa", None)
    with pytest.raises(OutriderError, match="too short for 100000 heads"):
        train_medusa(Workspace(runner, None, tmp_path, rows=rows), tmp_path, HeadPlan(), MedusaRun(10**5))


def test_every_format_that_can_be_written_is_an_option():
    """Options declare the names themselves, because the help imports no torch."""
    assert [EagleRun(format=(name,)).format for name in eagle_formats.FORMATS] == [("native",), ("speculators",)]
    assert [MtpRun(format=name).format for name in mtp_formats.LAYOUTS] == ["qwen", "deepseek", "mimo"]


def test_a_draft_vocabulary_of_all_tokens_is_not_a_reduced_one(runner):
    assert eagle_sizes(EagleRun(3, draft_vocab=runner.vocab_size), runner, SEQ)[2] is None
    assert eagle_sizes(EagleRun(3, draft_vocab=runner.vocab_size - 1), runner, SEQ)[2] == runner.vocab_size - 1


def test_a_new_eagle1_head_has_no_bias_in_fc(runner):
    """vLLM's has none."""
    assert shapes.new_eagle(runner, 1, (LAYERS,), None).fc.bias is None


def test_a_resumed_run_with_another_pace_says_so_in_one_line(runner, cache, tmp_path, caplog):
    run_until(2, run_of("medusa", runner, cache, tmp_path))
    assert run_of("medusa", runner, cache, tmp_path).step == 2 and "resuming" not in caplog.text
    run_of("medusa", runner, cache, tmp_path, steps=9)
    assert "medusa: resuming with another --epochs: the weights will differ" in caplog.text


def test_a_second_process_does_not_train_in_the_same_folder(runner, cache, tmp_path):
    trainer = run_of("medusa", runner, cache, tmp_path)
    with (
        exclusive(tmp_path),
        pytest.raises(OutriderError, match=r"another run is writing to .*: wait for it, or give another"),
    ):
        trainer.run()
    trainer.run()


def test_a_run_continues_from_what_another_process_has_written_since(runner, cache, tmp_path):
    late = run_of("medusa", runner, cache, tmp_path, steps=3)
    run_until(2, run_of("medusa", runner, cache, tmp_path, steps=3))
    run_until(1, late)  # of three steps
    assert late.step == 3 and [point["step"] for point in late.curve] == [1, 2, 3]


def test_the_final_measurement_keeps_others_out(runner, cache, tmp_path):
    trainer = run_of("medusa", runner, cache, tmp_path, steps=1)

    def measure(final):
        with pytest.raises(OutriderError, match="another run is writing to"), exclusive(tmp_path):
            pass
        return {"measured": final}

    trainer.evaluate = measure
    trainer.run()
    assert trainer.curve[-1]["measured"] is True


def test_a_second_process_does_not_write_the_same_text_and_features(runner, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "token_rows", lambda *_: rows[:3])
    workspace = Workspace(runner, object(), tmp_path, Source(seq_len=SEQ, regenerate=True, prompt_len=5))
    for name, write in (("text", workspace.training_rows), ("features", lambda: workspace.features([2]))):
        with exclusive(tmp_path / name), pytest.raises(OutriderError, match=f"another run is writing to .*{name}"):
            write()
        workspace.rows = rows[:3]
    workspace.features([2])


def test_a_run_without_room_leaves_the_signal_handlers(runner, cache, tmp_path, monkeypatch):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OutriderError, match="of free disk space"):
        run_of("medusa", runner, cache, tmp_path).run()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_run_with_other_settings_is_not_resumed(kind, runner, rows, tmp_path, monkeypatch):
    workspace = Workspace(runner, None, tmp_path / "work", rows=rows)
    how = HeadPlan(epochs=0.1, batch_tokens=6 * SEQ)

    def train(changed):
        if kind == "medusa":
            return train_medusa(workspace, tmp_path / "out", how, MedusaRun(3 if changed else 2))
        return train_eagle(workspace, tmp_path / "out", how, EagleRun(3, 2, (3, 2, 1) if changed else (1, 2, 3)))

    train(changed=False)
    with pytest.raises(OutriderError, match=r"other (heads|layers): give another folder") as error:
        train(changed=True)
    folder = tmp_path / "work" / kind
    (folder / "run.json").unlink()
    (folder / "checkpoint.pt").write_bytes(b"cut short")
    with pytest.raises(OutriderError, match="delete it to start again") as error:
        train(changed=False)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch, "load", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("can't allocate memory")))
    with pytest.raises(RuntimeError, match="allocate"):  # says nothing about the checkpoint
        train(changed=False)


def test_the_time_of_a_run_is_that_of_its_steps(runner, cache, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("outrider.train.trainer.time", SimpleNamespace(monotonic=lambda: now[0]))

    def passing(seconds, call):
        def timed(*given, **named):
            now[0] += seconds
            return call(*given, **named)

        return timed

    for steps in (2, 3):
        trainer = run_of("medusa", runner, cache, tmp_path, steps=3)
        trainer.plan = replace(trainer.plan, eval_every_s=1.0)
        trainer._accumulate = passing(30.0, trainer._accumulate)
        trainer.evaluate, trainer.save = passing(500.0, lambda final: {}), passing(500.0, trainer.save)
        run_until(steps, trainer) if steps == 2 else trainer.run()
        assert trainer.elapsed == 30.0 * steps


def test_invalid_training_is_reported_before_the_target_generates_text(runner, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("text was generated")

    monkeypatch.setattr(Workspace, "training_rows", never)
    workspace = Workspace(runner, None, tmp_path / "work", Source(seq_len=SEQ))
    how = HeadPlan()
    cases = [
        (lambda: train_medusa(workspace, tmp_path, how, MedusaRun(SEQ)), "too short for 24 heads"),
        (lambda: train_eagle(workspace, tmp_path, how, EagleRun(3, hidden_states=(1, 2, 9))), "has 0 to 6"),
        (lambda: train_eagle(workspace, tmp_path, how, EagleRun(3, steps=40)), "too short for 40 steps"),
        (lambda: train_eagle(workspace, tmp_path, how, EagleRun(3, draft_vocab=10**6)), "draft vocabulary of 1000000"),
        (lambda: train_eagle(workspace, tmp_path, how, EagleRun(3, hidden_states=(1, 1, 1))), "three different ones"),
        (lambda: train_eagle(workspace, tmp_path, how, EagleRun(1, format=("speculators",))), "native format only"),
    ]
    for run, message in cases:
        with pytest.raises(OutriderError, match=message):
            run()


def test_invalid_training_gives_a_one_line_error(runner, llm, rows, tmp_path):
    def workspace(**source):
        return Workspace(runner, llm.tokenizer, tmp_path / "work", Source(**source))

    how = HeadPlan()
    (tmp_path / "short.txt").write_text("one two")
    (tmp_path / "odd.jsonl").write_text('{"body": 1}\n')
    cases = [
        (lambda: train_medusa(workspace(paths=(tmp_path / "none.txt",)), tmp_path, how, MedusaRun()), "does not exist"),
        (
            lambda: train_medusa(workspace(paths=(tmp_path / "short.txt",)), tmp_path, how, MedusaRun()),
            "at least two rows of 256: give more with --text, or a lower --seq-len",
        ),
        (
            lambda: train_medusa(workspace(paths=(tmp_path / "odd.jsonl",)), tmp_path, how, MedusaRun()),
            "odd.jsonl, line 1: expected one JSON object per line, with",
        ),
    ]
    from_rows = Workspace(runner, None, tmp_path / "work", rows=rows)
    cases += [
        (lambda: train_eagle(from_rows, tmp_path, how, EagleRun(2)), "invalid generation 2"),
        (lambda: train_eagle(from_rows, tmp_path, how, EagleRun(3, hidden_states=(1, 2, 9))), "has 0 to 6"),
        (lambda: train_eagle(from_rows, tmp_path, how, EagleRun(3, steps=40)), "too short for 40 steps"),
        (lambda: train_eagle(from_rows, tmp_path, how, EagleRun(3, draft_vocab=10**6)), "draft vocabulary of 1000000"),
        (lambda: train_eagle(from_rows, tmp_path, how, EagleRun(1, format=("speculators",))), "native format only"),
        (
            lambda: train_eagle(from_rows, tmp_path, how, EagleRun(3, steps=0)),
            "invalid steps 0: expected a whole number, at least 1",
        ),
        (lambda: train_mtp(from_rows, tmp_path, how, MtpRun(steps=40)), "too short for 40 steps"),
        (lambda: train_mtp(from_rows, tmp_path, how, MtpRun(steps=0)), "invalid steps 0: expected a whole number, at least 1"),
        (lambda: train_block(from_rows, tmp_path, how, BlockRun(40)), "too short for blocks of 40"),
        (
            lambda: train_block(from_rows, tmp_path, how, BlockRun(4, hidden_states=(0, 2))),
            "invalid hidden_states .0, 2.: expected a list of whole numbers from 1 on",
        ),
        (lambda: train_block(from_rows, tmp_path, how, BlockRun(4, hidden_states=(1, 9))), "invalid hidden states"),
        (
            lambda: train_block(from_rows, tmp_path, how, BlockRun(1)),
            "invalid block_size 1: expected a whole number, at least 2",
        ),
        (lambda: train_mtp(from_rows, tmp_path, how, MtpRun(format="gguf")), "invalid format 'gguf': expected qwen, deepseek"),
        (lambda: train_mtp(from_rows, tmp_path, how, MtpRun(start=runner.name)), "holds no MTP head"),
        (lambda: default_hidden_states(4), "name three of them"),
    ]
    for run, message in cases:
        with pytest.raises(OutriderError, match=message) as error:
            run()
        assert "\n" not in str(error.value)
