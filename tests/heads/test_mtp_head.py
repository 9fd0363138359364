"""MTP heads of every checkpoint layout match the reference implementation; errors in a broken one name the tensor."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import letter_tokenizer
from toy import outputs_of
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from outrider import LLM, SamplingParams
from outrider.heads import mtp_formats
from outrider.heads.checkpoint import MODEL, MTP, kinds_of
from outrider.heads.head_runner import RolloutRunner
from outrider.heads.mtp import MtpHead
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.linear import packed_layers
from outrider.types import OutriderError

from .drafting import conversation, letters_llm
from .mtp_checkpoints import FAMILIES, LAYOUT_OF, NAMES, Reference, rewrite, tiny_target, write_checkpoint
from .writers import set_config

CONFIG = RunnerConfig(compile="never", max_batch=3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "own_tables"), [*((family, False) for family in FAMILIES), ("deepseek_v3", True), ("glm4_moe", True)]
)
def test_a_head_of_a_checkpoint_matches_the_reference(family, own_tables, tmp_path):
    model = tiny_target(family)
    tensors = write_checkpoint(family, tmp_path, model, own_tables)
    by_formula, target = Reference(family, tensors, model), ModelRunner.load(str(tmp_path), CONFIG)
    head = mtp_formats.load(tmp_path, target)
    assert head.uses_targets_output is not own_tables and hasattr(head, "embed_tokens") is own_tables
    runner, generator = RolloutRunner(head, target), torch.Generator().manual_seed(1)
    tokens, features = torch.randint(61, (20,), generator=generator), torch.randn(20, 32, generator=generator)
    runner.extend(["a"], [tokens[:7].tolist()], [[features[:7]]])
    other = runner.extend(["b"], [tokens[:4].tolist()], [[features[:4]]])
    root = runner.extend(["a"], [tokens[7:].tolist()], [[features[7:]]])
    torch.testing.assert_close(other.feedback[0], by_formula.out(tokens[:4], features[:4])[-1], rtol=1e-4, atol=1e-4)
    own = by_formula.out(tokens, features)[-1:]
    torch.testing.assert_close(root.feedback, own, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(root.logits, by_formula.logits(own), rtol=1e-4, atol=1e-4)
    drafts = torch.tensor([[5, 9]])  # two children of the root, and one of the second child
    level = runner.level(["a"], drafts, root.feedback[:, None].expand(-1, 2, -1), 1, torch.eye(2).bool()[None])
    deeper = runner.level(["a"], torch.tensor([[11]]), level.feedback[:, 1:], 2, torch.tensor([[[False, True, True]]]))
    for node, found in enumerate(level.feedback[0]):
        path = by_formula.out(torch.cat((tokens, drafts[0, node : node + 1])), torch.cat((features, own)))[-1:]
        torch.testing.assert_close(found, path[0], rtol=1e-4, atol=1e-4)
    last = by_formula.out(torch.cat((tokens, torch.tensor([9, 11]))), torch.cat((features, own, path)))[-1]
    torch.testing.assert_close(deeper.feedback[0, 0], last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(deeper.logits[0, 0], by_formula.logits(last), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", mtp_formats.LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe", "qwen2"])
def test_an_exported_head_equals_the_original_under_the_layouts_names(family, layout, tmp_path):
    write_checkpoint(family, tmp_path / "in", tiny_target(family))
    target = ModelRunner.load(str(tmp_path / "in"), CONFIG)
    first = mtp_formats.load(tmp_path / "in", target)
    mtp_formats.export(first, tmp_path / "out", layout)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    start = NAMES[layout][0].replace("2", str(target.num_layers))
    assert names and all(name.startswith(start) for name in names)
    if layout == LAYOUT_OF[family]:
        stored = load_file(tmp_path / "in" / "model.safetensors")
        assert all(
            torch.equal(tensor, stored[name]) for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()
        )
    second = mtp_formats.load(tmp_path / "out", target)
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("block", [None, [16, 8]])
def test_a_head_in_fp8_has_the_values_of_its_numbers_and_scales(family, block, tmp_path):
    """As in the official checkpoints of DeepSeek-V3 and of Qwen3-Next in FP8."""
    write_checkpoint(family, tmp_path, tiny_target(family))
    target, prefix = ModelRunner.load(str(tmp_path), CONFIG), NAMES[LAYOUT_OF[family]][0]
    high, wide = block or (128, 128)
    exact, stored = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.startswith(prefix) or not re.search(r"_proj\.weight$", name):
            continue
        rows, columns = tensor.shape
        scales = torch.rand(-(-rows // high), -(-columns // wide)) * 0.01 + 0.01
        each = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        codes = (tensor / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        exact[name] = codes.float() * each
        stored |= {name: codes, f"{name}_scale_inv": scales}
    assert stored
    rewrite(tmp_path, lambda tensors: tensors.update(exact))
    expected = mtp_formats.load(tmp_path, target).state_dict()
    rewrite(tmp_path, lambda tensors: tensors.update(stored))
    set_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    in_file = [tensor.nbytes for name, tensor in load_file(tmp_path / "model.safetensors").items() if name.startswith(prefix)]
    assert mtp_formats.head_bytes(tmp_path, target) == sum(in_file)
    found = mtp_formats.load(tmp_path, target).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_heads_experts_may_be_stored_in_one_stack(tmp_path):
    write_checkpoint("qwen3_next", tmp_path, tiny_target("qwen3_next"))
    target = ModelRunner.load(str(tmp_path), CONFIG)
    first = mtp_formats.load(tmp_path, target)
    stacks = {name: tensor for name, tensor in first.state_dict().items() if ".experts." in name}

    def stack(tensors):
        for name in [name for name in tensors if name.startswith("mtp.") and ".experts." in name]:
            del tensors[name]
        tensors.update({f"mtp.{name}": tensor for name, tensor in stacks.items()})

    rewrite(tmp_path, stack)
    assert all(torch.equal(tensor, mtp_formats.load(tmp_path, target).state_dict()[name]) for name, tensor in stacks.items())


def test_the_config_beside_a_file_with_a_head_describes_its_layers(tmp_path):
    write_checkpoint("qwen2", tmp_path, tiny_target("qwen2"))
    target = ModelRunner.load(str(tmp_path), CONFIG)
    set_config(tmp_path, model_type="llama")
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if re.search("mtp_layers.*bias", name)])
    for source in (tmp_path, tmp_path / "model.safetensors"):
        assert isinstance(mtp_formats.load(source, target).layers[0], LlamaDecoderLayer)


def without(name):
    return lambda folder: rewrite(folder, lambda tensors: tensors.pop(name))


def renamed(old, new):
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({new: tensors.pop(old)}))


def drop_all(folder):
    rewrite(
        folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(("mtp.", "model.layers.2."))]
    )


EXPERT = "mtp.layers.0.mlp.experts.3.up_proj.weight"
WRONG = {
    "dropped by a quantiser": (
        "qwen3_next",
        drop_all,
        r"no MTP head: none of mtp.fc.weight, .*model.mtp_layers.0.input_proj.weight",
    ),
    "dropped": ("glm4_moe", drop_all, r"holds no MTP head: none of .*model.layers.2.eh_proj.weight"),
    "no fc": ("qwen3_next", without("mtp.fc.weight"), "lacks 1 of the head's tensors, the first mtp.fc.weight"),
    "no projection": ("deepseek_v3", without("model.layers.2.eh_proj.weight"), "the first model.layers.2.eh_proj.weight"),
    "no final norm": (
        "qwen2",
        without("model.mtp_layers.0.final_layernorm.weight"),
        "the first model.mtp_layers.0.final_layernorm.weight",
    ),
    "no expert": ("qwen3_next", without(EXPERT), f"lacks tensors of the head, the first {EXPERT}"),
    "renamed": (
        "deepseek_v3",
        renamed("model.layers.2.hnorm.weight", "model.layers.2.hiddennorm.weight"),
        "the first model.layers.2.hnorm.weight",
    ),
    "unknown": (
        "qwen2",
        lambda folder: rewrite(folder, lambda t: t.update({"model.mtp_layers.0.odd.weight": torch.zeros(1)})),
        "does not have: 1, the first model.mtp_layers.0.odd.weight",
    ),
    "unknown beside the layers": (
        "qwen3_next",
        lambda folder: rewrite(folder, lambda t: t.update({"mtp.odd.weight": torch.zeros(1)})),
        "does not have: 1, the first mtp.odd.weight",
    ),
    "packed by a quantiser": (
        "qwen3_next",
        renamed("mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_proj.qweight"),
        "the first mtp.layers.0.self_attn.q_proj.weight",
    ),
    "cut": (
        "deepseek_v3",
        lambda folder: rewrite(folder, lambda t: t.update({"model.layers.2.enorm.weight": torch.zeros(7)})),
        r"model.layers.2.enorm.weight has shape \[7\], expected \[32\]",
    ),
    "cut expert": (
        "qwen3_next",
        lambda folder: rewrite(folder, lambda t: t.update({EXPERT: torch.zeros(3, 3)})),
        "the experts of mtp.layers.0.mlp.experts have different shapes",
    ),
    "rounded to 8 bits": (
        "deepseek_v3",
        lambda folder: rewrite(
            folder,
            lambda t: t.update(
                {
                    "model.layers.2.eh_proj.weight": t["model.layers.2.eh_proj.weight"].to(torch.int8),
                    "model.layers.2.eh_proj.weight_scale_inv": torch.ones(1, 1),
                }
            ),
        ),
        "does not have: 1, the first model.layers.2.eh_proj.weight_scale_inv",
    ),
    "not finite": (
        "qwen2",
        lambda folder: rewrite(folder, lambda t: t["model.mtp_layers.0.input_proj.weight"].fill_(float("nan"))),
        "weights of model.mtp_layers.0.input_proj.weight contain NaN",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_head_gives_a_one_line_error_that_names_the_tensor(case, tmp_path):
    family, damage, message = WRONG[case]
    model = tiny_target(family)
    write_checkpoint(family, tmp_path, model)
    target = ModelRunner.load(str(tmp_path), CONFIG)  # the target itself loads with a broken head
    damage(tmp_path)
    with pytest.raises(OutriderError, match=message) as error:
        mtp_formats.load(tmp_path, target)
    assert "\n" not in str(error.value)


def test_a_head_for_another_target_is_rejected(tmp_path):
    write_checkpoint("qwen2", tmp_path / "a", tiny_target("qwen2"))
    tiny_target("qwen2", hidden_size=64, head_dim=16).save_pretrained(tmp_path / "wide")
    with pytest.raises(OutriderError, match=r"input_proj.weight has shape \[32, 64\], expected \[64, 128\]"):
        mtp_formats.load(tmp_path / "a", ModelRunner.load(str(tmp_path / "wide"), CONFIG))
    tiny_target("glm4_moe", num_hidden_layers=3).save_pretrained(tmp_path / "glm")
    with pytest.raises(OutriderError, match=r"made for 2 layers, but .* has 3"):
        mtp_formats.load(tmp_path / "a", ModelRunner.load(str(tmp_path / "glm"), CONFIG))


def test_a_loaded_target_has_no_folder_with_a_head():
    with pytest.raises(OutriderError, match="loaded model, which has no folder with a head: give draft="):
        LLM(tiny_target("qwen2"), method="mtp", compile="never")


def test_a_model_with_more_layers_is_not_a_head(tmp_path):
    tiny_target("qwen2", num_hidden_layers=3).save_pretrained(tmp_path / "deep")
    with pytest.raises(OutriderError, match=r"lacks .*, the first model.layers.2.eh_proj.weight"):
        mtp_formats.load(tmp_path / "deep", ModelRunner.load(tiny_target("qwen2"), CONFIG))


def test_gemma_4s_assistant_is_rejected(tmp_path):
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    set_config(tmp_path, model_type="gemma4_assistant")
    with pytest.raises(OutriderError, match="is one of Gemma 4's assistants: training and conversion are not supported"):
        mtp_formats.load(tmp_path, ModelRunner.load(tiny_target("qwen2"), CONFIG))


def test_the_first_of_several_heads_is_read(tmp_path):
    model = tiny_target("glm4_moe")
    write_checkpoint("glm4_moe", tmp_path, model)
    further = {}
    rewrite(
        tmp_path,
        lambda t: further.update({n.replace(".2.", ".10.", 1): x for n, x in t.items() if n.startswith("model.layers.2.")}),
    )
    rewrite(tmp_path, lambda t: t.update(further))
    target = ModelRunner.load(str(tmp_path), CONFIG)
    assert isinstance(mtp_formats.load(tmp_path, target), MtpHead)


PROMPTS = [[7, 3, 11, 4, 9, 2, 30], [5], [8, 1, 8, 2, 8]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_in_the_targets_folder_drafts_and_output_equals_plain_decoding(family, tmp_path):
    """Greedy, and sampled with coupled noise. Targets with recurrent layers score chains."""
    write_checkpoint(family, tmp_path, tiny_target(family))
    params = [SamplingParams(max_tokens=16, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 0.9, 1.0)]
    texts = []
    for method in ("plain", "mtp"):
        llm = LLM(
            str(tmp_path),
            tokenizer=letter_tokenizer(61, 1),
            method=method,
            num_draft_tokens=4,
            same_text=True,
            compile="never",
            max_batch=3,
        )
        for batch in (PROMPTS, *([prompt] for prompt in PROMPTS)):
            found = outputs_of(llm.generate(batch, params[: len(batch)]))
            texts.append((method, [completion.token_ids for completion in found]))
        assert llm.stats.faults == 0
    half = len(texts) // 2
    assert [text for _, text in texts[:half]] == [text for _, text in texts[half:]]
    assert llm.stats.num_drafts > 0


def test_a_head_keeps_16_bits_with_a_4_bit_target(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    write_checkpoint("qwen2", tmp_path, tiny_target("qwen2", hidden_size=128, intermediate_size=128, head_dim=32))
    target = ModelRunner.load(str(tmp_path), RunnerConfig(compile="never", max_batch=1, weights="int4"))
    head = mtp_formats.load(tmp_path, target)
    assert head.uses_targets_output
    RolloutRunner(head, target)
    kinds = {layer.packed.dtype for layer in packed_layers(head)}
    assert kinds == {torch.bfloat16}, kinds


def test_the_kind_of_a_folder_is_recognised(tmp_path):
    for family in ("qwen3_next", "glm4_moe", "qwen2"):
        write_checkpoint(family, tmp_path / family, tiny_target(family))
        assert kinds_of(tmp_path / family) == [MODEL, MTP]
        target = ModelRunner.load(str(tmp_path / family), CONFIG)
        mtp_formats.export(mtp_formats.load(tmp_path / family, target), tmp_path / f"{family}-head", LAYOUT_OF[family])
        assert kinds_of(tmp_path / f"{family}-head") == [MTP]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_continues_from_the_cached_entries_of_target_and_head(family, temperature, tmp_path):
    """Of a target with recurrent layers only the state at the head's last entry is still there, and is enough."""
    write_checkpoint(family, tmp_path, tiny_target(family))
    params = SamplingParams(max_tokens=14, temperature=temperature, seed=4, ignore_eos=True)
    wanted = conversation(letters_llm(str(tmp_path), "plain", vocab_size=61), params)
    llm = letters_llm(str(tmp_path), "mtp", vocab_size=61, prefix_cache=True)
    assert conversation(llm, params) == wanted
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0
    assert llm.runner.cache.num_reused > 80  # 43 and 60 tokens, except for those of each turn's last round
