"""EAGLE heads of every public format match reference implementations: over a cache, in chunks, and level by level."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider import LLM, SamplingParams, native
from outrider.heads import copied_tables, eagle_formats
from outrider.heads.checkpoint import read_folder, stored_rates, tensor_names
from outrider.heads.eagle import default_hidden_states
from outrider.heads.head_runner import RolloutRunner
from outrider.proposers.head_trees import HeadProposer
from outrider.proposers.method import TargetFiles
from outrider.runner import ModelRunner, RunnerConfig, blocks
from outrider.runner.linear import PackedEmbedding
from outrider.types import OutriderError
from outrider.weight_files import INDEXES

from . import reference
from .writers import HIDDEN, set_config, write_eagle1, write_eagle3, write_medusa, write_speculators

VOCAB, DRAFT_VOCAB, LAYERS = 40, 23, 4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=700, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def target(model):
    return ModelRunner.load(model, RunnerConfig(compile="never", max_batch=3))


def sizes(num_layers=LAYERS):
    return TargetFiles("target", Path(), LlamaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=num_layers))


def load(folder):
    return eagle_formats.load(folder, sizes())


KINDS = [
    *("eagle1", "eagle1 without bias", "eagle1 of two layers", "eagle1 for qwen2"),
    *("native", "speculators", "norm_before_fc", "fc_norm", "3.1"),
]


def write(kind, folder):
    """Write a head. Returns its weights and reference functions: entries -> out, out -> logits, out -> fed-back feature."""
    if kind.startswith("eagle1"):
        layers = 2 if "two" in kind else 1
        return write_eagle1(folder, VOCAB, bias="without" not in kind, layers=layers, qkv_bias="qwen2" in kind)
    if kind == "native":
        return write_eagle3(folder, VOCAB, DRAFT_VOCAB)
    extra = kind if kind in ("norm_before_fc", "fc_norm") else ""
    return write_speculators(folder, VOCAB, DRAFT_VOCAB, extra=extra, norm_output=kind == "3.1")


class Reference:
    """Reference implementation of the same head from its paper."""

    def __init__(self, kind, weights, model):
        self.kind, self.weights, self.model = kind, weights, model

    def fuse(self, features):
        return features[0] if self.kind.startswith("eagle1") else reference.eagle3_fuse(self.weights, *features)

    def out(self, tokens, hidden, positions, sees):
        if self.kind.startswith("eagle1"):
            return reference.eagle1(self.weights, tokens, hidden, positions, sees)
        table = self.weights.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        is_normed = self.kind != "native"
        return reference.eagle3(self.weights, table[tokens], hidden, positions, sees, is_normed)

    def feedback(self, out):
        return reference.rms_norm(out, self.weights["norm.weight"]) if self.kind == "3.1" else out

    def logits(self, out):
        if self.kind.startswith("eagle1"):
            return self.model.lm_head(out)
        return reference.eagle3_logits(self.weights, out, VOCAB)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_prefills_in_chunks_and_drafts_a_tree(kind, tmp_path, model, target):
    weights = write(kind, tmp_path)
    by_paper, runner = Reference(kind, weights, model), RolloutRunner(load(tmp_path), target)
    count = len(runner.head.shape.hidden_states)
    lengths, generator = (300, 6), torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
    features = [[torch.randn(length, HIDDEN, generator=generator) for _ in range(count)] for length in lengths]
    runner.extend(["a"], [tokens[0][:3].tolist()], [[each[:3] for each in features[0]]])
    rest = [tokens[0][3:].tolist(), tokens[1].tolist()]
    root = runner.extend(["a", "b"], rest, [[each[3:] for each in features[0]], features[1]])
    level_1, level_2 = torch.tensor([[7, 8], [9, 10]]), torch.tensor([[11, 12, 13], [14, 15, 16]])
    above = torch.tensor([0, 1, 0])  # parents of the second level
    fed = root.feedback[:, None].expand(-1, 2, -1)
    first = runner.level(["a", "b"], level_1, fed, 1, torch.eye(2).bool().expand(2, -1, -1))
    sees = torch.cat((torch.eye(2)[above], torch.eye(3)), 1).bool().expand(2, -1, -1)
    second = runner.level(["a", "b"], level_2, first.feedback[:, above], 2, sees)
    for b, length in enumerate(lengths):
        hidden = by_paper.fuse(features[b])
        causal = torch.ones(length, length).tril().bool()
        own = by_paper.out(tokens[b], hidden, torch.arange(length), causal)
        torch.testing.assert_close(root.feedback[b], by_paper.feedback(own[-1:])[0], rtol=1e-4, atol=1e-4)
        for node in range(3):  # compute each path of the tree as a separate sequence
            path = torch.stack((level_1[b, above[node]], level_2[b, node]))
            longer = torch.cat((hidden, by_paper.feedback(own[-1:])))
            upto = lambda n: torch.ones(n, n).tril().bool()  # noqa: E731
            one = by_paper.out(torch.cat((tokens[b], path[:1])), longer, torch.arange(length + 1), upto(length + 1))
            longer = torch.cat((longer, by_paper.feedback(one[-1:])))
            two = by_paper.out(torch.cat((tokens[b], path)), longer, torch.arange(length + 2), upto(length + 2))
            for found, own_out in ((first.feedback[b, above[node]], one), (second.feedback[b, node], two)):
                torch.testing.assert_close(found, by_paper.feedback(own_out[-1:])[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(second.logits[b, node], by_paper.logits(two[-1:])[0], rtol=1e-3, atol=1e-3)


def test_a_head_beside_a_16_bit_target_turns_by_exact_angles(tmp_path, model):
    """The rotary frequencies stay in float32 when the module is converted to 16 bits."""
    write_eagle1(tmp_path, VOCAB)
    target = ModelRunner.load(deepcopy(model).bfloat16(), RunnerConfig(compile="never", max_batch=1))
    runner = RolloutRunner(load(tmp_path), target)
    exact = LlamaRotaryEmbedding(runner.head.shape.config).inv_freq
    assert torch.equal(runner.head.rotary_emb.inv_freq, exact) and not torch.equal(exact.bfloat16().float(), exact)


def test_layer_ids_are_counted_as_each_place_in_the_config_counts_them(tmp_path):
    """[0, 1, 2] inside eagle_config are the outputs of layers 0, 1, 2; at the top level the same layers are [1, 2, 3]."""
    write_eagle3(tmp_path / "inner", VOCAB, DRAFT_VOCAB)
    assert load(tmp_path / "inner").shape.hidden_states == (1, 2, 3)
    write_eagle3(tmp_path / "outer", VOCAB, DRAFT_VOCAB, config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    assert load(tmp_path / "outer").shape.hidden_states == (0, 2, 4)


def test_a_config_without_layers_is_guessed_with_a_warning(tmp_path, caplog):
    write_eagle3(tmp_path, VOCAB, DRAFT_VOCAB, config={"eagle_config": None})
    assert eagle_formats.load(tmp_path, sizes(32)).shape.hidden_states == (2, 16, 29)
    assert "assuming" in caplog.text
    with pytest.raises(OutriderError, match="name three of them"):
        load(tmp_path)
    assert default_hidden_states(8) == (2, 4, 5)


@pytest.mark.parametrize("kind", ["native", "speculators"])
@pytest.mark.parametrize("source", ["native", "speculators", "norm_before_fc", "fc_norm", "3.1"])
def test_an_exported_head_equals_the_original(source, kind, tmp_path, target):
    write(source, tmp_path / "in")
    first = load(tmp_path / "in")
    first.share_target_modules(target.model.get_input_embeddings(), target.model.get_output_embeddings())
    eagle_formats.export(first, tmp_path / "out", kind, verifier="some/target", acceptance=[0.7, 0.1])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    second = load(tmp_path / "out")
    assert second.shape.hidden_states == first.shape.hidden_states
    lent = kind == "speculators" and not first.shape.own_embedding
    for name, tensor in second.state_dict().items():
        wanted = target.model.get_input_embeddings() if lent and name == "embed_tokens.weight" else None
        torch.testing.assert_close(tensor, first.embedding_table() if wanted is not None else first.state_dict()[name])
    assert second.shape.config.rope_parameters["rope_theta"] == 5000.0
    assert stored_rates(config, "acceptance_by_rank", 1, tmp_path) == [0.7, 0.1]


def test_the_native_export_has_the_names_and_shapes_of_the_format(tmp_path, target):
    weights = write_speculators(tmp_path / "in", VOCAB, DRAFT_VOCAB)
    head = load(tmp_path / "in")
    eagle_formats.export(head, tmp_path / "out")
    from safetensors.torch import load_file

    tensors, config = (
        load_file(tmp_path / "out" / "model.safetensors"),
        json.loads((tmp_path / "out" / "config.json").read_text()),
    )
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    assert tensors.keys() == renamed.keys()
    assert all(torch.equal(tensors[name], renamed[name]) for name in renamed)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["norm_before_residual"] is True
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["draft_vocab_size"] == DRAFT_VOCAB and config["vocab_size"] == VOCAB


def test_a_head_over_the_whole_vocabulary_is_written_without_tables(tmp_path):
    """vLLM rejects a d2t table that it does not need."""
    tensors = write_eagle3(tmp_path / "in", VOCAB, VOCAB)
    rewrite(tmp_path / "in", lambda t: (t.pop("d2t"), t.pop("t2d")))
    eagle_formats.export(load(tmp_path / "in"), tmp_path / "out")
    from safetensors.torch import load_file

    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"d2t", "t2d"} & written.keys() and torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])
    assert load(tmp_path / "out").draft_ids is None


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_an_eagle1_head_round_trips(qkv_bias, tmp_path):
    weights = write_eagle1(tmp_path / "in", VOCAB, qkv_bias=qkv_bias)
    eagle_formats.export(load(tmp_path / "in"), tmp_path / "out")
    assert all(torch.equal(load(tmp_path / "out").state_dict()[name], tensor) for name, tensor in weights.items())
    with pytest.raises(OutriderError, match="native format only"):
        eagle_formats.export(load(tmp_path / "in"), tmp_path / "out", "speculators")


def test_an_eagle1_head_without_a_bias_is_written_with_zeros(tmp_path):
    """SGLang and the authors' code expect a bias; "bias" in the config is read as the attention's."""
    write_eagle1(tmp_path / "in", VOCAB, bias=False)
    eagle_formats.export(load(tmp_path / "in"), tmp_path / "out")
    from safetensors.torch import load_file

    assert not load_file(tmp_path / "out" / "model.safetensors")["fc.bias"].any()
    assert "bias" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert load(tmp_path / "out").fc.bias is None


def rewrite(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_prompt_is_read_once_for_all_its_samples(model, tmp_path, monkeypatch):
    write_eagle3(tmp_path, VOCAB, DRAFT_VOCAB)
    prompt, params = list(range(3, 33)) * 2, SamplingParams(n=4, max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    read, extend = [], RolloutRunner.extend

    def counted(runner, request_ids, tokens, features):
        read.extend(map(len, tokens))
        return extend(runner, request_ids, tokens, features)

    def outputs(method, **draft):
        llm = LLM(model, method=method, num_draft_tokens=2, compile="never", same_text=True, **draft)
        texts = [each.token_ids for each in llm.generate(prompt, params)[0].outputs]
        return texts, llm.stats.acceptance_histogram, llm.stats.faults

    monkeypatch.setattr(RolloutRunner, "extend", counted)
    shared = outputs("eagle:max_nodes=4", draft=tmp_path)
    assert sum(count > len(prompt) / 2 for count in read) == 1
    assert shared[0] == outputs("plain")[0] and shared[2] == 0
    monkeypatch.setattr(HeadProposer, "fork", lambda *_: None)
    assert outputs("eagle:max_nodes=4", draft=tmp_path) == shared
    assert sum(count > len(prompt) / 2 for count in read) == 1 + params.n


WRONG = {
    "hidden state": (
        lambda folder: rewrite(folder, lambda t: t["fc.weight"].fill_(float("nan"))),
        "weights of fc.weight contain NaN",
    ),
    "missing": (
        lambda folder: rewrite(folder, lambda t: t.pop("norm.weight")),
        "lacks 1 of the head's tensors, the first norm",
    ),
    "unknown": (
        lambda folder: rewrite(folder, lambda t: t.update(odd=torch.zeros(1))),
        "tensors that this kind of head does not have: .*, the first odd",
    ),
    "no d2t": (lambda folder: rewrite(folder, lambda t: t.pop("d2t")), "drafts 23 of 40 tokens, but the mapping d2t"),
    "flat fc": (
        lambda folder: rewrite(folder, lambda t: t.update({"fc.weight": t["fc.weight"].flatten()})),
        "fc.weight has shape .*, expected 2 dimensions",
    ),
    "no fc": (lambda folder: rewrite(folder, lambda t: t.pop("fc.weight")), "not an EAGLE head: fc.weight"),
    "shape": (lambda folder: set_config(folder, intermediate_size=64), r"has shape \[48, 32\], expected \[64, 32\]"),
    "layers": (
        lambda folder: set_config(folder, eagle_aux_hidden_state_layer_ids=[1, 2]),
        r"fc.weight has shape \[32, 96\], expected 64 inputs: its config names the hidden states \(1, 2\) of 32",
    ),
    "other layers": (lambda folder: set_config(folder, model_type="gemma2"), "unsupported layers gemma2"),
    "norms within a head": (
        lambda folder: rewrite(folder, lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)})),
        "tensors that this kind of head does not have: .*, the first layers.0.self_attn.q_norm",
    ),
    "no numbers": (
        lambda folder: set_config(folder, eagle_aux_hidden_state_layer_ids=["low", "high"]),
        r"invalid layer ids \['low', 'high'\]",
    ),
    "no layer": (
        lambda folder: set_config(folder, eagle_aux_hidden_state_layer_ids=3),
        "invalid layer ids 3",
    ),
    "no rotation": (
        lambda folder: set_config(folder, rope_scaling={"rope_type": "spiral"}),
        "unknown activation or rotary type 'spiral'",
    ),
    "no section": (
        lambda folder: set_config(folder, eagle_config=[1]),
        "eagle_config in config.json must be an object, got a list",
    ),
    "no index": (
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text("{}"),
        ),
        "not a weight index",
    ),
    "no object": (lambda folder: (folder / "config.json").write_text("[]"), "must be an object, got a list"),
    "a trainer's checkpoint": (
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            torch.save({"state": {"fc.weight": torch.ones(1)}}, folder / "pytorch_model.bin"),
        ),
        "state must be a tensor, got a dict",
    ),
    "other kind": (
        lambda folder: set_config(folder, speculators_model_type="dflash"),
        "unsupported speculators head 'dflash'",
    ),
    "P-EAGLE": (
        lambda folder: rewrite(folder, lambda t: t.update({"mask_hidden": torch.ones(1, 3 * HIDDEN)})),
        "unsupported head in .*: a P-EAGLE head",
    ),
    "SGLang's layers": (
        lambda folder: rewrite(folder, lambda t: t.update({"additional_layers.0.hidden_norm.weight": torch.ones(HIDDEN)})),
        "unsupported head in .*: an EAGLE-3 head with several layers",
    ),
    "cut short": (lambda folder: (folder / "model.safetensors").write_bytes(b"\\x10" * 40), "cannot read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "no stated weights": (
        lambda folder: set_config(folder, transformers_weights="own.safetensors"),
        "has no own.safetensors, which its index or config.json names",
    ),
    "no stated index": (
        lambda folder: set_config(folder, transformers_weights=INDEXES[0]),
        "index.json cannot be read: No such file",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read: No such file"),
    "no json": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    "nested json": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "is not JSON"),
}


def test_an_index_beside_the_whole_file_is_ignored_as_by_transformers(tmp_path):
    write_eagle3(tmp_path, VOCAB, DRAFT_VOCAB)
    names = sorted(tensor_names(tmp_path))
    for name in INDEXES:
        (tmp_path / name).write_text('{"weight_map": {"fc.weight": "gone"}}')
    assert sorted(tensor_names(tmp_path)) == names == sorted(read_folder(tmp_path)[1])


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_head_gives_a_one_line_error(case, tmp_path):
    write_eagle3(tmp_path, VOCAB, DRAFT_VOCAB)
    damage, message = WRONG[case]
    damage(tmp_path)
    with pytest.raises(OutriderError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 64}, "expects hidden size 32"),
        ({"num_layers": 2}, r"reads hidden states \(1, 2, 3\), .* has 2 layers"),
        ({"vocab_size": 20}, "draft vocabulary"),
    ],
)
def test_a_head_for_another_target_is_rejected(change, message, tmp_path, target):
    write_eagle3(tmp_path, VOCAB, DRAFT_VOCAB)
    for name, value in change.items():
        setattr(target, name, value)
    with pytest.raises(OutriderError, match=message):
        eagle_formats.load(tmp_path, target)


def test_a_medusa_folder_is_not_an_eagle_head(tmp_path):
    write_medusa(tmp_path, VOCAB, 2)
    with pytest.raises(OutriderError, match="not an EAGLE head"):
        load(tmp_path)


@pytest.mark.parametrize("num_rows", [VOCAB, VOCAB - 3, VOCAB + 3])
def test_a_copy_of_the_targets_embedding_is_not_kept(num_rows, tmp_path, model, target, monkeypatch):
    """Copies may have fewer or more padding rows than the target's table."""
    monkeypatch.setattr(copied_tables, "SLICE", 7)  # several slices, the last one shorter
    embedding = model.get_input_embeddings()

    def loaded():
        return eagle_formats.load(tmp_path, target, model)

    tensors = write_eagle1(tmp_path, VOCAB)
    assert loaded().shape.own_embedding
    padding = torch.zeros(max(0, num_rows - VOCAB), HIDDEN)
    stored = torch.cat((embedding.weight.detach()[:num_rows], padding))
    torch.save(tensors | {"embed_tokens.weight": stored}, tmp_path / "pytorch_model.bin")
    head = loaded()
    assert not head.shape.own_embedding
    head.share_target_modules(embedding, model.get_output_embeddings())
    assert torch.equal(head.embedding_table(), embedding.weight)


@pytest.mark.skipif(not native.load(), reason="no C++ compiler")
@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_of_a_scaled_embedding_is_kept(packed):
    embedding = Gemma3TextScaledWordEmbedding(64, 32, 0, embed_scale=5.0)
    tensors = {"embed_tokens.weight": embedding.weight.detach().clone()}
    target = PackedEmbedding(blocks.pack(embedding.weight.detach(), 8), embedding) if packed else embedding
    copied_tables.drop_copied_table(tensors, "embed_tokens.weight", target)
    assert "embed_tokens.weight" in tensors
