"""The doctor's findings for heads: what fits, what does not and why; a wrong head never changes the output."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder

from outrider import LLM, SamplingParams
from outrider.doctor import DoctorOptions, check_draft
from outrider.types import OutriderError

from .writers import (
    DIM,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    layer_config,
    set_config,
    write_eagle1,
    write_eagle3,
    write_medusa,
    write_vllm_medusa,
)

VOCAB, LAYERS = 320, 4
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
OPTIONS = {"compile": "never", "device": "cpu"}


def follower(tokens: torch.Tensor) -> torch.Tensor:
    """Return the target's greedy token after each token."""
    return (tokens * 7 + 3) % VOCAB  # 7 and 320 are coprime, so every token has exactly one predecessor


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target whose output depends on the last token alone, and whose hidden states differ strongly between layers."""
    folder = make_folder(
        tmp_path_factory.mktemp("target"), hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, mlp_bias=True,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, tie_word_embeddings=False,
    )  # fmt: skip
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(weights[name])
    steps = 5 * torch.randn(LAYERS, HIDDEN, generator=torch.Generator().manual_seed(1))
    steps[-1] = -steps[:-1].sum(0)
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.mlp.down_proj.bias"] = steps[layer].contiguous()
    table = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2)), dim=-1)
    weights["model.embed_tokens.weight"] = table
    output = torch.empty_like(table)
    output[follower(torch.arange(VOCAB))] = table
    weights["lm_head.weight"] = output
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def write_reading(folder, target, first_layer, **config):
    """Write an EAGLE-3 head that inverts the addition of the target's first layer, and predicts two tokens ahead."""
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tensors = write_eagle3(folder, VOCAB, VOCAB)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    tensors["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)), 1)
    tensors["fc.bias"] = -load_file(target / "model.safetensors")["model.layers.0.mlp.down_proj.bias"]
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = torch.empty_like(table)
    tensors["lm_head.weight"][follower(follower(torch.arange(VOCAB)))] = table
    save_file(tensors, folder / "model.safetensors")
    states = [first_layer, first_layer + 1, first_layer + 2]
    set_config(folder, eagle_config=None, eagle_aux_hidden_state_layer_ids=states, **config)
    return folder


def examined(target, method, draft):
    return check_draft(DoctorOptions(str(target), method, OPTIONS | {"draft": str(draft)}, SHORT))


def level_of(found, topic):
    return {finding.topic: finding.level for finding in found.findings}.get(topic)


def text_of(found, topic):
    return " ".join(finding.text for finding in found.findings if finding.topic == topic)


def test_a_head_that_reads_the_right_layers_fits(target, tmp_path):
    found = examined(target, "eagle", write_reading(tmp_path, target, 1))
    assert found.acceptance.by_position[0] > 0.9
    for topic in ("vocabulary", "layers", "draft vocabulary", "text"):
        assert level_of(found, topic) == "ok", (topic, found.findings)
    assert found.fits


@pytest.mark.parametrize("first", [0, 2])
def test_layers_that_are_off_by_one_are_found_by_trying_the_neighbours(target, tmp_path, first):
    head = write_reading(tmp_path, target, first)
    found = examined(target, "eagle:top_k=3", head)
    assert not found.fits and level_of(found, "acceptance") == "wrong"
    assert "eagle:top_k=3:hidden_states=1,2,3 fits better" in text_of(found, "options")
    plain = LLM(str(target), method="plain", **OPTIONS).generate([[5, 6, 7]], SHORT)[0].outputs[0]
    llm = LLM(str(target), method="eagle", draft=str(head), num_draft_tokens=4, **OPTIONS)
    assert llm.generate([[5, 6, 7]], SHORT)[0].outputs[0].token_ids == plain.token_ids and llm.stats.faults == 0


@pytest.mark.parametrize(
    ("method", "write"),
    [
        ("eagle", lambda folder: write_eagle1(folder, VOCAB)),
        ("eagle", lambda folder: write_eagle3(folder, VOCAB, 200)),
        ("medusa", lambda folder: write_medusa(folder, VOCAB, 2)),
    ],
)
def test_a_head_for_another_target_of_the_same_size_does_not_fit(target, tmp_path, method, write):
    write(tmp_path)
    found = examined(target, method, tmp_path)
    assert not found.fits and level_of(found, "acceptance") == "wrong"
    assert level_of(found, "embedding") in (None, "suspicious")


def test_an_embedding_with_fewer_padding_rows_is_the_targets(target, tmp_path):
    weights = write_eagle1(tmp_path, VOCAB - 8)
    copy = load_file(target / "model.safetensors")["model.embed_tokens.weight"][: VOCAB - 8].clone()
    torch.save(weights | {"embed_tokens.weight": copy}, tmp_path / "pytorch_model.bin")
    found = examined(target, "eagle", tmp_path)
    assert level_of(found, "embedding") is None and level_of(found, "vocabulary") is None


def test_the_cost_of_a_small_draft_vocabulary_is_reported(target, tmp_path):
    write_eagle3(tmp_path / "eagle", VOCAB, 8)
    found = examined(target, "eagle", tmp_path / "eagle")
    assert level_of(found, "draft vocabulary") == "suspicious" and "8 of 320 tokens" in text_of(found, "draft vocabulary")
    write_vllm_medusa(tmp_path / "medusa", VOCAB, 2, map_to=8)
    assert level_of(examined(target, "medusa", tmp_path / "medusa"), "draft vocabulary") == "suspicious"


def test_a_head_made_for_shorter_texts_is_suspicious(target, tmp_path):
    """Heads trained on 2k tokens for 32k targets: here the config says 128 and the target's context is 256."""
    write_eagle3(tmp_path, VOCAB, 200)
    found = examined(target, "eagle", tmp_path)
    assert level_of(found, "context") == "suspicious" and "made for 128 tokens" in text_of(found, "context")


def test_the_size_includes_the_targets_output_head_if_it_is_used(target, tmp_path):
    weights = write_eagle1(tmp_path, VOCAB)
    own = sum(tensor.numel() for name, tensor in weights.items() if "embed" not in name) + VOCAB * HIDDEN
    assert f"reads {own / 1e6:.1f} M weights" in text_of(examined(target, "eagle", tmp_path), "size")


def test_the_size_counts_weights_of_any_number_of_bits(target, tmp_path):
    write_eagle1(tmp_path, VOCAB)
    options = OPTIONS | {"draft": str(tmp_path)}
    found = [check_draft(DoctorOptions(str(target), "eagle", options | bits, SHORT)) for bits in ({}, {"weights": "int4"})]
    assert text_of(found[0], "size") == text_of(found[1], "size")


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_an_embedding_that_differs_from_the_targets_is_the_heads_own(target, tmp_path, noise):
    weights = write_eagle1(tmp_path, VOCAB)
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    other = torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
    own = table + noise * other * table.norm() / other.norm()
    torch.save(weights | {"embed_tokens.weight": own}, tmp_path / "pytorch_model.bin")
    found = examined(target, "eagle", tmp_path)
    assert level_of(found, "embedding") == "suspicious"
    assert f"its own, differs from the target's by {noise:.0%}" in text_of(found, "embedding")


def test_t2d_that_contradicts_d2t_is_reported(target, tmp_path):
    tensors = write_eagle3(tmp_path, VOCAB, 200)
    tensors["t2d"] = ~tensors["t2d"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "t2d and d2t disagree" in text_of(examined(target, "eagle", tmp_path), "draft vocabulary")


def test_missing_or_contradictory_layers_are_reported(target, tmp_path):
    write_eagle3(tmp_path, VOCAB, 200, config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    assert "eagle_config names 1, 2, 3" in text_of(examined(target, "eagle", tmp_path), "layers")
    set_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ["a"]})
    assert "eagle_config names ['a']" in text_of(examined(target, "eagle", tmp_path), "layers")


@pytest.mark.parametrize("declared, shown", [(400, "400"), ("x", "'x'")])
def test_the_vocabulary_that_a_config_declares_is_compared(target, tmp_path, declared, shown):
    write_medusa(tmp_path, VOCAB, 2)
    set_config(tmp_path, vocab_size=declared)
    text = text_of(examined(target, "medusa", tmp_path), "vocabulary")
    assert text == f"made for a vocabulary of {shown} tokens, but the target has 320"


def test_the_vocabulary_of_nested_layers_is_compared(target, tmp_path):
    write_eagle3(tmp_path, VOCAB, 200)
    set_config(tmp_path, vocab_size=None, model=layer_config(VOCAB + 80))
    assert level_of(examined(target, "eagle", tmp_path), "vocabulary") == "wrong"


def spoil(folder, what):
    file = folder / "model.safetensors"
    if what == "vocabulary":
        set_config(folder, vocab_size=VOCAB + 80)
    elif what == "hidden size":
        set_config(folder, target_hidden_size=2 * HIDDEN)
        tensors = load_file(file)
        save_file(tensors | {"fc.weight": torch.randn(HIDDEN, 6 * HIDDEN)}, file)
    elif what == "width of letters":
        set_config(folder, target_hidden_size="x")
    elif what == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        tensors = load_file(file)
        tensors["midlayer.mlp.up_proj.weight"][0, 0] = float("nan")
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("what", "said", "refuses"),
    [
        ("vocabulary", "a vocabulary of 400 tokens, but the target has 320", False),
        ("hidden size", "hidden size 64", True),
        ("width of letters", "target_hidden_size='x': expected a whole number of at least 1", True),
        ("truncated", "cannot read", True),
        ("nan", "midlayer.mlp.up_proj.weight contain NaN", True),
    ],
)
def test_misfits_are_reported_before_anything_is_drafted(target, tmp_path, what, said, refuses):
    write_eagle3(tmp_path, VOCAB, 200)
    spoil(tmp_path, what)
    found = examined(target, "eagle", tmp_path)
    last = found.findings[-1]
    assert found.acceptance is None and last.level == "wrong" and said in last.text and "\n" not in last.text
    options = {"method": "eagle", "draft": str(tmp_path), "num_draft_tokens": 3, **OPTIONS}
    if refuses:
        with pytest.raises(OutriderError, match=said):
            LLM(str(target), **options)
        return
    plain = LLM(str(target), method="plain", **OPTIONS).generate([[5, 6, 7]], SHORT)[0].outputs[0]
    assert LLM(str(target), **options).generate([[5, 6, 7]], SHORT)[0].outputs[0].token_ids == plain.token_ids
