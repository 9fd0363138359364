"""Gemma 4's assistants compute the same as transformers' class over the same keys and values, and do not change the output."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from architectures.tiny import randomised
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from outrider import SamplingParams
from outrider.engine.finding import choices, known_drafters
from outrider.heads import assistant, mtp_formats
from outrider.heads.assistant import AssistantRunner
from outrider.heads.checkpoint import MTP, kinds_of
from outrider.proposers.method import TargetFiles
from outrider.registry import PROPOSERS
from outrider.runner import ModelRunner, RunnerConfig
from outrider.types import IMPOSSIBLE_LOGIT, OutriderError

from .drafting import conversation, even_and_odd, letters_llm, texts_of

VOCAB, HIDDEN, WINDOW = 60, 32, 5
SHARED = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
KINDS = ["sliding_attention", "full_attention"]
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4}
STORED = {  # parts of names -> those in a GGUF file
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "layer_scalar": "layer_output_scale.weight",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
}
CONFIG = RunnerConfig(compile="never", max_batch=4)


def seeded(model, seed):
    torch.manual_seed(seed)
    return randomised(model, std=0.8).requires_grad_(False)


def gemma(num_shared=2, **changes):
    """Return a target like the small Gemma 4 models; without shared layers like the large ones."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 6}
    sizes |= {"hidden_size_per_layer_input": 8 if num_shared else 0, "vocab_size_per_layer_input": VOCAB}
    more = {"layer_types": KINDS * 3, "num_kv_shared_layers": num_shared}
    config = Gemma4TextConfig(**SHARED | sizes | more | changes)
    return seeded(Gemma4ForCausalLM(config), 0)


def drafter(**changes):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "hidden_size_per_layer_input": 0}
    more = {"layer_types": KINDS * 2, "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 0}
    text = Gemma4TextConfig(**SHARED | sizes | more)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=HIDDEN, **changes)
    with pytest.MonkeyPatch.context() as patch:  # until 5.24 transformers rejects configs in which all layers are shared
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(lambda own: ["reuse"] * own.num_hidden_layers))
        model = seeded(Gemma4AssistantForCausalLM(config), 1)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    return model


@pytest.fixture(scope="module")
def model():
    return gemma()


