"""Training drafts with mask tokens: masks attend as in drafting, and every depth learns."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from cut import cut_after
from safetensors.torch import load_file
from tiny_folder import make_folder, make_tokenizer
from tiny_hybrids import hybrid
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from outrider import LLM, SamplingParams
from outrider.runner.parallel_draft import ParallelDraft, mask_token_of
from outrider.train.acceptance import acceptance, summary
from outrider.train.distillation import DistillationLoss
from outrider.train.model_runs import DraftRun, train_draft, trainable
from outrider.train.options import Distillation, DraftShape, HeadPlan, Parallel
from outrider.train.parallel import Entries, ParallelDraftTraining, mask_token, spare_token
from outrider.train.runs import Workspace
from outrider.train.trainer import Trainer
from outrider.types import OutriderError

from .test_models import tiny

SEQ, MASK = 24, 63
FAST = HeadPlan(epochs=2.0, batch_tokens=6 * SEQ, muon_lr=0.02, adam_lr=0.004)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("target"), num_hidden_layers=3, hidden_size=32, initializer_range=0.5)


@pytest.fixture(scope="module")
def rows():
    pattern = torch.arange(8, 8 + 2 * SEQ)  # the next two tokens are predictable
    return torch.stack([pattern.roll(shift)[:SEQ] for shift in range(60)]).int()


@pytest.fixture
def workspace(folder, rows, tmp_path):
    return Workspace(trainable(str(folder)), None, tmp_path / "work", rows=rows)


def drawn(seq_len, how, step=0):
    return Entries.drawn(seq_len, how, torch.Generator().manual_seed(step))


# -- entries of a pass --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depths", "keep", "least"), [(8, 0.7, 0.2), (4, 1.0, 1.0), (2, 0.5, 0.1), (6, 0.01, 0.01)])
def test_each_depth_keeps_its_share_of_the_chains_before_it(depths, keep, least):
    how = Parallel(depths, keep, least)
    entries = drawn(40, how)
    chains = [set(entries.anchors[entries.depths == depth].tolist()) for depth in range(depths)]
    assert chains[0] == set(range(40))
    for depth, (anchors, before) in enumerate(zip(chains[1:], chains, strict=False), start=1):
        assert len(anchors) == (entries.depths == depth).sum()  # each chain once
        assert len(anchors) == max(1, round((40 - depths + 1) * max(keep**depth, least)))
        assert anchors <= before
    assert entries.positions.max() == 39  # every entry has a target
    assert torch.equal(entries.anchors, drawn(40, how).anchors) and not torch.equal(entries.anchors, drawn(40, how, 1).anchors)
    seen = torch.stack([torch.bincount(drawn(40, how, step).anchors, minlength=40) for step in range(300)]).sum(0)[
        : 41 - depths
    ]
    assert seen.min() > 300 and seen.max() - seen.min() < 0.5 * seen.max()  # all positions are used


def test_an_entry_attends_to_its_prefix_and_the_masks_of_its_own_chain():
    entries = drawn(10, Parallel(4))
    anchors, depths = entries.anchors.tolist(), entries.depths.tolist()
    for mine, row in enumerate(entries.visible().tolist()):
        for other, sees in enumerate(row):
            is_text = depths[other] == 0 and anchors[other] <= anchors[mine]
            is_chain = anchors[other] == anchors[mine] and 0 < depths[other] <= depths[mine]
            assert sees == (is_text or is_chain)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_logits_of_all_entries_equal_those_of_each_chain_alone(kind):
    """One forward pass per mask, over the tokens before it and the masks of its chain, as in drafting."""
    draft = tiny(kind)
    draft.config.sliding_window = 2 * SEQ  # Gemma 2 has eager attention, which adds masks
    training = ParallelDraftTraining(draft, MASK, Parallel(5))
    training.check(SEQ)
    text = torch.randint(0, 60, (3, SEQ), generator=torch.Generator().manual_seed(2))
    entries = drawn(SEQ, training.options)
    found = training.logits(text, entries)
    torch.testing.assert_close(found[:, :SEQ], draft(text).logits, rtol=1e-4, atol=1e-4)
    for place, (anchor, depth) in enumerate(zip(entries.anchors.tolist(), entries.depths.tolist(), strict=True)):
        alone = torch.cat((text[:, : anchor + 1], torch.full((3, depth), MASK)), 1)
        torch.testing.assert_close(found[:, place], draft(alone).logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seq_len", [6, 7, 8, 9])
def test_masks_are_checked_in_short_rows(seq_len):
    """The two anchors of the check are the same one in rows of 2K or 2K + 1 tokens."""
    assert ParallelDraftTraining.prepare(tiny("llama"), None, Parallel(4), seq_len).options.depths == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("gemma2"), "Gemma2ForCausalLM"),  # it has a window of 4, and eager attention
        (lambda: hybrid("qwen3_5_text"), "Qwen3_5ForCausalLM"),
        (lambda: hybrid("mamba2"), "Mamba2ForCausalLM"),
    ],
)
def test_unsupported_attention_for_masks_is_rejected_in_one_line(make, message):
    draft = make()
    with pytest.raises(OutriderError, match=f"unsupported model for parallel drafts: {message}") as error:
        ParallelDraftTraining.prepare(draft, None, Parallel(4), SEQ)
    assert "\n" not in str(error.value)


# -- the mask token ------------------------------------------------------------------------------------------------------------


def test_the_mask_token_is_an_unused_row_a_reserved_name_or_an_additional_row():
    tokenizer = make_tokenizer()
    assert spare_token(tokenizer, 336) == 320 and spare_token(tokenizer, 320) == 320 and spare_token(None, 336) == 336
    for names, wanted in (
        (["<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|user|>"], 321),
        (["<unused7>"], 320),
        (["[unused3]", "<|unused_4|>"], 321),
        (["<|reserved_in_template|>", "reserved", "<|user|>"], 323),
    ):
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)
        tokenizer.chat_template = "{{ '<|reserved_in_template|>' }}"
        assert spare_token(tokenizer, len(tokenizer)) == wanted


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_new_mask_token_starts_as_the_mean_and_changes_nothing_else(tied, tmp_path):
    folder = make_folder(tmp_path / "draft", tie_word_embeddings=tied)
    draft = AutoModelForCausalLM.from_pretrained(folder)
    text = torch.arange(5, 25)[None]
    before, mean = draft(text).logits, draft.get_input_embeddings().weight.mean(0)
    assert mask_token(draft, make_tokenizer()) == 320 == mask_token(draft, make_tokenizer())
    assert (draft.config.pard_token, draft.config.spd_type, draft.config.vocab_size) == (320, "pard", 321)
    torch.testing.assert_close(draft.get_input_embeddings().weight[320], mean)
    torch.testing.assert_close(draft(text).logits[..., :320], before)
    padded = AutoModelForCausalLM.from_pretrained(make_folder(tmp_path / "padded", vocab_size=336, tie_word_embeddings=tied))
    assert mask_token(padded, make_tokenizer()) == 320 and padded.config.vocab_size == 336


# -- learning ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_the_loss_is_the_mean_over_tokens_and_masks(divergence):
    draft, target = tiny("llama"), tiny("llama")
    target.lm_head.weight.mul_(2)
    training = ParallelDraftTraining(draft, MASK, Parallel(3))
    loss = DistillationLoss(draft, target, Distillation(loss=divergence), seed=5, parallel=training)
    ids = torch.randint(0, 60, (2, 13), generator=torch.Generator().manual_seed(1))
    found, parts = loss(ids, 0, 4, 0.5)
    text = ids[:, :-1]
    entries = Entries.drawn(12, training.options, torch.Generator().manual_seed(5 * 1_000_003 + 4))
    said, each = target(text).logits.log_softmax(-1), []
    for anchor, depth in zip(entries.anchors.tolist(), entries.depths.tolist(), strict=True):
        alone = torch.cat((text[:, : anchor + 1], torch.full((2, depth), MASK)), 1)
        mine, theirs = draft(alone).logits[:, -1].log_softmax(-1), said[:, anchor + depth]
        kl, tv = (theirs.exp() * (theirs - mine)).sum(-1), (theirs.exp() - mine.exp()).abs().sum(-1) / 2
        each.append(kl if divergence == "kl" else tv)
    assert float(found) == pytest.approx(float(torch.stack(each).mean()), rel=1e-4)
    assert torch.equal(found, loss(ids, 1, 4, 0.6)[0]) and not torch.equal(found, loss(ids, 0, 5, 0.5)[0])
    assert set(parts) == {divergence, "hit_draft"}


@torch.no_grad()
def test_acceptance_is_measured_in_rounds_of_k_drafts():
    draft, target = tiny("llama"), tiny("gpt2")
    training = ParallelDraftTraining(draft, MASK, Parallel(3))
    rows = torch.randint(0, 60, (5, 13), generator=torch.Generator().manual_seed(1))
    found = training.measure(target, rows)
    greedy, sampled = [], []
    for row in rows:
        for anchor in range(0, 11, 3):
            alone = torch.cat((row[: anchor + 1], torch.full((2,), MASK)))
            said = target(row[None]).logits[0, anchor : anchor + 3]
            both = acceptance(said, draft(alone[None]).logits[0, -3:])
            greedy.append(both[0])
            sampled.append(both[1])
    wanted = summary([(torch.stack(greedy), torch.stack(sampled))])
    for name in ("greedy", "sampled"):
        assert found[name]["by_depth"] == pytest.approx(wanted[name]["by_depth"], abs=2e-4)
        assert found[name]["mean_acceptance_length"] == pytest.approx(wanted[name]["mean_acceptance_length"], abs=2e-3)
    mean = torch.stack(sampled)
    length = 1 + mean[:, 0].mean() + (mean[:, 0] * mean[:, 1]).mean() + mean.prod(-1).mean()
    assert found["sampled"]["mean_acceptance_length"][3] == pytest.approx(float(length), abs=2e-3)


def test_a_draft_learns_every_depth_and_drafts_in_one_pass(folder, workspace, rows, tmp_path):
    many = replace(workspace, rows=rows.repeat(4, 1))  # acceptance of few rows is noise
    out, how = tmp_path / "out", Parallel(4, keep_least=0.3)
    plan = replace(FAST, epochs=4.0)
    train_draft(many, out, plan, DraftRun(DraftShape(layers=2), parallel=how))
    measured = json.loads((out / "measured.json").read_text())
    for name in ("greedy", "sampled"):
        before, after = (measured[when][name]["by_depth"] for when in ("before", "after"))
        assert len(after) == 4 and after[0] >= before[0] - 0.05
        assert all(mine > theirs for mine, theirs in zip(after[1:], before[1:], strict=True)), (before, after)
    assert min(after[1:]) > max(before[1:]) + 0.08  # sampled acceptance, which has less noise
    shorter, longer = (measured[when]["greedy"]["mean_acceptance_length"]["4"] for when in ("before", "after"))
    assert longer > shorter + 0.1
    # an ordinary folder with the config of published drafts
    config = json.loads((out / "config.json").read_text())
    assert config["pard_token"] == 320 and config["spd_type"] == "pard" and config["architectures"] == ["LlamaForCausalLM"]
    assert mask_token_of(AutoConfig.from_pretrained(out)) == 320
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.get_input_embeddings().weight.shape[0] == 321
    assert AutoTokenizer.from_pretrained(out).get_vocab() == make_tokenizer().get_vocab()
    prompt, params = rows[3, :10].tolist(), SamplingParams(max_tokens=12, ignore_eos=True)
    plain = LLM(str(folder), method="plain", compile="never").generate([prompt], params)[0].outputs[0]
    drafted = LLM(str(folder), draft=str(out), num_draft_tokens=4, compile="never")
    assert isinstance(drafted.proposer.draft, ParallelDraft)
    assert drafted.generate([prompt], params)[0].outputs[0].token_ids == plain.token_ids and drafted.stats.num_drafts > 0


def test_an_existing_draft_becomes_parallel_and_a_parallel_one_continues(workspace, tmp_path):
    start = make_folder(tmp_path / "start", seed=4, num_hidden_layers=1, hidden_size=32, vocab_size=336)
    spoken = replace(workspace, tokenizer=make_tokenizer(), work=tmp_path / "first")
    how = Parallel(3)
    train_draft(spoken, tmp_path / "out", FAST, DraftRun(start=str(start), parallel=how))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pard_token"] == 320
    again = replace(spoken, work=tmp_path / "second")
    train_draft(again, tmp_path / "more", FAST, DraftRun(start=str(tmp_path / "out"), parallel=how))
    first, second = (json.loads((tmp_path / name / "measured.json").read_text()) for name in ("out", "more"))
    assert second["before"]["sampled"]["acceptance"] == pytest.approx(first["after"]["sampled"]["acceptance"], abs=1e-3)
    with pytest.raises(OutriderError, match="drafts in parallel, with mask token 320: give --parallel"):
        train_draft(replace(spoken, work=tmp_path / "third"), tmp_path / "no", FAST, DraftRun(start=str(tmp_path / "out")))


def test_an_interrupted_run_ends_with_the_same_weights(workspace, tmp_path, monkeypatch):
    def train(name):
        at = replace(workspace, work=tmp_path / f"{name}-work")
        kind = DraftRun(parallel=Parallel(3), teaching=Distillation(on_policy=0.4, prompt_len=5))
        return train_draft(at, tmp_path / name, FAST, kind)

    train("whole")
    whole = Trainer.run
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda self: whole(cut_after(3, self)))
        with pytest.raises(KeyboardInterrupt):
            train("cut")
    train("cut")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_invalid_training_gives_a_one_line_error(workspace, tmp_path):
    train_draft(workspace, tmp_path / "out", replace(FAST, epochs=0.1))

    def train(*values):
        return lambda: train_draft(workspace, tmp_path / "out", FAST, DraftRun(parallel=Parallel(*values)))

    cases = [
        (train(1), "invalid parallel 1: expected a whole number, at least 2"),
        (train(4, 0.0), "invalid keep 0.0: expected a finite number, above 0, at most 1"),
        (train(4, 0.7, 1.5), "invalid keep_least 1.5: expected a finite number"),
        (train(SEQ - 1), f"rows of {SEQ} tokens are too short for {SEQ - 1} parallel drafts"),
        (train(4), "other parallel: give another folder"),  # an ordinary draft was trained there
    ]
    for run, message in cases:
        with pytest.raises(OutriderError, match=message) as error:
            run()
        assert "\n" not in str(error.value)
