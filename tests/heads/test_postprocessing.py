"""A target's own scaling or capping of logits also applies wherever its output head is used for drafting or training."""

from __future__ import annotations

import copy

import pytest
import torch
from runner.rounds import make_model, make_request, make_text
from runner.test_architectures import small_config

from outrider.heads import eagle_formats
from outrider.heads.eagle import EagleHead
from outrider.heads.postprocessing import postprocess_of
from outrider.proposers.eagle import EagleConfig, EagleProposer
from outrider.runner import ModelRunner, RunnerConfig
from outrider.sampling import Sampler
from outrider.train import shapes
from outrider.train.capture import capture
from outrider.train.medusa import MedusaLoss
from outrider.types import Context, Proposal, SamplingParams

VOCAB, SEQ = 67, 12
SHAPED = {"gemma2": {"final_logit_softcapping": 1.5}, "cohere": {"logit_scale": 0.25}, "granite": {"logits_scaling": 4.0}}


def model_of(kind, **changes):
    return make_model(small_config(kind, tie_word_embeddings=False, **(SHAPED.get(kind, {}) | changes)))


def runner_of(model):
    return ModelRunner.load(copy.deepcopy(model), RunnerConfig(compile="never", max_batch=4))


@torch.no_grad()
@pytest.mark.parametrize("kind", [*SHAPED, "llama", "gpt2", "mixtral"])
def test_the_targets_own_code_transforms_its_logits(kind):
    model = model_of(kind)
    ids = torch.tensor([make_text(SEQ, 1), make_text(SEQ, 2)])
    said = model(ids, output_hidden_states=True, use_cache=False)
    values = model.get_output_embeddings()(said.hidden_states[-1])
    postprocess = postprocess_of(model)
    assert (postprocess is None) == (kind not in SHAPED)
    torch.testing.assert_close(values if postprocess is None else postprocess(values), said.logits)
    torch.testing.assert_close(model(ids, use_cache=False).logits, said.logits)  # the model is unchanged


@pytest.fixture(scope="module", params=SHAPED)
def captured(request, tmp_path_factory):
    """Return a target, its runner and its features for some rows."""
    model = model_of(request.param)
    runner = runner_of(model)
    rows = torch.stack([torch.tensor(make_text(SEQ, seed)) for seed in range(8)]).int()
    folder = tmp_path_factory.mktemp("features")
    return model, runner, capture(runner, rows, [0, 1, 2], folder, lambda *_: None)


@torch.no_grad()
def test_heads_learn_the_targets_distribution(captured):
    """The loss is the cross entropy against the model's own logits, including cap and scale."""
    model, runner, cache = captured
    ids, features = cache.read([0, 1], [2])
    said = model(ids, use_cache=False).logits
    torch.testing.assert_close(shapes.output_layer(runner)(features[2]), said, rtol=0.05, atol=0.05)  # features are bfloat16
    head = shapes.new_eagle(runner, 1, (2,), None)
    torch.testing.assert_close(head.target_logits(features[2]).softmax(-1), said.softmax(-1), rtol=0.05, atol=0.05)
    heads = shapes.new_medusa(runner, 1, 1)
    loss, _ = MedusaLoss(heads, cache, 2, shapes.output_layer(runner))(torch.tensor([0, 1]), 0, 0, 0.0)
    own = heads(features[2][:, : SEQ - 2])[0]
    wanted = torch.nn.functional.cross_entropy(own.flatten(0, 1), said[:, 1:-1].softmax(-1).flatten(0, 1))
    assert float(loss) == pytest.approx(float(wanted), rel=0.02)


@torch.no_grad()
def test_untrained_heads_start_from_the_targets_own_head(captured):
    """A head's weights can contain the scale but not the cap, which matters little for small logits."""
    model, runner, cache = captured
    if model.config.model_type == "gemma2":
        return
    ids, features = cache.read([3], [2])
    said = model(ids, use_cache=False).logits
    torch.testing.assert_close(shapes.new_medusa(runner, 1, 1)(features[2])[0], said, rtol=0.05, atol=0.05)
    eagle3 = shapes.new_eagle(runner, 3, (0, 1, 2), None)
    wanted = shapes.output_layer(runner).plain_weight()
    torch.testing.assert_close(eagle3.lm_head.weight, wanted)


def test_gradients_pass_through_the_cap(captured):
    _, runner, cache = captured
    head = shapes.new_eagle(runner, 1, (2,), None)
    _, features = cache.read([0], [2])
    guess = features[2].clone().requires_grad_()
    head.target_logits(guess).logsumexp(-1).sum().backward()
    assert bool(guess.grad.any(-1).all())


@torch.no_grad()
@pytest.mark.parametrize("kind", SHAPED)
def test_a_head_that_uses_the_targets_output_head_transforms_logits_like_the_target(kind):
    model = model_of(kind)
    runner = runner_of(model)
    head = shapes.new_eagle(runner, 1, (2,), None)
    head.set_attention("outrider")
    proposer = EagleProposer(head, runner, EagleConfig(max_nodes=1))
    request = make_request("r", make_text(9, 3))
    request.params = SamplingParams(temperature=1.0)
    empty = Context((request,), (0,), Sampler([request], VOCAB))
    scores = runner.score(empty, Proposal.empty(1), (2,))
    request.token_ids.append(5)
    context = Context((request,), (1,), Sampler([request], VOCAB), scores.hidden)
    probs = proposer.propose(context, 1).probs
    assert probs is not None
    # An untrained head repeats its input feature, so its logits are the target's for the previous token.
    torch.testing.assert_close(probs[0, 0], scores.logits[0, 0].softmax(-1), rtol=0.1, atol=0.01)


@torch.no_grad()
def test_an_exported_head_embeds_as_the_target_does(tmp_path):
    """Gemma 3 scales its stored embeddings; the exported copy contains the scaled values."""
    runner = runner_of(model_of("gemma3_text"))
    head = shapes.new_eagle(runner, 1, (2,), None)
    eagle_formats.export(head, tmp_path)
    again: EagleHead = eagle_formats.load(tmp_path, runner)
    ids = torch.arange(VOCAB)
    torch.testing.assert_close(again.embed_tokens(ids), runner.model.get_input_embeddings()(ids))
