"""For every architecture, a pass over the cache gives the logits of the model's own forward pass without a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gptj import modeling_gptj

from outrider import LLM
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.layer_span import WHOLE
from outrider.types import Context, OutriderError, SamplingParams

from .rounds import (
    OPERATORS,
    Rounds,
    force,
    force_padding,
    make_model,
    make_request,
    make_text,
    plain_logits,
    proposal_of,
    untouched,
    verdict_of,
)

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = ["sliding_attention", "full_attention"]
GEMMA_3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": SLIDING * 2,
    "sliding_window": 9,
    "intermediate_size": 48,
    "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 67,
    "laurel_rank": 8,
}
GEMMA_4 = {name: GEMMA_3N[name] for name in ("num_hidden_layers", "layer_types", "sliding_window", "num_kv_shared_layers")} | {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 67,
}
DECODER = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "scale_embedding": False,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
LONGCAT = LATENT | {
    "q_lora_rank": 16,
    "num_layers": 2,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 4,
}
LONGCAT |= {"zero_expert_num": 2, "moe_topk": 2, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 9, "layer_types": SLIDING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3},
    "gemma3_text": {"sliding_window": 9, "layer_types": SLIDING},
    "phi3": {"sliding_window": 9},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "phimoe": {"num_local_experts": 4, "sliding_window": 9},  # used in the mask, but not in attention
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.4, "logits_scaling": 3.0, "residual_multiplier": 0.7},
    "stablelm": {},
    "starcoder2": {"sliding_window": 9},
    "cohere2": {"sliding_window": 9, "layer_types": SLIDING},
    "deepseek_v3": LATENT | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    # attention sinks
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "layer_types": SLIDING},
    "granite_swa": {"sliding_window": 9, "layer_types": SLIDING},
    # key/value heads that the config does not name, or that differ by layer
    "jetmoe": {"kv_channels": 6, "num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mimo_v2_flash": EXPERTS
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "sliding_window": 9, "layer_types": SLIDING, "v_head_dim": 6},
    # layers that read other layers' keys and values, and different head sizes
    "gemma3n_text": GEMMA_3N,
    "gemma4_text": GEMMA_4,
    # attention in chunks, and positions computed by the layers
    "llama4_text": {
        "attention_chunk_size": 7,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
    # positions derived from the cache's length
    "bart": DECODER,
    "mbart": DECODER,
    "plbart": DECODER,
    "marian": DECODER | {"decoder_vocab_size": 67, "share_encoder_decoder_embeddings": True},
    "pegasus": DECODER,
    "blenderbot": DECODER,
    "blenderbot-small": DECODER,
    "whisper": DECODER | {"max_target_positions": 64},  # does not support logits_to_keep
    "longcat_flash": LONGCAT,  # its router multiplies by its own weight
}
OWN_ATTENTION: dict[str, dict[str, object]] = {kind: {} for kind in ("bloom", "diffllama", "doge", "falcon", "mpt")}
# Until transformers 5.24 its attention is its own.
GPT_J = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
(ARCHITECTURES if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS") else OWN_ATTENTION)["gptj"] = {**GPT_J}
LENGTHS = (3, 20, 37)


def small_config(model_type: str, **changes: object):
    default = AutoConfig.for_model(model_type)
    known = {**default.to_dict(), **getattr(default, "attribute_map", {})}
    shape = {name: value for name, value in SMALL.items() if name in known}
    return AutoConfig.for_model(model_type, **(shape | (ARCHITECTURES | OWN_ATTENTION).get(model_type, {}) | changes))


def start(model_type: str, lengths=LENGTHS, **config: object) -> Rounds:
    model = make_model(small_config(model_type))
    runner = ModelRunner.load(untouched(model), RunnerConfig(**({"compile": "never", "prefill_chunk": 16} | config)))
    return Rounds(runner, model, [make_text(length, seed) for seed, length in enumerate(lengths)])


@pytest.fixture(params=OPERATORS)
def operators(request, monkeypatch):
    force(request.param, monkeypatch)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_ragged_rounds_and_trees_equal_the_plain_forward(model_type, operators):
    rounds = start(model_type)
    drafts = [[5, 6, 7], [8], [9, 10]]
    rounds.step(drafts, [[0, 1, 2], [0], [0, 1]], [11, 12, 13])  # all accepted
    rounds.step(drafts, [[], [], []], [21, 22, 23])
    rounds.step([[], [], []], [[], [], []], [31, 32, 33])  # plain decoding
    trees = [[-1, -1, 0, 1, 1], [-1, 0, -1], []]
    rounds.step([[1, 2, 3, 4, 5], [6, 7, 8], []], [[1, 4], [2], []], [41, 42, 43], trees)
    rounds.step(drafts, [[0], [], [0]], [51, 52, 53])


@pytest.mark.parametrize("model_type", OWN_ATTENTION)
def test_models_with_their_own_attention_score_requests_one_by_one(model_type, operators):
    """Chains only, because their masks do not support trees."""
    rounds = start(model_type)
    assert rounds.runner.cache.shape.by_request
    assert not rounds.runner.supports_trees
    drafts = [[5, 6, 7], [8], [9, 10]]
    rounds.step(drafts, [[0, 1, 2], [0], [0, 1]], [11, 12, 13])  # all accepted
    rounds.step(drafts, [[], [], []], [21, 22, 23])
    rounds.step([[], [], []], [[], [], []], [31, 32, 33])  # plain decoding
    rounds.step(drafts, [[0], [], [0]], [51, 52, 53])


def test_padded_passes_have_one_shape_for_any_drafts(monkeypatch):
    force_padding(monkeypatch)
    rounds = start("llama")
    rounds.step([[5], [8], [9]], [[], [], []], [11, 12, 13])  # prefills the prompts
    shapes, run = [], rounds.runner.passes.run

    def spy(tokens, layout, layers, places, span=WHOLE):
        shapes.append((tokens.shape, layout.visible.shape, places.shape))
        return run(tokens, layout, layers, places, span)

    monkeypatch.setattr(rounds.runner.passes, "run", spy)
    for drafts in ([[5, 6, 7], [8], []], [[], [8, 9, 10], [9, 8]], [[1, 2, 3], [1, 2, 3], [1, 2, 3]]):
        rounds.step(drafts, [[], [], []], [21, 22, 23])
    assert shapes == [((1, 12), (3, 4, 4), (12,))] * 3


def test_sliding_windows_matter_in_these_tests():
    """The sequences are longer than the windows, so the plain forward pass without windows differs."""
    for model_type in ("mistral", "gemma2", "gemma3_text", "phi3", "starcoder2", "cohere2", "phimoe"):
        model, text = make_model(small_config(model_type)), make_text(37, 1)
        wide = make_model(small_config(model_type, sliding_window=64))
        assert (plain_logits(model, text)[-1] - plain_logits(wide, text)[-1]).abs().max() > 1e-2, model_type


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "gemma3_text"])
def test_scores_are_correct_up_to_the_last_position_of_the_context(model_type, operators):
    rounds = start(model_type, lengths=(58, 10, 1))
    rounds.step([[5, 6, 7, 8], [9], []], [[0, 1, 2, 3], [0], []], [10, 11, 12])  # 63 of 64 positions
    rounds.step([[5], [6, 7, 8, 9, 10, 11, 12, 13], []], [[], [0, 1, 2], []], [10, 11, 12])  # padding exceeds the context
    rounds.step([[], [6, 7, 8], [1, 2]], [[], [0, 1, 2], []], [10, 11, 12])


@pytest.mark.parametrize("chunk", [1, 5, 16, 256])
def test_prompts_prefilled_in_chunks_of_any_size_score_the_same(chunk):
    model = make_model(small_config("mistral"))
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never", prefill_chunk=chunk))
    rounds = Rounds(runner, model, [make_text(length, length) for length in (40, 17, 16, 18, 1)])
    rounds.step([[1, 2], [3], [], [4, 5, 6], [7]], [[0], [], [], [0, 1], [0]], [8, 9, 10, 11, 12])
    rounds.step([[1, 2], [3], [], [4, 5, 6], [7]], [[0], [], [], [0, 1], [0]], [8, 9, 10, 11, 12])


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("chunk", [5, 256])
def test_hidden_states_equal_transformers_for_the_whole_sequence(model_type, chunk):
    """Prompts prefilled in chunks or with drafts, later tokens, and drafts; from the embedding to the final norm."""
    model = make_model(small_config(model_type))
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never", prefill_chunk=chunk))
    layers = tuple(range(runner.num_layers + 1))
    rounds = Rounds(runner, model, [make_text(40, 1), make_text(3, 2), make_text(21, 3)])
    requests, read = rounds.requests, {layer: [[], [], []] for layer in layers}
    for chains in ([[1], [5, 6], []], [[7, 8, 9], [5, 6], [4]]):
        scores = runner.score(Context(tuple(requests), (3, 3, 3), None), proposal_of(chains), layers)
        for b, (request, chain) in enumerate(zip(requests, chains, strict=True)):
            wanted = model(torch.tensor([request.token_ids + chain]), output_hidden_states=True).hidden_states
            for layer in layers:
                rows, states = read[layer][b], scores.hidden[layer][b]
                torch.testing.assert_close(torch.cat([*rows, states]), wanted[layer][0], rtol=2e-4, atol=2e-4)
                rows.append(states[: len(states) - len(chain)])
        runner.commit(Context(tuple(requests), (3, 3, 3), None), verdict_of([[], [], []], [11, 12, 13]))
        for request, token in zip(requests, (11, 12, 13), strict=True):
            request.token_ids.append(token)


def test_a_hidden_state_that_the_model_lacks_is_rejected():
    runner = start("llama").runner
    with pytest.raises(OutriderError, match=r"has the hidden states 0 to \d+, not all of"):
        runner.score(Context((make_request("x", [1, 2]),), (0,), None), proposal_of([[]]), (runner.num_layers + 1,))


def longrope_model(**sizes: int):
    """Return a model that uses other frequencies for sequences of more than 32 tokens."""
    config = small_config("phi3", original_max_position_embeddings=32, sliding_window=None, **sizes)
    half = config.hidden_size // config.num_attention_heads // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [3.0 + 2 * index for index in range(half)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0} | factors
    config.rope_parameters = rope | {"original_max_position_embeddings": 32, "factor": 2.0}
    return make_model(config)


def test_longrope_keeps_its_original_window_unless_more_is_requested(operators):
    model = longrope_model()
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never", prefill_chunk=16))
    assert runner.max_len == 32
    rounds = Rounds(runner, model, [make_text(20, 0), make_text(28, 1)])
    rounds.step([[1, 2], [3]], [[0], [0]], [4, 5])
    rounds.step([[1], [2]], [[0], []], [4, 5])


def test_longrope_of_some_types_of_layers_keeps_the_original_window():
    """transformers chooses the frequencies of all requests by the longest one."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0, "original_max_position_embeddings": 32}
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    kinds["full_attention"] = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    model = make_model(small_config("olmo3", rope_parameters=kinds, layer_types=[*kinds]))
    assert ModelRunner.load(untouched(model), RunnerConfig(compile="never")).max_len == 32
    with pytest.raises(OutriderError, match=r"longrope for some types of layers .*: lower max_len=40 to 32"):
        ModelRunner.load(model, RunnerConfig(compile="never", max_len=40))