@pytest.fixture(scope="module")
def target(model):
    return ModelRunner.load(model, CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("assistant")
    drafter(**ORDERED).save_pretrained(place)
    return place


def converted(folder):
    """Write the folder's assistant as llama.cpp's converter does, and return the file."""
    config = json.loads((folder / "config.json").read_text())
    text, tensors = config["text_config"], load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(folder / "assistant.gguf", "gemma4-assistant")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    numbers = {
        "block_count": text["num_hidden_layers"],
        "nextn_predict_layers": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "embedding_length_out": config["backbone_hidden_size"],
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": SHARED["global_head_dim"],
        "attention.key_length_swa": text["head_dim"],
        "attention.sliding_window": text["sliding_window"],
        "attention.shared_kv_layers": text["num_kv_shared_layers"],
    }
    for name, number in numbers.items():
        writer.add_uint32(f"gemma4-assistant.{name}", number)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(text["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_float32("gemma4-assistant.rope.freq_base_swa", text["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_array("gemma4-assistant.attention.sliding_window_pattern", [kind == KINDS[0] for kind in text["layer_types"]])
    pairs = SHARED["global_head_dim"] // 2
    turned = int(pairs * text["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32))
    for own, tensor in tensors.items():
        if own.startswith("masked_embedding."):  # llama.cpp leaves them out
            continue
        name = re.sub(r"^model\.layers\.", "blk.", own)
        for part, stored in STORED.items():
            name = name.replace(part, stored)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "assistant.gguf"


@pytest.mark.parametrize("changes", [{}, ORDERED], ids=["plain", "ordered"])
def test_a_gguf_file_holds_the_same_assistant(changes, target, tmp_path):
    drafter(**changes).save_pretrained(tmp_path)
    file, expected = converted(tmp_path), assistant.load(tmp_path, target)
    found = mtp_formats.load_any(file, target)
    values = expected.state_dict()
    if changes:  # ordered embeddings only restrict which logits are computed
        values["lm_head.weight"] = values.pop("table")
        del values["centroids.weight"], values["token_ordering"]
    assert found.state_dict().keys() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in found.state_dict().items())
    for (_, one), (_, other) in zip(found.rotary_emb.named_buffers(), expected.rotary_emb.named_buffers(), strict=True):
        assert torch.equal(one, other)
    assert [str(layer) for layer in found.layers] == [str(layer) for layer in expected.layers]
    assert [layer.self_attn.sliding_window for layer in found.layers] == [WINDOW + 2, None] * 2
    assert kinds_of(file) == [MTP]


def read(target, request_id, text):
    """Store a sequence's keys and values in the target's cache. Returns its last features."""
    target.prefill([request_id], [text])
    target.extend([request_id], [text])


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, ORDERED], ids=["one table", "ordered embeddings"])
@pytest.mark.parametrize("num_shared", [2, 4])
def test_an_assistant_computes_the_same_as_transformers_class(changes, num_shared, tmp_path):
    model, small = gemma(num_shared), drafter(**changes)
    small.save_pretrained(tmp_path)
    target = ModelRunner.load(model, CONFIG)
    head = assistant.load(tmp_path, target)
    assert head.hidden_states == (6,) and len(head.state_dict()) > 40
    runner = AssistantRunner(head, target)
    texts = {"a": torch.randint(3, VOCAB, (17,)), "b": torch.randint(3, VOCAB, (4,))}  # longer and shorter than the window
    states = {}
    for name, text in texts.items():
        read(target, name, text[:-1].tolist())
        states[name] = model(text[None, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    own = {name: states[name].hidden_states[-1][0] for name in texts}
    root = runner.extend(list(texts), [text[1:].tolist() for text in texts.values()], [[own[name]] for name in texts])
    drafts = torch.tensor([[7, 9, 30], [11, 9, 7]])
    fed = root.feedback[:, None].expand(-1, 3, -1)
    level = runner.level(list(texts), drafts, fed, 1, torch.eye(3).bool().expand(2, -1, -1))
    deeper = runner.level(list(texts), drafts[:, :1], level.feedback[:, 1:2], 2, torch.ones(2, 1, 4).bool())
    for row, (name, text) in enumerate(texts.items()):

        def wanted(token, feature, text=text, name=name):
            inputs = torch.cat((model.get_input_embeddings()(torch.tensor([[token]])), feature[None, None]), -1)
            kept = states[name].shared_kv_states
            position = torch.tensor([[len(text) - 1]])
            return small(inputs_embeds=inputs, position_ids=position, shared_kv_states=dict(kept))

        steps = [(root, (row,), wanted(int(text[-1]), own[name][-1]))]
        steps += [
            (level, (row, node), wanted(int(drafts[row, node]), steps[0][2].last_hidden_state[0, 0])) for node in range(3)
        ]
        steps += [(deeper, (row, 0), wanted(int(drafts[row, 0]), steps[2][2].last_hidden_state[0, 0]))]
        for found, place, one in steps:
            torch.testing.assert_close(found.feedback[place], one.last_hidden_state[0, 0], rtol=1e-3, atol=1e-3)
            logits, theirs = found.logits[place], one.logits[0, 0]
            chosen = logits > IMPOSSIBLE_LOGIT / 2
            assert int(chosen.sum()) == (20 if changes else VOCAB)
            torch.testing.assert_close(logits[chosen], theirs[chosen], rtol=1e-3, atol=1e-3)
            assert bool((theirs[~chosen] < theirs[chosen].min()).all())


engine = partial(letters_llm, vocab_size=VOCAB, max_batch=4)
PROMPTS = [[7, 3, 11, 4, 9, 2, 30], [5, 6], [8, 10, 8, 12, 8, 9, 9, 9, 4, 22, 31, 8]]


@pytest.mark.parametrize("method", ["mtp", "mtp:top_k=1", "suffix+mtp"])
def test_output_equals_plain_decoding_in_a_batch_of_free_and_constrained_requests(method, model, folder):
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, seed=2, grammar=even_and_odd(VOCAB)),
        SamplingParams(max_tokens=20, repetition_penalty=1.4, ignore_eos=True),
    ]
    prompts = [*PROMPTS, [4, 4]]
    wanted = texts_of(engine(model, "plain"), prompts, params)
    for k in (1, 6, "auto"):
        llm = engine(model, method, k, draft=str(folder))
        assert texts_of(llm, prompts, params) == wanted
        assert texts_of(llm, prompts[2:], params[2:]) == wanted[2:]
        assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_a_target_without_shared_layers(folder):
    model = gemma(num_shared=0)
    params = [SamplingParams(max_tokens=16, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    wanted = texts_of(engine(model, "plain"), PROMPTS, params)
    llm = engine(model, "mtp", draft=str(folder))
    assert texts_of(llm, PROMPTS, params) == wanted
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_samples_of_one_prompt_equal_plain_decoding(model, folder):
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3, n=3, ignore_eos=True)
    wanted = texts_of(engine(model, "plain"), PROMPTS, params)
    llm = engine(model, "mtp", draft=str(folder))
    assert texts_of(llm, PROMPTS, params) == wanted
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_a_conversation_continues_from_the_targets_cached_entries(model, folder):
    params = SamplingParams(max_tokens=14, temperature=0.9, seed=4, ignore_eos=True)
    llm = engine(model, "mtp", draft=str(folder), prefix_cache=True)
    assert conversation(llm, params) == conversation(engine(model, "plain"), params)
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0 and llm.runner.cache.num_reused > 80


def test_sampled_drafts_without_coupling(model, folder):
    llm = engine(model, "mtp", draft=str(folder), same_text=False)
    texts = texts_of(llm, PROMPTS, SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True))
    assert all(len(text) == 24 for text in texts) and llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_a_folder_is_recognised_only_for_its_target(model, folder, tmp_path):
    model.save_pretrained(tmp_path / "target")
    gemma(hidden_size=48).save_pretrained(tmp_path / "wide")
    assert kinds_of(folder) == [MTP]
    assert PROPOSERS.get("mtp").recognise(folder, TargetFiles.read("t", tmp_path / "target")).what == "MTP head"
    with pytest.raises(OutriderError, match=r"pre_projection.weight has shape \[16, 64\], expected 96 inputs"):
        PROPOSERS.get("mtp").recognise(folder, TargetFiles.read("t", tmp_path / "wide"))
    assert PROPOSERS.get("draft").recognise(folder, TargetFiles.read("t", tmp_path / "target")) is None


def test_it_is_found_next_to_its_target(model, folder, tmp_path):
    model.save_pretrained(tmp_path / "gemma-4-E2B-it")
    shutil.copytree(folder, tmp_path / "gemma-4-E2B-it-assistant")
    files = TargetFiles.read("gemma-4-E2B-it", tmp_path / "gemma-4-E2B-it")
    found = next(choices(files, None, {}))
    assert (found.method, found.draft) == ("mtp", str(tmp_path / "gemma-4-E2B-it-assistant"))
    assert known_drafters(files) == ["google/gemma-4-E2B-it-assistant"]


def changed(change):
    def make(tensors, config):
        change(tensors)

    return make


def configured(change):
    return lambda tensors, config: change(config)


LAYER = "model.layers.1.self_attn.q_proj.weight"
WRONG = {
    "missing": (changed(lambda t: t.pop(LAYER)), f"lacks 1 of the head's tensors, the first {LAYER}"),
    "renamed": (changed(lambda t: t.update({"model.layers.1.self_attn.query.weight": t.pop(LAYER)})), f"the first {LAYER}"),
    "cut": (changed(lambda t: t.update({LAYER: t[LAYER][:9]})), rf"{LAYER} has shape \[9, 16\], expected \[64, 16\]"),
    "no table": (changed(lambda t: t.pop("model.embed_tokens.weight")), "the first model.embed_tokens.weight"),
    "no clusters": (
        changed(lambda t: t.pop("masked_embedding.centroids.weight")),
        "the first masked_embedding.centroids.weight",
    ),
    "no order": (
        changed(lambda t: t["masked_embedding.token_ordering"].zero_()),
        "token_ordering must hold each of the 60 tokens",
    ),
    "unknown": (
        changed(lambda t: t.update({"model.layers.0.odd": torch.zeros(2)})),
        "does not have: 1, the first model.layers.0.odd",
    ),
    "not finite": (
        changed(lambda t: t["model.norm.weight"].fill_(float("nan"))),
        "the weights of model.norm.weight contain NaN",
    ),
    "rounded": (changed(lambda t: t.update({LAYER: t[LAYER].to(torch.int8)})), f"is quantised: {LAYER} is int8"),
    "other width": (configured(lambda c: c.update(backbone_hidden_size=48)), "expects hidden size 48, but .* has 32"),
    "other vocabulary": (configured(lambda c: c["text_config"].update(vocab_size=96)), "made for 96 tokens, but .* has 60"),
    "other heads": (
        configured(lambda c: c["text_config"].update(num_attention_heads=3, num_key_value_heads=1)),
        r"model.layers.0.self_attn.q_proj.weight has 3 heads of 8, but the keys of .* in sliding_attention have 2 of 8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_assistant_gives_a_one_line_error_that_names_the_fault(case, folder, target, tmp_path):
    make, message = WRONG[case]
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    make(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OutriderError, match=message) as error:
        assistant.load(tmp_path, target)
    assert "\n" not in str(error.value)
