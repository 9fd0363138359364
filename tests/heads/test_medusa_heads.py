"""Medusa heads in both public formats: values, trees, and errors for heads that do not fit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from toy import make_request
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.heads import medusa
from outrider.heads.checkpoint import stored_rates, tensor_names
from outrider.proposers.medusa import MedusaConfig, MedusaProposer
from outrider.proposers.method import Setting
from outrider.registry import PROPOSERS
from outrider.runner import ModelRunner, RunnerConfig
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError

from . import reference
from .writers import HIDDEN, write_medusa, write_vllm_medusa

VOCAB = 40
SIZES = SimpleNamespace(name="target", hidden_size=HIDDEN, num_layers=2, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return ModelRunner.load(LlamaForCausalLM(config).eval(), RunnerConfig(compile="never"))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_original_format_computes_the_papers_formula(layers, tmp_path):
    """The config says two heads, but the file has three: the file counts."""
    weights = write_medusa(tmp_path, VOCAB, 3, layers=layers)
    heads, accuracies = medusa.load(tmp_path, SIZES)
    assert heads.shape.num_heads == 3 and heads.shape.num_layers == layers and accuracies is None
    hidden = torch.randn(5, HIDDEN)
    for head in range(3):
        wanted = reference.medusa_logits(weights, hidden, head, layers)
        torch.testing.assert_close(heads(hidden)[head], wanted, rtol=1e-4, atol=1e-4)


def test_vllms_format_with_a_token_map(tmp_path):
    weights = write_vllm_medusa(tmp_path, VOCAB, 2, map_to=15)
    heads, _ = medusa.load(tmp_path, SIZES)
    hidden = torch.randn(3, HIDDEN)
    for head in range(2):
        blocked = hidden + torch.nn.functional.silu(hidden @ weights[f"blocks.{head}.layers.0.weight"].T)
        best = (blocked @ weights[f"lm_heads.{head}.weight"].T).topk(4).indices
        assert torch.equal(heads.candidates(hidden, 2, 4)[:, head], weights["token_map"][best])


def test_exported_heads_are_in_vllms_format_and_equal_the_original(tmp_path):
    write_medusa(tmp_path / "in", VOCAB, 3)
    first, _ = medusa.load(tmp_path / "in", SIZES)
    medusa.export(first, tmp_path / "out", VOCAB, [(0.5, 0.2), (0.3, 0.1), (0.2, 0.1)])
    second, accuracies = medusa.load(tmp_path / "out", SIZES)
    assert accuracies == [[0.5, 0.2], [0.3, 0.1], [0.2, 0.1]]
    assert all(torch.equal(tensor, first.state_dict()[name]) for name, tensor in second.state_dict().items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    assert wanted.items() <= config.items() and config["medusa_fc_bias"] is True
    assert "blocks.0.layers.0.weight" in second.state_dict() and "lm_heads.0.weight" in second.state_dict()
    assert medusa.is_exported(tmp_path / "out", second)
    file = tmp_path / "out" / "model.safetensors"
    assert not medusa.is_exported(file, medusa.load(file, SIZES)[0])  # other engines read folders only


@pytest.mark.parametrize(
    "stored, message",
    [
        (["x"], '"outrider" in config.json must be an object, got a list'),
        ({"accuracies": [0.5, 0.2]}, r"accuracies=\[0.5, 0.2\]: expected lists of numbers from 0 to 1"),
        ({"accuracies": [["a"]]}, "expected lists of numbers"),
        ({"accuracies": [[1.5]]}, "expected lists of numbers"),
    ],
)
def test_stored_accuracies_of_another_form_are_refused(tmp_path, stored, message):
    write_medusa(tmp_path, VOCAB, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"outrider": stored}))
    with pytest.raises(OutriderError, match=message):
        medusa.load(tmp_path, SIZES)


@pytest.mark.parametrize("stored", [["a"], [[0.5]], "0.5", [True]])
def test_stored_acceptance_of_another_form_is_refused(stored):
    with pytest.raises(OutriderError, match=r"acceptance_by_rank=.*: expected a list of numbers from 0 to 1"):
        stored_rates({"outrider": {"acceptance_by_rank": stored}}, "acceptance_by_rank", 1, "head")


def test_weight_files_without_named_tensors_are_refused(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "heads.pt")
    with pytest.raises(OutriderError, match=r"cannot read .*heads.pt: it holds a list instead of named tensors"):
        list(tensor_names(tmp_path / "heads.pt"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": 3}}))
    with pytest.raises(OutriderError, match="is not a weight index: expected the file name of each tensor"):
        list(tensor_names(tmp_path))


def proposal(target, k, limits=(9, 9), rows=(3, 5), **config):
    torch.manual_seed(1)
    heads = medusa.MedusaHeads(medusa.MedusaShape(3, 1, HIDDEN, VOCAB)).eval()
    proposer = MedusaProposer(heads, target, MedusaConfig(**config))
    requests = [make_request([1] * (count + 1), name=f"r{count}") for count in rows]
    states = [torch.randn(count, HIDDEN) for count in rows]
    context = Context(tuple(requests), limits, Sampler(requests, VOCAB), {target.num_layers: states})
    last = torch.stack([each[-1] if len(each) else torch.zeros(HIDDEN) for each in states])
    return proposer.propose(context, k), heads.candidates(last, 3, 10)


def test_the_tree_has_the_tokens_with_the_highest_expected_acceptance(target):
    """Expected: 0.6, 0.6 * 0.5, 0.2, 0.6 * 0.5 * 0.4, 0.2 * 0.5, ...: the first branch is completed before the second."""
    accuracies = ((0.6, 0.2), (0.5, 0.1), (0.4, 0.1))
    found, best = proposal(target, 3, accuracies=accuracies, max_nodes=4)
    assert found.probs is None and found.lens.tolist() == [4, 4]
    paths = [tuple(row) for row in found.parents.tolist()]
    assert paths == [(-1, -1, 0, 2)] * 2
    for b in range(2):
        assert found.token_ids[b].tolist() == [best[b, 0, 0], best[b, 0, 1], best[b, 1, 0], best[b, 2, 0]]


def test_a_tree_is_no_deeper_than_requested_or_useful(target):
    found, _ = proposal(target, 2, limits=(9, 1), max_nodes=8)
    depths = [[0] * len(row) for row in found.parents.tolist()]
    for row, parents in zip(depths, found.parents.tolist(), strict=True):
        for node, parent in enumerate(parents):
            row[node] = 1 + (row[parent] if parent >= 0 else 0)
    assert max(depths[0]) == 2 and max(depths[1][: int(found.lens[1])]) == 1


def test_a_tree_has_at_most_as_many_candidates_as_the_vocabulary(target):
    found, _ = proposal(target, 1, accuracies=((0.02,) * (VOCAB + 5),), max_nodes=VOCAB + 5)
    assert [sorted(row) for row in found.token_ids.tolist()] == [list(range(VOCAB))] * 2


def test_a_request_that_is_not_prefilled_gets_no_drafts(target):
    found, _ = proposal(target, 2, rows=(0, 4))
    assert found.lens.tolist()[0] == 0 and found.lens.tolist()[1] > 0


@pytest.mark.parametrize("method, message", [("medusa", "needs Medusa heads: give"), ("eagle", "needs an EAGLE head")])
def test_without_heads_the_error_names_what_is_needed(method, message, target):
    with pytest.raises(OutriderError, match=message):
        PROPOSERS.get(method).build(Setting(target))
    with pytest.raises(OutriderError, match=r"no head at \./nowhere"):
        PROPOSERS.get(method).build(Setting(target, draft="./nowhere"))


def test_heads_for_another_target_are_rejected(target, tmp_path):
    write_medusa(tmp_path / "vocab", VOCAB + 2, 2)
    with pytest.raises(OutriderError, match="vocabulary of 42 tokens, but target has 40"):
        medusa.load(tmp_path / "vocab", SIZES)
    weights = write_vllm_medusa(tmp_path / "map", VOCAB, 2, map_to=15)
    for odd in (-3, VOCAB):
        weights["token_map"][4] = odd
        save_file(weights, tmp_path / "map" / "model.safetensors")
        with pytest.raises(OutriderError, match=f"token map contains token {odd}, but target has 40"):
            medusa.load(tmp_path / "map", SIZES)
    write_vllm_medusa(tmp_path / "none", VOCAB, 2)
    (tmp_path / "none" / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(OutriderError, match="cannot read"):
        medusa.load(tmp_path / "none", SIZES)
    wide = medusa.MedusaHeads(medusa.MedusaShape(1, 1, HIDDEN * 2, VOCAB))
    with pytest.raises(OutriderError, match="hidden size 64"):
        MedusaProposer(wide, target)