@pytest.mark.parametrize(("model_type", "name"), [("mpt", "max_seq_len"), ("whisper", "max_target_positions")])
def test_the_context_has_other_names_in_some_configs(model_type, name):
    model = make_model(small_config(model_type, **{name: 24}))
    llm = LLM(model, method="ngram", num_draft_tokens=4, compile="never")
    assert llm.runner.max_len == 24
    (output,) = llm.generate([make_text(18, 0)], SamplingParams(max_tokens=20, ignore_eos=True))[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (6, "length")


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_longrope_uses_each_requests_own_length(operators, prefix_cache):
    """transformers uses the longest sequence of the batch. A request that outgrows the original window is prefilled again."""
    model = longrope_model()
    config = RunnerConfig(compile="never", prefill_chunk=16, max_len=60, prefix_cache=prefix_cache)
    runner = ModelRunner.load(untouched(model), config)
    assert (runner.max_len, runner.borders) == (60, (32,))
    texts = [make_text(10, 0), make_text(40, 1), make_text(30, 2)]
    rounds = Rounds(runner, model, texts)
    rounds.step([[1, 2], [3], [5, 6]], [[0], [0], [0]], [4, 5, 7])  # the third reaches the limit
    rounds.step([[1, 2], [3], []], [[], [0], []], [4, 5, 7])
    rounds.step([[1, 2], [3], [8, 9]], [[], [], [0]], [4, 5, 7])  # and exceeds it
    runner.retire([request.request_id for request in rounds.requests])
    again = Rounds(runner, model, [make_text(40, 1)[:31], make_text(40, 1), make_text(30, 2)])  # rows change kind
    for request, name in zip(again.requests, "abc", strict=True):
        request.request_id = name
    again.step([[1], [3], [5, 6]], [[0], [0], [0]], [4, 5, 7])


@pytest.mark.parametrize("prompt", [20, 31, 32, 33])
def test_longrope_output_equals_the_models_own_across_the_limit_for_any_drafts(prompt):
    model, text = longrope_model(), make_text(prompt, 3)
    wanted = list(text)
    for _ in range(20):
        wanted.append(int(plain_logits(model, wanted)[-1].argmax()))
    options = {"compile": "never", "max_len": 60, "num_draft_tokens": 3}
    for drafting in ({"draft": untouched(model)}, {"method": "early-exit"}, {"method": "plain"}):
        llm = LLM(untouched(model), **options, **drafting)
        found = llm.generate([text], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))[0].outputs[0]
        assert text + list(found.token_ids) == wanted
