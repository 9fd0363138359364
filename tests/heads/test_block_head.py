"""Block drafters of every checkpoint layout match the reference implementation; errors in a broken one name the tensor."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from runner.rounds import contents
from safetensors.torch import load_file
from tiny_hybrids import hybrid
from transformers import Phi3Config, Phi3ForCausalLM, Qwen3Config

from outrider import SamplingParams
from outrider.heads import block_formats
from outrider.heads.block import BlockHead, BlockShape
from outrider.heads.block_runner import BlockRunner
from outrider.heads.checkpoint import BLOCK, EAGLE, MODEL, kind_of, kinds_of
from outrider.proposers.method import TargetFiles
from outrider.registry import PROPOSERS
from outrider.runner import ModelRunner, RunnerConfig
from outrider.types import OutriderError

from .block_checkpoints import (
    HIDDEN,
    LAYER_CONFIG,
    MASK,
    VOCAB,
    Reference,
    block_target,
    dspark_config,
    head_tensors,
    markov_tensors,
    native_config,
    second_config,
    second_tensors,
    speculators_config,
    write,
)
from .drafting import even_and_odd, letters_llm, texts_of

CONFIG = RunnerConfig(compile="never", max_batch=4)
SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
TABLES = ("embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def model():
    return block_target()


@pytest.fixture(scope="module")
def target(model):
    return ModelRunner.load(model, CONFIG)


def copies(model):
    return {name: module.weight.detach().clone() for name, module in
            zip(TABLES, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True)}  # fmt: skip


def with_prefix(tensors):
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


LAYOUTS = {
    "z-lab": (native_config, lambda model: head_tensors(), {}),
    "z-lab with biases": (lambda: native_config(attention_bias=True), lambda model: head_tensors(bias=True), {}),
    "z-lab with a prefix": (native_config, lambda model: with_prefix(head_tensors()), {}),
    "z-lab with windows": (lambda: native_config(is_causal=False, **SLIDING), lambda model: head_tensors(), {"window": 5}),
    "z-lab with causal windows": (
        lambda: native_config(**SLIDING),
        lambda model: head_tensors(),
        {"window": 5, "causal": True},
    ),
    "DFlash 2": (second_config, lambda model: head_tensors() | second_tensors(), {}),
    "DFlash 2 with tables as embeddings": (
        second_config,
        lambda model: with_prefix(
            {
                name + ".weight" * name.endswith("_codebook"): tensor
                for name, tensor in (head_tensors() | second_tensors()).items()
            }
        ),
        {},
    ),
    "speculators' DFlash 2": (
        lambda: speculators_config("dflash2", conv_kernel_size=3, conv_group_size=8, selector_rank=6, selector_top_k=5),
        lambda model: head_tensors() | second_tensors(),
        {},
    ),
    "speculators": (speculators_config, lambda model: head_tensors() | copies(model), {}),
    "speculators with causal windows": (
        lambda: speculators_config(transformer_layer_config=LAYER_CONFIG | SLIDING, sliding_window_non_causal=False),
        lambda model: head_tensors(),
        {"window": 5, "causal": True},
    ),
    "speculators with sizes left out": (
        lambda: speculators_config(transformer_layer_config={"model_type": "qwen3", "rms_norm_eps": 1e-6}),
        lambda model: head_tensors(),
        {},
    ),
    "DSpark": (dspark_config, lambda model: head_tensors() | markov_tensors() | copies(model), {}),
    "speculators' DSpark": (lambda: speculators_config("dspark", 7), lambda model: head_tensors() | markov_tensors(), {}),
}


def features_of(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, HIDDEN, generator=generator) for _ in range(3)]


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_a_checkpoint_matches_the_reference(layout, model, target, tmp_path):
    config, tensors, attention = LAYOUTS[layout]
    stored = tensors(model)
    head = block_formats.load(write(tmp_path, config(), stored), target, model)
    assert head.hidden_states == (1, 3, 4) and head.shape.max_drafts == 7
    assert head.uses_targets_output and not hasattr(head, "embed_tokens")  # copies of the target's tables are not kept
    own = {name.removeprefix("model.").replace("_codebook.weight", "_codebook"): t for name, t in stored.items()}
    by_formula = Reference(own, model, **attention)
    runner, first = BlockRunner(head, target), 0 if head.shape.predicts_next else 1
    texts = {"a": features_of(11), "b": features_of(4, seed=2), "c": features_of(9, seed=3)}
    runner.extend(["c"], [[each[:6] for each in texts["c"]]])
    # One batch: a request with only new features, one with few, one with some cached; each with its own drafts.
    new = {"a": texts["a"], "b": texts["b"], "c": [each[6:] for each in texts["c"]]}
    counts = {"a": 7, "b": 1, "c": 3}
    out = runner.draft(list(new), list(new.values()), [5, 9, 13], list(counts.values()))
    assert out.shape == (3, 7, HIDDEN)
    for row, (name, count), token in zip(out, counts.items(), (5, 9, 13), strict=True):
        wanted = by_formula.out(texts[name], token, count if first else count - 1)[first:]
        torch.testing.assert_close(row[:count], wanted, rtol=1e-4, atol=1e-4)
        logits = runner.after(row[:count], head.logits(row[:count]), torch.full((count,), 3))
        if head.shape.selector_rank:
            for found, one in zip(logits, wanted, strict=True):
                candidates = by_formula.selected(one, 3)
                assert set(found.topk(len(candidates)).indices.tolist()) == set(candidates)
                torch.testing.assert_close(
                    found[list(candidates)], torch.tensor(list(candidates.values())), rtol=1e-4, atol=1e-3
                )
                others = torch.tensor([token not in candidates for token in range(VOCAB)])
                assert found[others].max() < found.max() - 5000  # never drafted, unless a mask excludes all candidates
                assert found[others].argmax() == by_formula.logits(one)[others].argmax()
            continue
        bias = by_formula.bias(3) if head.shape.markov_rank else 0
        torch.testing.assert_close(logits, by_formula.logits(wanted) + bias, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("device_pads", [False, True])
def test_a_drafted_block_does_not_change_the_cache(device_pads, target, tmp_path):
    head = block_formats.load(write(tmp_path, native_config(), head_tensors()), target)
    runner, alone = BlockRunner(head, target), BlockRunner(head, target)
    runner._layouts.is_padded = device_pads
    whole, other = features_of(24), features_of(30, seed=8)
    for start, end, count in ((0, 5, 7), (5, 6, 2), (6, 13, 7), (13, 14, 1), (14, 24, 5)):
        parts = [[each[start:end] for each in features] for features in (whole, other)]
        runner.draft(["a", "b"], parts, [start, 7], [count, 8 - count])
        assert runner.cache.cached_len("a") == runner.cache.cached_len("b") == end
    alone.extend(["x", "a"], [features_of(3, seed=5), whole])
    for found, wanted in zip(contents(runner.cache, "a"), contents(alone.cache, "a"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    again = runner.draft(["a"], [[each[:0] for each in whole]], [3], [7])
    fresh = alone.draft(["a"], [[each[:0] for each in whole]], [3], [7])
    torch.testing.assert_close(again, fresh, rtol=1e-4, atol=1e-4)
    runner.cache.release(["a"])
    assert runner.cache.cached_len("a") == 0


@torch.no_grad()
def test_a_long_prompt_is_prefilled_in_chunks(tmp_path):
    model = block_target(max_position_embeddings=1024)
    target = ModelRunner.load(model, CONFIG)
    tensors = head_tensors()
    head = block_formats.load(write(tmp_path, native_config(), tensors), target, model)
    runner, features = BlockRunner(head, target), features_of(700)
    runner.extend(["a", "b"], [features, features_of(2, seed=4)])
    out = runner.draft(["a"], [[each[:0] for each in features]], [5], [4])
    torch.testing.assert_close(out[0], Reference(tensors, model).out(features, 5, 4)[1:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_reduced_vocabulary_with_its_own_tables(model, target, tmp_path):
    ids = torch.arange(1, 41)
    tables = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "lm_head.weight": torch.randn(40, HIDDEN)}
    maps = {"d2t": ids - torch.arange(40), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)}
    stored = head_tensors() | markov_tensors(vocab=40) | tables | maps
    config = speculators_config("dspark", 7, draft_vocab_size=40)
    head = block_formats.load(write(tmp_path, config, stored), target, model)
    by_formula, runner = Reference(stored, model), BlockRunner(head, target)
    by_formula.table, by_formula.output = tables.values()
    out = runner.draft(["a"], [features_of(6)], [4], [3])
    logits = runner.after(out, head.logits(out), torch.tensor([[1, 2, 59]]))[0]
    wanted = by_formula.logits(by_formula.out(features_of(6), 4, 2)) + torch.stack(
        [by_formula.bias(token) for token in (1, 2, 59)]
    )
    torch.testing.assert_close(logits[:, ids], wanted, rtol=1e-4, atol=1e-4)
    assert (logits[:, [0, *range(41, VOCAB)]] < -1e29).all()


@torch.no_grad()
def test_a_scale_and_a_cap_of_the_heads_logits_replace_the_targets(model, target, tmp_path):
    config = second_config(output_multiplier=0.5, final_logit_softcapping=3.0)
    head = block_formats.load(write(tmp_path, config, head_tensors() | second_tensors()), target)
    BlockRunner(head, target)  # the target lends its output head
    out = features_of(4)[0]
    wanted = 3.0 * (0.5 * out @ model.lm_head.weight.T / 3.0).tanh()
    torch.testing.assert_close(head.logits(out), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["DFlash", "DSpark", "DFlash 2"])
def test_an_exported_head_equals_the_original(kind, target, tmp_path):
    if kind == "DFlash":
        config, stored = native_config(**SLIDING), head_tensors()
    elif kind == "DFlash 2":
        config = second_config(output_multiplier=0.5, final_logit_softcapping=30.0)
        stored = head_tensors() | second_tensors()
    else:
        config, stored = speculators_config("dspark", 7), head_tensors() | markov_tensors()
    first = block_formats.load(write(tmp_path / "in", config, stored), target)
    block_formats.export(first, tmp_path / "out", 5, [0.5, 0.25])
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {name for name in stored if "confidence" not in name}
    second = block_formats.load(tmp_path / "out", target)
    assert second.shape.__dict__ | {"config": 0} == first.shape.__dict__ | {"config": 0}
    assert second.shape.config.to_diff_dict() | {"dtype": 0} == first.shape.config.to_diff_dict() | {"dtype": 0}
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())


def changed(change, config=native_config, more=dict):
    def make():
        tensors = head_tensors() | more()
        change(tensors)
        return config(), tensors

    return make


def without(name, **options):
    return changed(lambda tensors: tensors.pop(name), **options)


def configured(tensors=head_tensors, config=native_config, **changes):
    return lambda: (config(**changes), tensors())


NAME = "layers.1.self_attn.k_proj.weight"
WRONG = {
    "no fc": (without("fc.weight"), "is not a block drafter: fc.weight is missing"),
    "no norm of features": (without("hidden_norm.weight"), "is not a block drafter: hidden_norm.weight is missing"),
    "missing": (without(NAME), f"lacks 1 of the head's tensors, the first {NAME}"),
    "renamed": (changed(lambda t: t.update({"layers.1.self_attn.key.weight": t.pop(NAME)})), f"the first {NAME}"),
    "cut": (changed(lambda t: t.update({NAME: t[NAME][:7]})), rf"{NAME} has shape \[7, 32\], expected \[16, 32\]"),
    "fc cut": (
        changed(lambda t: t.update({"fc.weight": t["fc.weight"][:, :64]})),
        r"fc.weight has shape \[32, 64\], expected 96",
    ),
    "unknown": (
        changed(lambda t: t.update({"layers.0.odd.weight": torch.zeros(2)})),
        "does not have: 1, the first layers.0.odd",
    ),
    "more layers than said": (configured(num_hidden_layers=1), "the first layers.1."),
    "fewer layers than said": (configured(num_hidden_layers=3, layer_types=None), "the first layers.2.self_attn.q_proj.weight"),
    "no matrix": (
        changed(lambda t: t.update({"fc.weight": torch.zeros(())})),
        r"fc.weight has shape \[\], expected 2 dimensions",
    ),
    "rounded to 8 bits": (
        changed(lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)})),
        f"is quantised: {NAME} is float8_e4m3fn",
    ),
    "not finite": (changed(lambda t: t["norm.weight"].fill_(float("nan"))), "the weights of norm.weight contain NaN"),
    "no Markov table": (
        without("markov_head.markov_w2.weight", config=dspark_config, more=markov_tensors),
        "the first markov_head.markov_w2.weight",
    ),
    "gated Markov head": (
        changed(
            lambda t: t.update({"markov_head.gate_proj.weight": torch.zeros(5, 37)}), config=dspark_config, more=markov_tensors
        ),
        r"needs a gated Markov head \(markov_head.gate_proj.weight\), which is not supported",
    ),
    "recurrent Markov head": (configured(markov_head_type="rnn"), "has markov_head_type 'rnn', which is not supported"),
    "a selector that the config lacks": (
        changed(lambda t: t.update({"candidate_selector.predecessor_codebook": torch.zeros(61, 4)})),
        "config.json lacks selector_rank and selector_top_k",
    ),
    "convolutions that the config lacks": (
        changed(lambda t: t.update({"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 32)})),
        "config.json lacks conv_kernel_size and conv_group_size",
    ),
    "no selector": (
        configured(config=second_config),
        r"lacks 11 of the head's tensors, the first layers.0.attention_conv.base",
    ),
    "half a selector": (
        without("candidate_selector.successor_codebook", config=second_config, more=second_tensors),
        "the first candidate_selector.successor_codebook",
    ),
    "a selector of another vocabulary": (
        changed(
            lambda t: t.update({"candidate_selector.successor_codebook": torch.zeros(40, 6)}),
            config=second_config,
            more=second_tensors,
        ),
        r"candidate_selector.successor_codebook has shape \[40, 6\], expected \[61, 6\]",
    ),
    "fewer taps": (
        changed(
            lambda t: t.update({"layers.1.mlp_conv.base_kernel": torch.zeros(2, 2, 32)}),
            config=second_config,
            more=second_tensors,
        ),
        r"layers.1.mlp_conv.base_kernel has shape \[2, 2, 32\], expected \[2, 3, 32\]",
    ),
    "a group that does not divide": (
        configured(lambda: head_tensors() | second_tensors(), second_config, conv_group_size=5),
        "conv_group_size=5: expected a divisor of 32",
    ),
    "more candidates than tokens": (
        configured(lambda: head_tensors() | second_tensors(), second_config, selector_top_k=62),
        "selector_top_k=62: expected at most 61",
    ),
    "a selector and a bias": (
        configured(lambda: head_tensors() | second_tensors() | markov_tensors(), second_config),
        "has a path selector and markov_head.markov_w1.weight, which is not supported together",
    ),
    "scaled embedding": (
        configured(lambda: head_tensors() | second_tensors(), second_config, input_embedding_scale=8.0),
        "has input_embedding_scale 8.0, which is not supported: expected 1",
    ),
    "odd cap": (
        configured(lambda: head_tensors() | second_tensors(), second_config, final_logit_softcapping="high"),
        "final_logit_softcapping='high': expected a number of at least 0",
    ),
    "causal in full attention": (configured(is_causal=True), "full attention that is causal within a block"),
    "Domino": (configured(projector_type="domino"), "has projector_type 'domino', which is not supported: expected 'dflash'"),
    "another speculator": (configured(speculators_model_type="eagle3"), "unsupported speculators head 'eagle3'"),
    "no block size": (configured(block_size=None), "config.json says block_size=None: expected a whole number of at least 1"),
    "odd block size": (configured(block_size="eight"), "config.json says block_size='eight'"),
    "a block of one": (configured(block_size=1), "block_size 1 leaves no token to draft"),
    "no mask token": (configured(dflash_config={"target_layer_ids": [0, 2, 3]}), "says mask_token_id=None"),
    "mask token beyond the vocabulary": (
        configured(dflash_config={"target_layer_ids": [0, 2, 3], "mask_token_id": 61}),
        "the head's mask token is 61, but .* has 61 tokens",
    ),
    "odd layers": (
        configured(dflash_config={"target_layer_ids": ["low", 2, 3], "mask_token_id": MASK}),
        r"invalid layer ids \['low', 2, 3\]",
    ),
    "layers beyond the target": (
        configured(dflash_config={"target_layer_ids": [0, 2, 9], "mask_token_id": MASK}),
        r"reads hidden states \(1, 3, 10\), but .* has 5 layers",
    ),
    "other vocabulary": (configured(vocab_size=99), "drafts 99|made for 99 tokens, but .* has 61"),
    "other width": (configured(hidden_size=64, target_hidden_size=32), r"fc.weight has shape \[32, 96\], expected \[64, 96\]"),
    "odd section": (configured(dflash_config=[1, 2]), "dflash_config in config.json must be an object, got a list"),
    "odd kind of layer": (configured(layer_types=["full_attention", "linear_attention"]), "kind of layer 'linear_attention'"),
    "window without a size": (configured(**SLIDING | {"sliding_window": None}), "config.json says sliding_window=None"),
    "reduced without its mapping": (
        configured(lambda: head_tensors() | {"lm_head.weight": torch.zeros(40, 32)}, speculators_config, draft_vocab_size=40),
        "drafts 40 of 61 tokens, but the mapping d2t is missing",
    ),
    "a mapping without length": (
        configured(
            lambda: head_tensors() | {"lm_head.weight": torch.zeros(40, 32), "d2t": torch.tensor(3)}, speculators_config
        ),
        r"d2t has shape \[\], expected 1 dimensions",
    ),
    "mapping beyond the vocabulary": (
        configured(
            lambda: head_tensors() | {"lm_head.weight": torch.zeros(40, 32), "d2t": torch.full((40,), 30)}, speculators_config
        ),
        "contains token 69, but .* has 61 tokens",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_head_gives_a_one_line_error_that_names_the_fault(case, target, tmp_path):
    make, message = WRONG[case]
    with pytest.raises(OutriderError, match=message) as error:
        block_formats.load(write(tmp_path, *make()), target, target.model)
    assert "\n" not in str(error.value)


def test_a_head_for_another_target_is_rejected(tmp_path):
    write(tmp_path, native_config(), head_tensors())
    wide = ModelRunner.load(block_target(hidden_size=64), CONFIG)
    with pytest.raises(OutriderError, match=r"the head expects hidden size 32, but .* has 64"):
        block_formats.load(tmp_path, wide)
    shallow = ModelRunner.load(block_target(num_hidden_layers=3), CONFIG)
    with pytest.raises(OutriderError, match="has 3 layers"):
        block_formats.load(tmp_path, shallow)


def test_the_kind_of_a_folder_is_recognised(model, tmp_path):
    write(tmp_path / "native", native_config(), head_tensors())
    write(tmp_path / "speculators", speculators_config(), head_tensors() | copies(model))
    write(tmp_path / "dspark", dspark_config(), head_tensors() | markov_tensors())
    model.save_pretrained(tmp_path / "model")
    assert kind_of(tmp_path / "native") is kind_of(tmp_path / "speculators") is kind_of(tmp_path / "dspark") is BLOCK
    assert kinds_of(tmp_path / "speculators") == [BLOCK, MODEL] and EAGLE not in kinds_of(tmp_path / "native")
    assert kinds_of(tmp_path / "model") == [MODEL]
    files = TargetFiles.read("target", tmp_path / "model")
    method = PROPOSERS.get("dflash")
    assert method.recognise(tmp_path / "native", files).what == "block drafter"
    assert method.recognise(tmp_path / "model", files) is None
    write(tmp_path / "second", second_config(), head_tensors() | second_tensors())
    assert kind_of(tmp_path / "second") is BLOCK
    assert method.recognise(tmp_path / "second", files).what == "block drafter"
    write(tmp_path / "domino", native_config(), head_tensors() | {"prefix_gru.x": torch.zeros(1)})
    with pytest.raises(OutriderError, match="Domino's correction"):
        method.recognise(tmp_path / "domino", files)


engine = partial(letters_llm, vocab_size=VOCAB, max_batch=3)
PROMPTS = [[7, 3, 11, 4, 9, 2, 30], [5, 6], [8, 1, 8, 2, 8]]
HEADS = {
    "DFlash": (native_config, head_tensors),
    "DSpark": (dspark_config, lambda: head_tensors() | markov_tensors()),
    "DFlash 2": (second_config, lambda: head_tensors() | second_tensors()),
    "windows": (lambda: native_config(**SLIDING), head_tensors),
}


@pytest.mark.parametrize("kind", HEADS)
def test_output_equals_plain_decoding_for_any_k_and_batch(kind, model, tmp_path):
    config, tensors = HEADS[kind]
    write(tmp_path, config(), tensors())
    params = [SamplingParams(max_tokens=20, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    wanted = texts_of(engine(model, "plain"), PROMPTS, params)
    for k in (1, 3, 7, 20):
        llm = engine(model, "dflash", k, draft=str(tmp_path))
        assert texts_of(llm, PROMPTS, params) == wanted
        for prompt, own, text in zip(PROMPTS, params, wanted, strict=True):
            assert texts_of(llm, [prompt], own) == [text]
        assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


@torch.no_grad()
@pytest.mark.parametrize("weights", [None, "int8"])
def test_weights_in_8_bits(weights, tmp_path):
    """With a 16-bit target and an 8-bit one; the head has 8-bit weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    block_target(**sizes).bfloat16().save_pretrained(tmp_path / "target")
    target = ModelRunner.load(str(tmp_path / "target"), RunnerConfig(compile="never", max_batch=1, weights=weights))
    generator = torch.Generator().manual_seed(4)
    empty = BlockHead(BlockShape(Qwen3Config(**LAYER_CONFIG | sizes), 64, (1, 3, 4), 8, MASK, VOCAB, (0, 0)))
    tensors = {
        name: tensor if tensor.dim() == 1 else 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in empty.state_dict().items()
    }
    write(tmp_path / "head", native_config(**sizes), tensors)
    features, outs = [torch.randn(9, 64, generator=generator) for _ in range(3)], []
    for bits in (None, 8):
        runner = BlockRunner(block_formats.load(tmp_path / "head", target, target.model), target, bits)
        outs.append(runner.draft(["a"], [features], [5], [7]))
    error = float((outs[0] - outs[1]).norm() / outs[0].norm())
    assert 0 < error < 0.1


