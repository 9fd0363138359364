"""The supported architectures of llama.cpp, by its names."""

from __future__ import annotations

from typing import Any

from outrider.runner.gguf import changes, configs, configs_gemma
from outrider.runner.gguf.architecture import Architecture
from outrider.runner.gguf.configs import SIGMOID, SOFTMAX, expert_entries


def _experts_at(module: str) -> dict[str, str]:
    """Return the names of a layer's experts, which are in this module of the layer."""
    return {
        r"ffn_(?:gate|up)_exps\.weight": f"{module}.gate_up_proj",
        r"ffn_down_exps\.weight": f"{module}.down_proj",
    }


def _bias_at(name: str) -> dict[str, str]:
    """Return the name of the bias that a layer's router adds to choose experts."""
    return {r"exp_probs_b\.bias": name}


SHARED_WIDTH = "expert_shared_feed_forward_length"  # ignored where other entries determine it
WINDOW = {"sliding_window": "attention.sliding_window"}
EXPERTS = expert_entries("num_experts", "moe_intermediate_size")
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": SHARED_WIDTH}
EXPERT_GROUPS = {
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}
DEEPSEEK_EXPERTS: dict[str, Any] = {  # also of other models: routed ones in groups, shared ones, first layers without
    "entries": expert_entries("n_routed_experts", "moe_intermediate_size"),
    "defaults": EXPERT_GROUPS | {"n_shared_experts": ("expert_shared_count", 0)},
}
NORMALISED = {"norm_topk_prob": True}  # the shares of the chosen experts add up to 1
Q_BIAS = "blk.0.attn_q.bias"
BIAS = {"attention_bias": Q_BIAS}
BIASES = BIAS | {"mlp_bias": "blk.0.ffn_up.bias"}
NORMS = {"use_qk_norm": "blk.0.attn_q_norm.weight"}
NORM_EPS = {"layer_norm_eps": "attention.layer_norm_epsilon"}
QWEN35: dict[str, Any] = {
    "theta": 1e7,
    "scalings": (),
    "renamed": {r"ssm_dt\.bias": "linear_attn.dt_bias"},
    "restore": changes.restore_qwen35,
    "input_order": changes.inputs_of_qwen35,
}
DEEPSEEK_BIAS = _bias_at("mlp.gate.e_score_correction_bias")
DEEPSEEK: dict[str, Any] = {
    "renamed": DEEPSEEK_BIAS | {r"attn_[kv]_b\.weight": "self_attn.kv_b_proj.weight"},
    "joined": r"attn_[kv]_b\.weight",
    "none_if_missing": ("q_lora_rank",),
    "decoded": r"attn_[kv]_b\.weight",
    "shape_of": changes.shape_of_deepseek,
    "restore": changes.restore_deepseek,
    **DEEPSEEK_EXPERTS,
}
DEEPSEEK_V2 = Architecture("deepseek_v2", configs.deepseek_v2, router=SOFTMAX, **DEEPSEEK)
OLMO3 = Architecture("olmo3", configs.olmo3, theta=5e5)
MIXTRAL = Architecture("mixtral", entries=expert_entries("num_local_experts"), changes_like="llama")
GRANITE: dict[str, Any] = {
    "entries": {"attention_multiplier": "attention.scale"},
    "defaults": {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    },
    "changes_like": "llama",
}
GRANITE_EXPERTS = {
    r"ffn_gate_inp\.weight": "block_sparse_moe.router.weight",
    **_experts_at("block_sparse_moe.experts"),
}
GRANITE_HYBRID = {
    r"ffn_(?:gate|up)(?:_shexp)?\.weight": "shared_mlp.input_linear.weight",
    r"ffn_down(?:_shexp)?\.weight": "shared_mlp.output_linear.weight",
    r"ssm_dt\.bias": "mamba.dt_bias",
}
NEMOTRON_EXPERTS = DEEPSEEK_EXPERTS["entries"] | {"moe_shared_expert_intermediate_size": SHARED_WIDTH}
NEMOTRON_H: dict[str, Any] = {
    "has_gates": False,
    "restore": changes.restore_mamba2,
    "renamed": {
        r"ssm_dt\.bias": "mixer.dt_bias",
        r"ssm_a": "mixer.A_log",
        r"ssm_d": "mixer.D",
        r"ssm_(conv1d|norm)(\.weight|\.bias)": r"mixer.\1\2",
        r"ssm_(in|out)(\.weight)": r"mixer.\1_proj\2",
        r"attn_([qkv])(\.weight)": r"mixer.\1_proj\2",
        r"attn_output(\.weight)": r"mixer.o_proj\1",
        r"ffn_gate_inp(\.weight)": r"mixer.gate\1",
        r"exp_probs_b\.bias": "mixer.gate.e_score_correction_bias",
        r"ffn_(up|down)(\.weight)": r"mixer.\1_proj\2",
        r"ffn_(up|down)_exps\.weight": r"mixer.experts.\1_proj",
        r"ffn_(up|down)_shexp(\.weight)": r"mixer.shared_experts.\1_proj\2",
        r"ffn_latent_down(\.weight)": r"mixer.fc1_latent_proj\1",
        r"ffn_latent_up(\.weight)": r"mixer.fc2_latent_proj\1",
    },
}
COHERE: dict[str, Any] = {
    "theta": 1e4,
    "flags": BIAS | NORMS,
    "entries": NORM_EPS,
    "defaults": {"logit_scale": ("logit_scale", 1.0)},
}
FALCON_FACTORS = dict.fromkeys(("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"), 1.0)
FALCON_H1: dict[str, Any] = {  # Files hold products of weights and factors. Embeddings and output head have different factors.
    "fixed": {f"{name}_multiplier": factor for name, factor in FALCON_FACTORS.items()}
    | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5, "tie_word_embeddings": False},
    "flags": {"mamba_rms_norm": "blk.0.ssm_norm.weight"},
    "constants": {"mamba_norm_before_gate": False},
    "renamed": {r"ssm_dt\.bias": "mamba.dt_bias", r"ffn_norm": "pre_ff_layernorm.weight"},
    "restore": changes.restore_mamba2,
}
ONLY_IMAGES = r"n_deepstack_layers|rope\.dimension_sections"  # entries about features and positions of images

