"""Training whole tiny models: LayerSkip's formulas, distillation, resuming, and exported folders."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from cut import cut_after
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder, make_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GemmaConfig, GPT2Config, LlamaConfig

from outrider import LLM, SamplingParams
from outrider.runner import ModelRunner, RunnerConfig
from outrider.train import model_runs, optim, runs
from outrider.train.acceptance import acceptance, in_rounds, summary
from outrider.train.continuation import continue_rows
from outrider.train.decoder import Decoder
from outrider.train.distillation import DistillationLoss, divergence
from outrider.train.draft_model import chosen_layers, draft_config, new_draft
from outrider.train.layer_skip import EarlyExitLoss, drop_rates, exit_weights
from outrider.train.model_runs import DraftRun, train_draft, train_early_exit
from outrider.train.options import Distillation, DraftShape, EagleRun, HeadPlan, LayerSkip, MedusaRun, Parallel
from outrider.train.plan import TrainingPlan
from outrider.train.runs import Workspace, train_eagle, train_medusa
from outrider.train.shrink import can_shrink
from outrider.train.trainer import Trainer
from outrider.types import OutriderError

LAYERS, SEQ = 5, 24
FAST = HeadPlan(epochs=2.0, batch_tokens=6 * SEQ, muon_lr=0.02, adam_lr=0.004)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS, hidden_size=32, initializer_range=0.5)


@pytest.fixture(scope="module")
def runner(folder):
    return ModelRunner.load(str(folder), RunnerConfig(compile="never"))


@pytest.fixture(scope="module")
def rows():
    pattern = torch.arange(8, 8 + 2 * SEQ)  # the next token is predictable
    return torch.stack([pattern.roll(shift)[:SEQ] for shift in range(60)]).int()


def workspace_of(folder, work, rows):
    return Workspace(model_runs.trainable(str(folder)), None, work, rows=rows)


@pytest.fixture
def workspace(folder, rows, tmp_path):
    return workspace_of(folder, tmp_path / "work", rows)


def tiny(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {
        "llama": lambda: LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2, initializer_range=0.3),
        "gemma2": lambda: Gemma2Config(
            **sizes, intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0
        ),
        "gemma": lambda: GemmaConfig(**sizes, intermediate_size=48, num_key_value_heads=2, head_dim=8, pad_token_id=0),
        "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=1),
    }[kind]()
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind == "gemma2" else "sdpa").eval()


# -- LayerSkip ---------------------------------------------------------------------------------------------------------------


def test_dropout_and_exit_weights_are_the_papers_formulas():
    count = 6
    for depth, rate in enumerate(drop_rates(count, 0.1)):
        assert rate == pytest.approx((math.exp(depth * math.log(2) / (count - 1)) - 1) * 0.1)
    weights = exit_weights(count, 0.2)
    assert weights[:-1] == pytest.approx([0.2 * sum(range(depth + 1)) for depth in range(count - 1)])
    assert weights[-1] == pytest.approx(count - 1 + 0.2 * sum(range(count - 1)))


def test_layers_are_dropped_per_row_at_the_given_rates():
    loss = EarlyExitLoss(Decoder(tiny("llama")), LayerSkip(max_drop=0.5))
    drawn = torch.stack([loss.runs(16, step, 0.3) for step in range(400)])  # [steps, L, B]
    assert drawn.float().mean((0, 2)) == pytest.approx([1 - rate for rate in drop_rates(4, 0.5)], abs=0.02)
    assert not torch.equal(drawn[:, -1, 0], drawn[:, -1, 1])


def test_exits_rotate_so_that_all_are_trained():
    loss = EarlyExitLoss(Decoder(tiny("llama")), LayerSkip())
    loss.decoder.layers.extend(tiny("llama").model.layers)  # 8 layers
    assert [loss.exits(step, 0.5) for step in range(7)] == [[1], [2], [3], [4], [5], [6], [1]]
    loss.options = LayerSkip(rotation=3)
    assert [loss.exits(step, 0.5) for step in range(4)] == [[1, 4], [2, 5], [3, 6], [1, 4]]
    loss.options = LayerSkip(rotation=1)
    assert loss.exits(5, 0.5) == [1, 2, 3, 4, 5, 6]


@torch.no_grad()
def test_passes_of_a_step_train_the_same_exits_with_other_layers_dropped():
    loss = EarlyExitLoss(Decoder(tiny("llama")), LayerSkip(max_drop=0.9))
    ids = torch.randint(0, 64, (8, 9), generator=torch.Generator().manual_seed(1))
    (first, parts), (second, others), (next_step, _) = (loss(ids, step, draw, 0.5) for step, draw in ((1, 2), (1, 3), (2, 2)))
    assert parts.keys() == others.keys() and first != second != next_step
    assert torch.equal(first, loss(ids, 1, 2, 0.5)[0])


def test_loss_weights_of_active_exits_sum_to_one():
    decoder, how = Decoder(tiny("llama")), LayerSkip(max_drop=0.0, exit_scale=0.7, rotation=1)
    ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss, parts = EarlyExitLoss(decoder, how)(ids, 0, 0, 0.5)
        states, weights = decoder.hidden_states(ids[:, :-1]), exit_weights(4, 0.7)
        losses = [float(decoder.token_loss(state, ids[:, 1:])) for state in states]
    wanted = sum(weights[depth] * losses[depth] for depth in (1, 2, 3)) / sum(weights[1:])
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(parts["loss"]) == pytest.approx(losses[3], rel=1e-5) and set(parts) == {"loss", "exit_2", "exit_3"}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_layers_are_recorded_and_skipped_in_the_models_own_forward_pass(kind):
    model = tiny(kind)
    decoder = Decoder(model)
    decoder.check()
    ids = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(2))
    said = model(ids, output_hidden_states=True)
    states = decoder.hidden_states(ids)
    for mine, theirs in zip(states[:-1], said.hidden_states[1:-1], strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(decoder.logits(states[-1]), said.logits)
    runs = torch.ones(4, 3, dtype=torch.bool)
    runs[2, 1] = runs[3] = False
    partly = decoder.hidden_states(ids, runs)
    torch.testing.assert_close(partly[2][[0, 2]], states[2][[0, 2]])
    assert torch.equal(partly[2][1], partly[1][1]) and torch.equal(partly[3], partly[2])
    torch.testing.assert_close(model(ids).logits, said.logits)  # the model is unchanged afterwards


def test_layers_with_additional_outputs_are_rejected_in_one_line():
    model = tiny("llama")
    forward = model.model.layers[1].forward
    Decoder(model).check()
    model.model.layers[1].forward = lambda hidden, **options: (forward(hidden, **options),)
    with pytest.raises(OutriderError, match="the layers of LlamaForCausalLM cannot be skipped") as error:
        Decoder(model).check()
    assert "\n" not in str(error.value)


def test_early_exit_training_improves_exits_and_writes_a_model_folder(workspace, rows, tmp_path):
    out = tmp_path / "out"
    train_early_exit(workspace, out, replace(FAST, epochs=6.0), LayerSkip(exit_scale=3.0, rotation=1))
    measured = json.loads((out / "measured.json").read_text())
    before, after = measured["before"], measured["after"]
    assert after["loss"] < 0.5 * before["loss"]
    for depth in ("3", "4"):  # earlier exits of so small a model have too few layers
        for how in ("greedy", "sampled"):
            assert after["exits"][depth][how]["acceptance"] > before["exits"][depth][how]["acceptance"]
        assert after["exits"][depth]["greedy"]["mean_acceptance_length"]["4"] > 2
    assert (out / "early-exit_curve.png").exists() and json.loads((out / "early-exit_curve.json").read_text())[-1]["final"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and model.config.num_hidden_layers == LAYERS
    assert AutoTokenizer.from_pretrained(out).get_vocab() == make_tokenizer().get_vocab()
    prompt, params = rows[3, :10].tolist(), SamplingParams(max_tokens=12, ignore_eos=True)
    plain = LLM(str(out), method="plain", compile="never").generate([prompt], params)[0].outputs[0]
    early = LLM(str(out), method="early-exit:layers=3", num_draft_tokens=3, compile="never")
    assert early.generate([prompt], params)[0].outputs[0].token_ids == plain.token_ids
    assert early.stats.acceptance_rate > 0.5


def test_the_loss_is_the_mean_over_all_held_out_rows(monkeypatch):
    monkeypatch.setattr(model_runs, "ROWS", 2)
    model, ids = tiny("llama"), torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    assert model_runs.measure_exits(Decoder(model), ids)["loss"] == pytest.approx(float(wanted), abs=1e-4)


# -- distillation ------------------------------------------------------------------------------------------------------------


def test_divergences_and_acceptance_equal_their_formulas():
    generator = torch.Generator().manual_seed(3)
    draft, target = (2 * torch.randn(2, 5, 11, generator=generator) for _ in range(2))
    padded = torch.cat((draft, torch.full((2, 5, 3), 9.0)), -1)  # entries for which the target has no logits are ignored
    draft_probs, target_probs = draft.softmax(-1), target.softmax(-1)
    kl, hit = divergence(padded, target, "kl")
    assert float(kl) == pytest.approx(float((target_probs * (target_probs / draft_probs).log()).sum(-1).mean()), rel=1e-5)
    tv, _ = divergence(padded, target, "tv")
    greedy, sampled = acceptance(target, padded)
    assert float(tv) == pytest.approx(1 - float(sampled.mean()), rel=1e-5)
    assert float(hit) == pytest.approx(float(greedy.mean()))
    torch.testing.assert_close(sampled, torch.minimum(draft_probs, target_probs).sum(-1))


def test_the_mean_acceptance_length_depends_on_runs_not_averages():
    def lengths(greedy):
        """Return the mean acceptance lengths for the share of equal likeliest tokens at each position [S]."""
        target = torch.eye(2)[torch.tensor(greedy).long()][None] * 1e3
        found = summary([in_rounds(target, torch.tensor([[[0.0, 1.0]]]).expand_as(target))])["greedy"]
        assert found["acceptance"] == pytest.approx(sum(found["by_depth"]) / len(found["by_depth"]), abs=1e-4)
        return found["mean_acceptance_length"]

    assert lengths([1] * 5) == {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 5: 6.0}  # rows shorter than the longest round
    stretches = lengths([1] * 12 + [0] * 12)  # half accepted, in one run: 17 rounds of 8
    assert set(stretches) == {1, 2, 3, 4, 6, 8}
    assert stretches[1] == pytest.approx(1 + 12 / 17, abs=1e-3)
    assert stretches[4] == pytest.approx(1 + (12 + 11 + 10 + 9) / 17, abs=1e-3)


def test_a_draft_is_initialised_with_layers_of_its_target(folder):
    target = model_runs.trainable(str(folder))
    assert [chosen_layers(DraftShape(), total) for total in (2, 5, 32)] == [(0,), (0, 2), (0, 8, 16, 24)]
    assert chosen_layers(DraftShape(layers=3), 8) == (0, 2, 5)
    draft, said = new_draft(target, DraftShape(from_layers=(0, 4)))
    assert "layers 0, 4" in said and draft.config.num_hidden_layers == 2
    ids = torch.arange(8, 20)[None]
    runs = torch.tensor([[True], [False], [False], [False], [True]])
    with torch.no_grad():
        mine, theirs = Decoder(draft), Decoder(target)
        wanted = theirs.logits(theirs.hidden_states(ids, runs)[-1])
        torch.testing.assert_close(mine.logits(mine.hidden_states(ids)[-1]), wanted)


MIXED = [  # dense layers and layers with experts
    ("qwen3_moe", {"mlp_only_layers": [4]}),
    ("qwen3_moe", {"mlp_only_layers": [0, 4]}),  # as many as the draft has layers
    ("qwen3_moe", {"mlp_only_layers": list(range(8))}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 3}),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), MIXED, ids=lambda each: str(each))
def test_a_draft_has_experts_where_its_layers_of_the_target_have_them(kind, options):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "n_group": 1}
    latent = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    every = sizes | experts | (latent if kind == "deepseek_v3" else {}) | {"topk_group": 1, "num_hidden_layers": 8} | options
    target = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**every), dtype=torch.float32)
    draft, _ = new_draft(target, DraftShape())
    again = AutoModelForCausalLM.from_config(type(draft.config)(**draft.config.to_dict()), dtype=torch.float32)
    for mine, index in ((0, 0), (1, 4)):
        wanted = target.model.layers[index].state_dict()
        for name, tensor in draft.model.layers[mine].state_dict().items():
            assert torch.equal(tensor, wanted[name])
        assert again.model.layers[mine].state_dict().keys() == wanted.keys()  # as its folder says


def test_a_new_draft_has_the_attention_that_its_target_supports():
    """Gemma 2 and gpt-oss have no support for torch's attention function."""
    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(num_hidden_layers=4, head_dim=8, pad_token_id=0, **shape)
    draft, _ = new_draft(AutoModelForCausalLM.from_config(config), DraftShape(2))
    assert draft(input_ids=torch.ones(1, 5, dtype=torch.long)).logits.shape == (1, 5, 61)