@pytest.mark.parametrize("kind", ["DSpark", "DFlash 2"])
def test_a_combined_method_with_grammar_masks_and_penalties_in_one_batch(kind, model, tmp_path):
    config, tensors = HEADS[kind]
    write(tmp_path, config(), tensors())
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, grammar=even_and_odd(VOCAB)),
        SamplingParams(max_tokens=24, temperature=1.0, seed=2, grammar=even_and_odd(VOCAB)),
        SamplingParams(max_tokens=24, allowed_token_ids=(3, 5, 9)),
        SamplingParams(max_tokens=24, temperature=1.0, seed=1, repetition_penalty=1.5),
    ]
    prompts = [*PROMPTS, [4, 4], [1, 2, 3]]
    wanted = texts_of(engine(model, "plain", max_batch=5), prompts, params)
    assert all(token % 2 == place % 2 for text in wanted[1:3] for place, token in enumerate(text))
    for method in ("dflash", "suffix+dflash"):
        for k in (5, "auto"):
            llm = engine(model, method, k, draft=str(tmp_path), max_batch=5)
            assert texts_of(llm, prompts, params) == wanted
            assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_a_target_with_recurrent_layers(kind, tmp_path):
    recurrent = hybrid(kind)
    layers = {"target_layer_ids": [0, 2, 3], "mask_token_id": MASK}
    write(tmp_path, native_config(dflash_config=layers, num_target_layers=4), head_tensors())
    params = [SamplingParams(max_tokens=20, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    wanted = texts_of(engine(recurrent, "plain"), PROMPTS, params)
    llm = engine(recurrent, "dflash", draft=str(tmp_path))
    assert texts_of(llm, PROMPTS, params) == wanted
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_samples_of_one_prompt_share_its_features(model, tmp_path):
    write(tmp_path, native_config(), head_tensors())
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3, n=4, ignore_eos=True)
    wanted = texts_of(engine(model, "plain", max_batch=4), PROMPTS, params)
    llm = engine(model, "dflash", draft=str(tmp_path), max_batch=4)
    assert texts_of(llm, PROMPTS, params) == wanted
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_late_samples_of_a_recurrent_target_prefill_the_prompt_again(tmp_path):
    """The first sample's state has moved on when another one ends and the third is admitted."""
    recurrent = hybrid("qwen3_5_text")
    layers = {"target_layer_ids": [0, 2, 3], "mask_token_id": MASK}
    write(tmp_path, native_config(dflash_config=layers, num_target_layers=4), head_tensors())
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4, n=6, ignore_eos=True, stop_token_ids=range(4))
    wanted = texts_of(engine(recurrent, "plain", max_batch=2), PROMPTS[:1], params)
    assert len({len(text) for text in wanted}) > 1
    llm = engine(recurrent, "dflash", draft=str(tmp_path), max_batch=2)
    assert texts_of(llm, PROMPTS[:1], params) == wanted
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_a_target_that_outgrows_its_original_window_keeps_its_drafts(tmp_path):
    """Longrope reads the whole text again with other frequencies, and reports the hidden states of all tokens."""
    sizes = {name: LAYER_CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    config = Phi3Config(
        **sizes, num_key_value_heads=2, num_hidden_layers=5, max_position_embeddings=64, original_max_position_embeddings=32,
        rope_parameters=rope | {"original_max_position_embeddings": 32, "factor": 2.0},
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    long = Phi3ForCausalLM(config).eval()
    write(tmp_path, native_config(), head_tensors())
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    prompts = [list(range(1, 21)), [5, 6, 7]]
    wanted = texts_of(engine(long, "plain", max_len=60), prompts, params)
    llm = engine(long, "dflash", draft=str(tmp_path), max_len=60)
    assert texts_of(llm, prompts, params) == wanted
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 30


def test_nan_from_a_head_only_loses_its_drafts(model, target, tmp_path):
    head = block_formats.load(write(tmp_path, native_config(), head_tensors()), target)
    head.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = texts_of(engine(model, "plain"), PROMPTS, params)
    llm = engine(model, "dflash", draft=head)
    assert texts_of(llm, PROMPTS, params) == wanted
    assert llm.stats.faults > 0 and llm.stats.num_drafts == 0


def test_nan_after_one_token_only_loses_the_drafts_of_that_request(model, target, tmp_path):
    head = block_formats.load(write(tmp_path, dspark_config(), head_tensors() | markov_tensors()), target)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    wanted = texts_of(engine(model, "plain"), PROMPTS, params)
    first = wanted[0][0]  # the first token after which drafts are made
    assert not any(first in text for text in wanted[1:])
    head.markov_head.markov_w1.weight[first] = float("nan")
    llm = engine(model, "dflash", 1, draft=head)
    assert texts_of(llm, PROMPTS, params) == wanted
    assert llm.stats.faults == 1 and llm.stats.num_drafts > 0