ARCHITECTURES = {
    "llama": Architecture("llama", flags=BIASES, variant=lambda entry, _: MIXTRAL if entry("expert_count") else None),
    "qwen2": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2", ignored=ONLY_IMAGES),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", entries=EXPERTS, constants=NORMALISED),
    "qwen3vl": Architecture("qwen3", ignored=ONLY_IMAGES),
    "qwen3vlmoe": Architecture("qwen3_moe", entries=EXPERTS, constants=NORMALISED, ignored=ONLY_IMAGES),
    "qwen2moe": Architecture("qwen2_moe", entries=SHARED_EXPERT, flags={"qkv_bias": Q_BIAS}),
    "qwen3next": Architecture(
        "qwen3_next",
        configs.add_delta,
        entries=SHARED_EXPERT,
        constants=NORMALISED,
        theta=1e7,
        scalings=(),
        renamed={
            r"ssm_dt\.bias": "linear_attn.dt_bias",
            r"attn_(?:qkv|gate)\.weight": "linear_attn.in_proj_qkvz.weight",
        },
        joined=r"attn_(qkv|gate)\.weight",
        row_order=changes.rows_of_qwen3next,
        shape_of=changes.shape_of_qwen3next,
        restore=changes.restore_qwen3next,
    ),
    "qwen35": Architecture("qwen3_5_text", configs.qwen35, **QWEN35),
    "qwen35moe": Architecture("qwen3_5_moe_text", configs.qwen35, entries=SHARED_EXPERT, **QWEN35),
    "gemma": Architecture("gemma", changes_like="gemma2"),
    "gemma2": Architecture("gemma2", configs_gemma.gemma2),
    "gemma3": Architecture("gemma3_text", configs_gemma.gemma3, theta=1e6),
    "gemma3n": Architecture(
        "gemma3n_text",
        configs_gemma.gemma3n,
        theta=1e6,
        scalings=(),
        stacked=("altup_proj.weight", "altup_unembd_proj.weight"),
        renamed={
            r"altup_proj\.(\d+)\.weight": r"altup_projections.\1.weight",
            r"altup_unembd_proj\.(\d+)\.weight": r"altup_unembed_projections.\1.weight",
        },
        is_unused=changes.is_unused_in_shared_layers,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        configs_gemma.gemma4,
        scalings=(),
        renamed={
            r"ffn_gate_inp\.scale": "router.scale",
            r"ffn_down_exps\.scale": "router.per_expert_scale",
        },
        is_unused=changes.is_unused_in_shared_layers,
    ),
    "phi2": Architecture("phi", configs.partial_rotary, theta=1e4, entries=NORM_EPS, scalings=()),
    "phi3": Architecture(
        "phi3", configs.phi3, theta=1e4, config_tensors=tuple(configs.PHI3_FACTORS.values()), scalings=("longrope",)
    ),
    "mistral3": Architecture("ministral3", configs.mistral3, theta=1e4, changes_like="llama"),
    "granite": Architecture("granite", configs.granite, flags=BIASES, ignored=r"ssm\..*|expert_used_count", **GRANITE),
    "granitemoe": Architecture(
        "granitemoe",
        renamed=GRANITE_EXPERTS,
        **GRANITE | {"entries": GRANITE["entries"] | expert_entries("num_local_experts")},
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        configs.granitehybrid,
        renamed=GRANITE_EXPERTS | GRANITE_HYBRID,
        joined=r"ffn_(gate|up)(_shexp)?\.weight",
        restore=changes.restore_mamba2,
        **GRANITE,
    ),
    "smollm3": Architecture("smollm3", changes_like="llama"),
    "olmo2": Architecture("olmo2", variant=lambda entry, _: OLMO3 if entry("attention.sliding_window") else None),
    "olmoe": Architecture("olmoe", entries=expert_entries("num_experts")),
    "exaone4": Architecture("exaone4", configs.exaone4, none_if_missing=("sliding_window",)),
    "seed_oss": Architecture("seed_oss", flags=BIAS | {"attention_out_bias": "blk.0.attn_output.bias"}),
    "glm4": Architecture("glm4", configs.partial_rotary, theta=1e4, flags=BIAS),
    "glm4moe": Architecture(
        "glm4_moe",
        configs.partial_rotary,
        router=SIGMOID,
        theta=1e4,
        flags=BIAS | NORMS,
        renamed=DEEPSEEK_BIAS,
        **DEEPSEEK_EXPERTS,
    ),
    "command-r": Architecture("cohere", **COHERE),
    "cohere2": Architecture("cohere2", configs.cohere2, **COHERE | {"entries": NORM_EPS | WINDOW}),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", flags=BIAS),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe", configs.hunyuan_moe, flags=BIAS, entries=expert_entries("num_experts", chosen="moe_topk")
    ),
    "arcee": Architecture("arcee", changes_like="llama"),
    "afmoe": Architecture(
        "afmoe",
        configs.afmoe,
        router=SIGMOID,
        renamed=_bias_at("mlp.expert_bias"),
        entries=EXPERTS | WINDOW,
        defaults={
            "num_shared_experts": ("expert_shared_count", 0),
            "num_dense_layers": ("leading_dense_block_count", 0),
            "route_scale": ("expert_weights_scale", 1.0),
        },
        constants={"mup_enabled": True},
    ),
    "starcoder2": Architecture("starcoder2", theta=1e4, flags={"use_bias": Q_BIAS}, scalings=()),
    "apertus": Architecture(
        "apertus",
        theta=1.2e7,  # the config class defaults to Llama 3's factors
        flags=BIAS,
        layer_entries=tuple(f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")),
        renamed={r"xielu\.(\w+)": r"mlp.act_fn.\1"},
    ),
    "phimoe": Architecture(
        "phimoe",
        configs.phimoe,
        entries=expert_entries("num_local_experts"),
        theta=1e4,
        flags=BIAS | {"lm_head_bias": "output.bias"},
        config_tensors=tuple(configs.PHI3_FACTORS.values()),
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        configs.exaone4,
        router=SIGMOID,
        renamed=DEEPSEEK_BIAS,
        ignored=SHARED_WIDTH,
        entries=EXPERTS | {"num_shared_experts": "expert_shared_count"},
        defaults=EXPERT_GROUPS,
    ),
    "jais2": Architecture("jais2", flags=BIASES, entries=NORM_EPS),
    "dots1": Architecture("dots1", router=SIGMOID, renamed=DEEPSEEK_BIAS, **DEEPSEEK_EXPERTS),
    "falcon-h1": Architecture("falcon_h1", configs.falcon_h1, **FALCON_H1),
    "deepseek2": Architecture(
        "deepseek_v3",
        configs.deepseek_v3,
        router=SIGMOID,
        variant=lambda *file: None if configs.has_sigmoids(*file) else DEEPSEEK_V2,
        **DEEPSEEK,
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        entries=expert_entries("moe_num_experts", "moe_intermediate_size", "moe_k"),
        defaults={
            "moe_num_shared_experts": ("expert_shared_count", 0),
            "moe_layer_interval": ("interleave_moe_layer_step", 1),
            "moe_layer_start_index": ("leading_dense_block_count", 0),
        },
        renamed=_bias_at("mlp.gate.moe_statics.e_score_correction_bias"),
        ignored=SHARED_WIDTH,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        configs.partial_rotary,
        entries=expert_entries("num_local_experts", "intermediate_size"),
        router=SIGMOID,
        theta=1e4,
        renamed=_bias_at("mlp.e_score_correction_bias"),
    ),
    "lfm2": Architecture("lfm2", configs.lfm2, theta=1e6, scalings=()),
    "lfm2moe": Architecture(
        "lfm2_moe",
        configs.lfm2moe,
        entries=EXPERTS,
        defaults={"num_dense_layers": ("leading_dense_block_count", 0)},
        constants=NORMALISED | {"routed_scaling_factor": 1.0},
        router=SIGMOID,
        theta=1e6,
        scalings=(),
        changes_like="lfm2",
        renamed=_bias_at("feed_forward.expert_bias") | _experts_at("feed_forward.experts"),
    ),
    "nemotron": Architecture(
        "nemotron", configs.partial_rotary, theta=1e4, entries={"norm_eps": "attention.layer_norm_epsilon"}
    ),
    "stablelm": Architecture(
        "stablelm",
        configs.stablelm,
        theta=1e4,
        flags={"use_qkv_bias": Q_BIAS},
        ignored="use_parallel_residual",
        scalings=(),
    ),
    "nemotron_h": Architecture("nemotron_h", configs.nemotron_h, **NEMOTRON_H),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        configs.nemotron_h,
        router=SIGMOID,
        **NEMOTRON_H | DEEPSEEK_EXPERTS | {"entries": NEMOTRON_EXPERTS},
    ),
    "gpt-oss": Architecture(
        "gpt_oss", configs.gpt_oss, theta=1.5e5, entries=expert_entries("num_local_experts", "intermediate_size") | WINDOW
    ),
}