def test_layers_of_other_kinds_than_a_draft_can_have_are_refused():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = CONFIG_MAPPING["glm4_moe"](**sizes, **experts, head_dim=8, num_hidden_layers=5, first_k_dense_replace=1)
    with pytest.raises(
        OutriderError, match="layer 2 of the target has another kind than layer 0 of a draft: give --from-layers"
    ):
        new_draft(AutoModelForCausalLM.from_config(config, dtype=torch.float32), DraftShape(from_layers=(2, 0)))


def test_a_new_draft_of_a_hybrid_has_full_attention():
    types = ["linear_attention"] * 3 + ["full_attention"]
    assert chosen_layers(DraftShape(), 8, types * 2) == (0, 3)
    assert chosen_layers(DraftShape(layers=1), 8, types * 2) == (3,)
    assert chosen_layers(DraftShape(layers=4), 8, types * 2) == (0, 2, 4, 7)
    assert chosen_layers(DraftShape(from_layers=(0, 1)), 8, types * 2) == (0, 1)
    assert chosen_layers(DraftShape(), 8, ["full_attention"] * 8) == chosen_layers(DraftShape(), 8) == (0, 4)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_narrower_draft_equals_its_source_if_the_kept_directions_contain_all(tied, tmp_path):
    made = make_folder(tmp_path, num_hidden_layers=2, hidden_size=64, tie_word_embeddings=tied, attention_bias=True)
    target = AutoModelForCausalLM.from_pretrained(made).eval()
    subspace = torch.linalg.qr(torch.randn(64, 48, generator=torch.Generator().manual_seed(0)))[0]
    for table in {target.get_input_embeddings().weight, target.get_output_embeddings().weight}:
        table.copy_(table @ subspace @ subspace.mT)
    for layer in target.model.layers:  # dropped heads and neurons must have no effect
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    draft, said = new_draft(target, DraftShape(layers=1, width=48))
    assert "48 principal directions" in said
    config = draft.config
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (48, 3, 1, 8)
    ids = torch.randint(0, 320, (4, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draft(ids).logits, target(ids).logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(draft.model.layers[0].self_attn.q_proj.bias, target.model.layers[0].self_attn.q_proj.bias[:24])


def test_per_layer_config_entries_follow_the_chosen_layers():
    config = Gemma2Config(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    assert draft_config(config, (1, 3), 32).layer_types == [config.layer_types[1], config.layer_types[3]]


@pytest.mark.parametrize(
    ("shape", "teaching"),
    [
        (DraftShape(), Distillation()),
        (DraftShape(width=24), Distillation(loss="tv")),
        (DraftShape(layers=1), Distillation(on_policy=0.5, prompt_len=6)),
    ],
)
def test_a_draft_learns_from_its_target(shape, teaching, folder, workspace, rows, tmp_path):
    out = tmp_path / "out"
    train_draft(workspace, out, replace(FAST, epochs=6.0), DraftRun(shape, teaching=teaching))
    losses = [point[teaching.loss] for point in json.loads((out / "draft_curve.json").read_text())]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]) and (out / "draft_curve.png").exists()
    measured = json.loads((out / "measured.json").read_text())
    for how in ("greedy", "sampled"):
        assert measured["after"][how]["acceptance"] > measured["before"][how]["acceptance"]
    prompt, params = rows[3, :10].tolist(), SamplingParams(max_tokens=12, ignore_eos=True)
    drafted = LLM(str(folder), draft=str(out), num_draft_tokens=2, compile="never")
    wanted = LLM(str(folder), method="plain", compile="never").generate([prompt], params)[0].outputs[0].token_ids
    assert drafted.generate([prompt], params)[0].outputs[0].token_ids == wanted and drafted.stats.num_drafts > 0


def test_an_existing_draft_continues_training(workspace, tmp_path):
    start = make_folder(tmp_path / "start", seed=4, num_hidden_layers=1, hidden_size=32)
    train_draft(workspace, tmp_path / "out", FAST, DraftRun(start=str(start)))
    measured = json.loads((tmp_path / "out" / "measured.json").read_text())
    assert measured["after"]["sampled"]["acceptance"] > measured["before"]["sampled"]["acceptance"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 1


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [(4,), (3, 2), (2, 1), (5, 5, 1)])
def test_the_on_policy_share_holds_over_passes_of_few_rows(share, sizes, monkeypatch):
    monkeypatch.setattr(
        "outrider.train.distillation.continue_rows", lambda _, ids, count, *__: ids.new_zeros(len(ids), 2 + count)
    )
    draft = tiny("llama")
    loss = DistillationLoss(draft, draft, Distillation(on_policy=share, prompt_len=2))
    passes = [torch.ones(sizes[index % len(sizes)], 6, dtype=torch.long) for index in range(300)]
    written = [int((loss.written(ids, index) != ids).any(1).sum()) for index, ids in enumerate(passes)]
    assert sum(written) == pytest.approx(share * sum(map(len, passes)), abs=3)
    assert all(abs(rows - share * len(ids)) < 1 for rows, ids in zip(written, passes, strict=True))


def test_a_teacher_of_products_in_bfloat16_has_its_checkpoints_dtype(rows, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    target = make_folder(tmp_path / "target", num_hidden_layers=LAYERS, hidden_size=32, dtype="bfloat16")
    monkeypatch.setattr(model_runs, "run_job", stop)
    for dtype, expected in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        monkeypatch.setattr(runs, "arithmetic_dtype", lambda _, dtype=dtype: dtype)
        at = workspace_of(target, tmp_path / f"work-{dtype}", rows)
        with pytest.raises(KeyboardInterrupt):
            train_draft(at, tmp_path / "out", FAST)
        assert {weight.dtype for weight in at.model.parameters()} == {expected}
        assert {buffer.dtype for buffer in at.model.buffers()} == {torch.float32}


def test_drafts_with_names_of_their_own_share_a_work_folder(workspace, tmp_path):
    how = replace(FAST, epochs=0.1)
    for run in (DraftRun(name="distilled"), DraftRun(name="parallel", parallel=Parallel(3))):
        train_draft(workspace, tmp_path / run.name, how, run)
        assert (workspace.work / run.name / "checkpoint.pt").exists() and (
            tmp_path / run.name / f"{run.name}_curve.json"
        ).exists()


def test_the_draft_generates_its_own_rows_with_the_steps_noise():
    draft, target = tiny("llama"), tiny("llama")
    ids = torch.randint(0, 64, (4, 10), generator=torch.Generator().manual_seed(5))
    loss = DistillationLoss(draft, target, Distillation(on_policy=0.5, prompt_len=4))
    written = loss.written(ids, 3)
    assert torch.equal(written[:, :4], ids[:, :4]) and torch.equal(written[2:], ids[2:])
    assert torch.equal(written, loss.written(ids, 3)) and not torch.equal(written, loss.written(ids, 4))
    greedy = continue_rows(draft, ids[:, :4], 6, torch.zeros(4), torch.Generator())
    wanted = draft.generate(ids[:, :4], attention_mask=torch.ones(4, 4), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(greedy, wanted)


def test_on_policy_training_in_bfloat16_trains_all_weights():
    """The draft generates in the same autocast context, without gradients: the weights converted there must not be reused."""
    draft = tiny("llama").requires_grad_(True)
    loss = DistillationLoss(draft, tiny("llama"), Distillation(on_policy=0.5, prompt_len=4), torch.bfloat16)
    loss(torch.randint(0, 64, (4, 10), generator=torch.Generator().manual_seed(5)), 0, 0, 0.5)[0].backward()
    assert [name for name, weight in draft.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_on_policy_rows_have_only_tokens_of_the_target():
    target, config = tiny("llama"), tiny("llama").config
    draft = AutoModelForCausalLM.from_config(LlamaConfig(**{**config.to_dict(), "vocab_size": config.vocab_size + 1}))

    def likes_its_mask_token(module, args, out):
        out.logits[..., -1] += 1e4

    draft.register_forward_hook(likes_its_mask_token)
    loss = DistillationLoss(draft, target, Distillation(on_policy=1.0, prompt_len=4))
    assert loss.written(torch.ones(4, 12, dtype=torch.long), 0).max() < config.vocab_size


# -- both --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["early-exit", "draft", "early-exit with dropout"])
def test_an_interrupted_run_ends_with_the_same_weights(kind, folder, rows, tmp_path, monkeypatch):
    if kind == "early-exit with dropout":
        folder = make_folder(tmp_path / "dropping", num_hidden_layers=3, hidden_size=32, attention_dropout=0.4)

    def train(name):
        at = workspace_of(folder, tmp_path / f"{name}-work", rows)
        if kind == "draft":
            return train_draft(at, tmp_path / name, FAST, DraftRun(teaching=Distillation(on_policy=0.4, prompt_len=5)))
        return train_early_exit(at, tmp_path / name, FAST, LayerSkip(max_drop=0.4))

    train("whole")
    whole = Trainer.run
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda self: whole(cut_after(3, self)))
        with pytest.raises(KeyboardInterrupt):
            train("cut")
    assert not (tmp_path / "cut").exists()
    train("cut")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    measured = [json.loads((tmp_path / name / "measured.json").read_text()) for name in ("whole", "cut")]
    assert measured[0] == measured[1]


@pytest.mark.parametrize("kind", ["early-exit", "draft", "eagle", "medusa"])
def test_compiled_training_equals_eager_training(kind, folder, runner, rows, tmp_path):
    def losses(how):
        at = workspace_of(folder, tmp_path / str(how.compile), rows)
        at = at if kind in ("draft", "early-exit") else replace(at, target=runner)
        name, out = kind, tmp_path / f"{how.compile}-out"
        if kind == "draft":
            train_draft(at, out, how)
        elif kind == "early-exit":
            train_early_exit(at, out, how, LayerSkip(max_drop=0.4))
        elif kind == "eagle":
            train_eagle(at, out, how, EagleRun(3, 2, (1, 2, 3), 60))
            name = "eagle3"
        else:
            train_medusa(at, out, how, MedusaRun(2))
        points = json.loads((out / f"{name}_curve.json").read_text())
        return [point["loss" if kind != "draft" else "kl"] for point in points]

    eager, compiled = (losses(replace(FAST, epochs=0.5, compile=flag)) for flag in (False, True))
    assert len(eager) > 2 and compiled == pytest.approx(eager, rel=0.02)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_matrices_of_layers_are_trained_by_muon_and_embeddings_are_not(kind):
    model = tiny(kind)
    muon, adam = optim.build(model, TrainingPlan(1, 1, ((1.0, 1),)), torch.float32)
    assert len(muon.param_groups[0]["params"]) == 4 * (7 if kind == "llama" else 4)
    assert any(param is model.get_input_embeddings().weight for param in adam.param_groups[0]["params"])


def test_a_resumed_run_has_the_learning_rates_of_its_command(folder, rows, tmp_path, monkeypatch):
    used = []
    whole = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self: (used.append(self), whole(cut_after(2, self)))[1])
    for muon_lr in (0.02, 0.005):
        at = workspace_of(folder, tmp_path / "work", rows)
        with pytest.raises(KeyboardInterrupt):
            train_early_exit(at, tmp_path / "out", replace(FAST, muon_lr=muon_lr), LayerSkip())
    assert [trainer.optimizers[0].param_groups[0]["base_lr"] for trainer in used] == [0.02, 0.005]
    assert used[1].step == 4


def test_models_that_cannot_be_trained_are_refused(folder, workspace, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    make_folder(tmp_path / "cut", num_hidden_layers=LAYERS, hidden_size=32)
    del tensors["model.layers.4.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "cut" / "model.safetensors", {"format": "pt"})
    make_folder(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(quantised))
    wrong = {
        "cut": "lacks 1 of the model's tensors, the first model.layers.4",
        "packed": "is quantised: training .*a head can be trained",
    }
    for name, message in wrong.items():
        with pytest.raises(OutriderError, match=message):
            model_runs.trainable(str(tmp_path / name))
    long = replace(workspace, rows=torch.zeros(4, 10**6, dtype=torch.int))
    runs = (lambda: train_draft(long, tmp_path / "o", FAST), lambda: train_early_exit(long, tmp_path / "o", FAST, LayerSkip()))
    for train in runs:
        with pytest.raises(OutriderError, match=r"rows of 1000000 tokens exceed the context of .* give a lower --seq-len"):
            train()


def test_a_draft_needs_memory_for_its_gradients_and_optimizer_state(workspace, tmp_path, monkeypatch):
    weights = 4 * workspace.model.num_parameters()  # the draft is smaller, but its training takes three times its weights
    monkeypatch.setattr("outrider.memory.total_memory", lambda: 3 * weights // 2)
    with pytest.raises(OutriderError, match=r"the draft's with gradients and optimizer state, take .* of memory"):
        train_draft(workspace, tmp_path / "out", FAST)
    assert not workspace.work.exists()


def test_models_whose_norms_store_their_scale_minus_one_are_not_shrunk():
    assert can_shrink(tiny("llama")) and not can_shrink(tiny("gemma"))


def test_invalid_training_gives_a_one_line_error(rows, workspace, tmp_path):
    make_folder(tmp_path / "flat", num_hidden_layers=2)
    flat = workspace_of(tmp_path / "flat", tmp_path / "w", rows)
    make_folder(tmp_path / "foreign", tokenizer=make_tokenizer(300))
    spoken = replace(workspace, tokenizer=make_tokenizer(), work=tmp_path / "spoken")
    train_draft(workspace, tmp_path / "out", replace(FAST, epochs=0.1))

    def draft(at=workspace, start=None, **options):
        names = DraftShape.__dataclass_fields__
        shape = DraftShape(**{name: value for name, value in options.items() if name in names})
        teaching = {name: value for name, value in options.items() if name not in names}
        return lambda: train_draft(at, tmp_path / "out", FAST, DraftRun(shape, start, Distillation(**teaching)))

    cases = [
        (lambda: train_early_exit(flat, tmp_path / "out", FAST, LayerSkip()), "at least three layers; this one has 2"),
        (draft(layers=1), "other shape: give another folder"),
        (draft(loss="mse"), "kl or tv"),
        (lambda: Distillation(on_policy=2.0), "invalid on_policy 2.0: expected a finite number, at least 0, at most 1"),
        (lambda: Distillation(prompt_len=0), "invalid prompt_len 0: expected a whole number, at least 1"),
        (draft(on_policy=0.5, prompt_len=SEQ), "nothing to generate after prompts"),
        (draft(spoken, start=str(tmp_path / "foreign")), "different vocabularies"),
        (
            lambda: new_draft(workspace.model, DraftShape(layers=5)),
            "invalid number of layers 5 for a target with 5: expected 1 to 4",
        ),
        (lambda: chosen_layers(DraftShape(), 1), "the target has one layer: a draft needs fewer layers"),
        (lambda: new_draft(workspace.model, DraftShape(from_layers=(0, 9))), "layers 0 to 4"),
        (
            lambda: new_draft(workspace.model, DraftShape(width=64)),
            "invalid width 64 for a target of width 32: expected 1 to 32",
        ),
        (lambda: new_draft(tiny("gpt2"), DraftShape(width=16)), "leave the width at 32"),
    ]
    for run, message in cases:
        with pytest.raises(OutriderError, match=message) as error:
            run()
        assert "\n" not in str(error.value)
