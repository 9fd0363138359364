"""Tiny configs of the architectures that GGUF files may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Jais2Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
}
RECURRENT = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 8.0, "original_max_position_embeddings": 32}
HALF = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts_per_tok": 2}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GRANITE = {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
CONFIGS: Mapping[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaConfig(**SHAPE | {"head_dim": 64, "rope_theta": 5e5} | more),
    "qwen2": lambda **more: Qwen2Config(**SHAPE | {"rope_theta": 2e4} | more),
    "qwen3": lambda **more: Qwen3Config(**SHAPE | {"head_dim": 64, "rope_theta": 1e6} | more),
    "gemma2": lambda **more: Gemma2Config(
        **SHAPE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "attn_logit_softcapping": 20.0} | more
    ),
    "gemma3": lambda **more: Gemma3TextConfig(
        **SHAPE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "num_hidden_layers": 6} | more
    ),
    "gemma3n": lambda **more: Gemma3nTextConfig(
        **SHAPE
        | {"head_dim": 64, "sliding_window": 8, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "laurel_rank": 256}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "rms_norm_eps": 1e-3}
        | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": SHAPE["vocab_size"], "altup_active_idx": 1}
        | {"activation_sparsity_pattern": [0.95, 0.8] + [0.0] * 4, "final_logit_softcapping": 20.0}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        }
        | more
    ),
    "gemma4": lambda **more: Gemma4TextConfig(
        **SHAPE
        | {"head_dim": 64, "global_head_dim": 128, "sliding_window": 8, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": SHAPE["vocab_size"]}
        | more
    ),
    "gemma4 with experts": lambda **more: CONFIGS["gemma4"](
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256} | more
    ),
    "phi3": lambda **more: Phi3Config(
        **SHAPE | {"pad_token_id": 0, "sliding_window": 8, "partial_rotary_factor": 0.75, "rope_theta": 2e4} | more
    ),
    "qwen3moe": lambda **more: Qwen3MoeConfig(
        **SHAPE
        | {"head_dim": 64, "rope_theta": 1e6, "norm_topk_prob": True}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        | more
    ),
    "qwen35": lambda **more: Qwen3_5TextConfig(**SHAPE | RECURRENT | more),
    "qwen35moe": lambda **more: Qwen3_5MoeTextConfig(
        **SHAPE
        | RECURRENT
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
        | more
    ),
    "qwen3next": lambda **more: Qwen3NextConfig(
        **SHAPE
        | RECURRENT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
        | {"norm_topk_prob": True}
        | more
    ),
    "mistral3": lambda **more: Ministral3Config(
        **SHAPE
        | {"head_dim": 64}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.125}}
        | more
    ),
    "granite": lambda **more: GraniteConfig(
        **SHAPE
        | {"rope_theta": 2e4, "attention_multiplier": 0.1, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.5, "logits_scaling": 2.0}
        | more
    ),
    "smollm3": lambda **more: SmolLM3Config(**SHAPE | {"pad_token_id": 0, "num_hidden_layers": 4, "rope_theta": 2e4} | more),
    "olmo2": lambda **more: Olmo2Config(**SHAPE | {"pad_token_id": 0, "rope_theta": 2e4} | more),
    "olmo3": lambda **more: Olmo3Config(
        **SHAPE
        | {"pad_token_id": 0, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        }
        | more
    ),
    "lfm2": lambda **more: Lfm2Config(
        **SHAPE
        | {"pad_token_id": 0, "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
        | {"layer_types": ["conv", "full_attention", "conv"], "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
        | more
    ),
    "gpt-oss": lambda **more: GptOssConfig(
        **SHAPE
        | {"head_dim": 64, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}}
        | more
    ),
    "mixtral": lambda **more: MixtralConfig(**SHAPE | EXPERTS | {"num_local_experts": 4, "rope_theta": 2e4} | more),
    "granitemoe": lambda **more: GraniteMoeConfig(
        **SHAPE | EXPERTS | GRANITE | {"pad_token_id": 0, "num_local_experts": 4, "rope_theta": 2e4} | more
    ),
    "granitehybrid": lambda **more: GraniteMoeHybridConfig(
        **SHAPE
        | EXPERTS
        | GRANITE
        | {"num_local_experts": 4, "shared_intermediate_size": 256, "position_embedding_type": "nope", "pad_token_id": 0}
        | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64}
        | more
    ),
    "exaone4": lambda **more: Exaone4Config(
        **SHAPE
        | {"head_dim": 64, "sliding_window": 8, "pad_token_id": 0, "rope_theta": 2e4}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | more
    ),
    "seed_oss": lambda **more: SeedOssConfig(**SHAPE | {"head_dim": 64, "pad_token_id": 0, "rope_theta": 2e4} | more),
    "glm4": lambda **more: Glm4Config(
        **SHAPE | {"head_dim": 64, "attention_bias": True, "pad_token_id": 0, "rope_parameters": HALF} | more
    ),
    "glm4moe": lambda **more: Glm4MoeConfig(
        **SHAPE
        | EXPERTS
        | DEEPSEEK_EXPERTS
        | {"head_dim": 64, "attention_bias": True, "use_qk_norm": True, "rope_parameters": HALF}
        | more
    ),
    "deepseek2": lambda **more: DeepseekV3Config(
        **SHAPE
        | EXPERTS
        | DEEPSEEK_EXPERTS
        | LATENT
        | {"n_group": 2, "topk_group": 1, "q_lora_rank": 256, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
        | more
    ),
    "deepseek2 with softmax": lambda **more: DeepseekV2Config(
        **SHAPE
        | EXPERTS
        | DEEPSEEK_EXPERTS
        | LATENT
        | {"norm_topk_prob": False, "q_lora_rank": None, "topk_method": "greedy", "rope_theta": 2e4}
        | more
    ),
    "ernie4_5": lambda **more: Ernie4_5Config(**SHAPE | {"head_dim": 64, "pad_token_id": 0, "rope_theta": 2e4} | more),
    "ernie4_5-moe": lambda **more: Ernie4_5_MoeConfig(
        **SHAPE
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 256, "moe_num_shared_experts": 2}
        | {"pad_token_id": 0, "moe_layer_end_index": 1, "rope_theta": 2e4}
        | more
    ),
    "minimax-m2": lambda **more: MiniMaxM2Config(
        **SHAPE | EXPERTS | {"head_dim": 64, "num_local_experts": 4, "rope_parameters": HALF} | more
    ),
    "nemotron_h": lambda **more: CONFIGS["nemotron_h_moe"](
        layer_types=["linear_attention", "mlp", "full_attention", "mlp"],
        num_experts_per_tok=0,
        n_routed_experts=0,
        **more,
    ),
    "nemotron_h_moe": lambda **more: NemotronHConfig(
        **{name: value for name, value in SHAPE.items() if name != "num_hidden_layers"}
        | EXPERTS
        | {
            "n_routed_experts": 4,
            "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 512,
            "n_shared_experts": 1,
        }
        | {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "moe_latent_size": 256, "head_dim": 64, "pad_token_id": 0}
        | {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 16}
        | {"layer_types": ["linear_attention", "moe", "full_attention", "moe"]}
        | more
    ),
    "lfm2moe": lambda **more: Lfm2MoeConfig(
        **SHAPE
        | EXPERTS
        | {"pad_token_id": 0, "num_hidden_layers": 3, "num_experts": 4, "moe_intermediate_size": 256, "num_dense_layers": 1}
        | {"layer_types": ["conv", "full_attention", "conv"], "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
        | more
    ),
    "gemma": lambda **more: GemmaConfig(**SHAPE | {"head_dim": 64, "rms_norm_eps": 0.1} | more),
    "hunyuan-dense": lambda **more: HunYuanDenseV1Config(
        **SHAPE | {"head_dim": 64, "pad_token_id": 0, "rope_theta": 2e4} | more
    ),
    "hunyuan-moe": lambda **more: HunYuanMoEV1Config(
        **SHAPE | {"head_dim": 64, "pad_token_id": 0, "rope_theta": 2e4, "num_experts": 4, "moe_topk": 2} | more
    ),
    "command-r": lambda **more: CohereConfig(
        **SHAPE | {"pad_token_id": 0, "logit_scale": 0.25, "layer_norm_eps": 1e-3, "rope_theta": 2e4} | more
    ),
    "cohere2": lambda **more: Cohere2Config(
        **SHAPE
        | {"pad_token_id": 0, "logit_scale": 0.25, "layer_norm_eps": 1e-3, "rope_theta": 2e4}
        | {"num_hidden_layers": 5, "sliding_window": 8}
        | more
    ),
    "starcoder2": lambda **more: Starcoder2Config(
        **SHAPE | {"norm_epsilon": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}} | more
    ),
    "nemotron": lambda **more: NemotronConfig(
        **SHAPE | {"head_dim": 64, "norm_eps": 1e-3, "pad_token_id": 0, "rope_parameters": HALF} | more
    ),
    "stablelm": lambda **more: StableLmConfig(
        **SHAPE | {"layer_norm_eps": 1e-3, "use_qkv_bias": True, "rope_parameters": HALF | {"rope_theta": 1e4}} | more
    ),
    "phi2": lambda **more: PhiConfig(**SHAPE | {"layer_norm_eps": 1e-3, "rope_parameters": HALF | {"rope_theta": 1e4}} | more),
    "apertus": lambda **more: ApertusConfig(
        **SHAPE | {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}} | more
    ),
    "phimoe": lambda **more: PhimoeConfig(
        **SHAPE | EXPERTS | {"num_local_experts": 4, "rope_theta": 2e4, "attention_bias": True, "lm_head_bias": True} | more
    ),
    "jais2": lambda **more: Jais2Config(**SHAPE | {"head_dim": 64, "rope_theta": 2e4, "layer_norm_eps": 1e-3} | more),
    "exaone-moe": lambda **more: ExaoneMoeConfig(
        **SHAPE
        | EXPERTS
        | {"head_dim": 64, "rope_theta": 2e4, "num_hidden_layers": 5, "sliding_window": 8, "pad_token_id": 0}
        | {"num_experts": 4, "moe_intermediate_size": 256, "num_shared_experts": 2, "routed_scaling_factor": 2.5}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | more
    ),
    "arcee": lambda **more: ArceeConfig(**SHAPE | {"head_dim": 64, "rope_theta": 2e4} | more),
    "olmoe": lambda **more: OlmoeConfig(**SHAPE | EXPERTS | {"pad_token_id": 0, "num_experts": 4, "rope_theta": 2e4} | more),
    "qwen2moe": lambda **more: Qwen2MoeConfig(
        **SHAPE
        | EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "rope_theta": 2e4}
        | more
    ),
    "dots1": lambda **more: Dots1Config(
        **SHAPE | EXPERTS | DEEPSEEK_EXPERTS | {"head_dim": 64, "rope_theta": 2e4, "n_group": 2, "topk_group": 1} | more
    ),
    "afmoe": lambda **more: AfmoeConfig(
        **SHAPE
        | EXPERTS
        | {"head_dim": 64, "rope_theta": 2e4, "num_hidden_layers": 5, "sliding_window": 8, "mup_enabled": True}
        | {"num_experts": 4, "moe_intermediate_size": 256, "num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 2.5}
        | more
    ),
    "falcon-h1": lambda **more: FalconH1Config(
        **SHAPE
        | {"head_dim": 64, "pad_token_id": 0, "rope_theta": 2e4, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_state": 64, "mamba_n_groups": 2, "mamba_chunk_size": 16}
        | more
    ),
}
ARCHITECTURES = {  # llama.cpp's names where they differ
    "exaone_moe": "exaone-moe",
    "cohere": "command-r",
    "falcon_h1": "falcon-h1",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ministral3": "mistral3",
    "gpt_oss": "gpt-oss",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen3_next": "qwen3next",
}
