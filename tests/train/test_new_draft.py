"""Drafts made from targets whose parts have other names: multimodal models, and models with parts per layer."""

from __future__ import annotations

import pytest
import torch
from tiny_folder import make_folder
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, LlamaConfig

from outrider.runner import ModelRunner, RunnerConfig
from outrider.train import model_runs
from outrider.train.draft_model import check_new_draft, copy_layers, new_draft
from outrider.train.options import DraftShape
from outrider.train.runs import Workspace
from outrider.train.shapes import final_scale
from outrider.types import OutriderError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


def multimodal(kind, vision=None, **text):
    """Return a multimodal model with a language model of 4 layers, whose norm and head are not the initial ones."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](text_config=SMALL | text, vision_config=vision or VISION)
    config.tie_word_embeddings = False
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in (model.get_decoder().norm.weight, model.get_output_embeddings().weight):
            weight.copy_(torch.rand_like(weight))
    return model


MULTIMODAL = [
    ("mistral3", {"model_type": "mistral"}),
    ("gemma3", {"sliding_window": 4}),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "text"), MULTIMODAL, ids=lambda each: str(each))
def test_a_draft_of_a_multimodal_target_has_its_embeddings_norm_and_head(kind, text):
    vision = VISION | {"model_type": "pixtral"} if kind == "mistral3" else None
    target = multimodal(kind, vision, **text)
    draft, _ = new_draft(target, DraftShape(from_layers=(0, 1, 2)))
    target.get_decoder().layers[3] = torch.nn.Identity()
    target.get_decoder().config.num_hidden_layers = 3
    ids = torch.arange(5)[None]
    torch.testing.assert_close(draft(ids, use_cache=False).logits, target(input_ids=ids, use_cache=False).logits)
    scale = final_scale(ModelRunner.load(multimodal(kind, vision, **text), RunnerConfig(compile="never")))
    torch.testing.assert_close(scale, draft.model.norm(torch.ones(1, 32))[0])
    if kind == "mistral3":
        narrow, _ = new_draft(multimodal(kind, vision, **text), DraftShape(layers=1, width=16))
        assert narrow.config.hidden_size == 16


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_a_draft_of_a_target_that_shares_keys_has_its_own(kind):
    sizes = SMALL | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 1}
    sizes |= {"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"], "pad_token_id": 0}
    own = {"laurel_rank": 4, "intermediate_size": [48, 32, 48, 48], "activation_sparsity_pattern": [0.0] * 4}
    own = own if kind == "gemma3n_text" else {"global_head_dim": 8}
    target = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes | own), dtype=torch.float32).eval()
    draft, _ = new_draft(target, DraftShape(from_layers=(1, 2)))
    for mine, theirs in zip(draft.model.layers, target.model.layers[1:], strict=False):
        assert torch.equal(mine.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
    wanted = target.model.embed_tokens_per_layer.weight[:, 8:24]
    assert torch.equal(draft.model.embed_tokens_per_layer.weight, wanted)
    assert draft(torch.arange(5)[None], use_cache=False).logits.shape == (1, 5, 64)
    type(draft.config)(**draft.config.to_dict())  # as from its folder
    with pytest.raises(OutriderError, match=r"layer 3 of .* keys and values of an earlier layer: .* with layers 0 to 2"):
        new_draft(target, DraftShape(from_layers=(1, 3)))


def test_a_target_without_a_language_model_of_its_own_is_refused_before_it_is_loaded(tmp_path):
    CONFIG_MAPPING["qwen3_vl"](text_config=SMALL).save_pretrained(tmp_path)
    with pytest.raises(OutriderError, match="unsupported target for a new draft: Unrecognized configuration class") as error:
        check_new_draft(str(tmp_path), DraftShape())
    assert "\n" not in str(error.value)


def test_a_draft_with_weights_that_its_target_lacks_is_refused():
    draft = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL | {"vocab_size": 65}))
    with pytest.raises(
        OutriderError, match=r"unsupported target for a new draft: .* has no model.embed_tokens.weight of this shape"
    ):
        copy_layers(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)), draft, range(4))


def test_a_trained_target_keeps_its_processor_which_a_draft_does_not_need(tmp_path):
    source, files = make_folder(tmp_path / "target"), ("preprocessor_config.json", "processor_config.json")
    for name in files:
        (source / name).write_text("{}")
    workspace = Workspace(model_runs.trainable(str(source)), None, tmp_path / "work")
    draft, _ = new_draft(workspace.model, DraftShape(layers=1))
    for name, model in (("model", workspace.model), ("draft", draft)):
        model_runs._save(workspace, model, tmp_path / name)
        assert [(tmp_path / name / file).exists() for file in files] == [name == "model"] * 2
        assert (tmp_path / name / "tokenizer.json").exists()
