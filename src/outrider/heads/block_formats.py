"""Block drafters on disk: z-lab's DFlash and DFlash 2, DeepSeek's DSpark, and speculators' layouts of these.

z-lab's and DeepSeek's layouts are also written.

Layers of the target are numbered in two ways. ``target_layer_ids`` counts layers from 0 and refers to their outputs, which is
one less than in transformers' ``hidden_states``. speculators' ``aux_hidden_state_layer_ids`` follows ``hidden_states``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Qwen3Config

from outrider.heads.block import BlockHead, BlockShape
from outrider.heads.checkpoint import LAYER_KEYS, HeadFiles, TargetSizes, write_folder, written_layers
from outrider.heads.copied_tables import drop_copied_table
from outrider.runner.checkpoint_files import check_sizes
from outrider.types import OutriderError, dtype_name

# A confidence head estimates how many drafts to verify. Here the policy does, from measured acceptance.
IGNORED = (r"^t2d$", r"^verifier_", r"rotary_emb\.", r"^confidence_head\.")
MAPPINGS = ("d2t", "t2d")  # between the target's vocabulary and a reduced one
SECTIONS = ("transformer_layer_config", "dflash_config", "outrider")  # nested configs
SPECULATORS = ("dflash", "dspark", "dflash2")
CONVOLUTIONS = {"conv_kernel_size": "conv_taps", "conv_group_size": "conv_group"}  # DFlash 2's keys -> fields of a shape
SELECTOR = {"selector_rank": "selector_rank", "selector_top_k": "num_candidates"}
UNSUPPORTED = {  # tensor names -> feature
    r"^(prefix_gru|gru|embed_proj|domino)\b": "Domino's correction by a recurrent network",
    r"^fusion_(weights|norms)\b": "DFlare's fusion by layer",
    r"^markov_head\.gate_proj\.": "a gated Markov head",
    r"^markov_head\.joint_proj\.": "a recurrent Markov head",
}


def load(source: str | Path | HeadFiles, target: TargetSizes, model: PreTrainedModel | None = None) -> BlockHead:
    """Read a head for this target, in float32. ``model``: the target, whose tables replace stored copies of them.

    Raises ``OutriderError`` naming the tensor that is missing or does not fit, or the feature that is not supported.
    """
    files = HeadFiles.read(source)
    files.rename(_own_name)
    config, tensors = files.config, files.tensors
    _check_kind(files)
    _check_weights(files)
    layer: dict[str, Any] = config.get("transformer_layer_config") or config
    check_sizes(f"{files.source}/config.json", layer)
    if model is not None:
        drop_copied_table(tensors, "embed_tokens.weight", model.get_input_embeddings())
        if "d2t" not in tensors:
            drop_copied_table(tensors, "lm_head.weight", model.get_output_embeddings())
    shape = _shape(files, layer, target)
    head = files.build(lambda: BlockHead(shape))
    files.offsets_to_ids()
    files.fill(head, IGNORED, lambda name: "d2t" if name == "draft_ids" else name)
    head.check_fit(target)
    return head


def _own_name(name: str) -> str:
    """Return the head's name of a tensor: some writers add a prefix, or store the selector's tables as embeddings."""
    return re.sub(r"_codebook\.weight$", "_codebook", re.sub(r"^(model|draft_model)\.", "", name))


def _check_kind(files: HeadFiles) -> None:
    """Raise ``OutriderError`` for other heads, and for features that are not supported."""
    files.check_sections(SECTIONS)
    config, source = files.config, files.source
    found = next(((name, what) for mark, what in UNSUPPORTED.items() for name in files.tensors if re.search(mark, name)), None)
    if found is not None:
        raise OutriderError(
            f"{source} needs {found[1]} ({found[0]}), which is not supported: use a DFlash, DFlash 2 or DSpark head"
        )
    files.check_speculators(SPECULATORS)
    settings = {**config, **(config.get("dflash_config") or {})}
    for key, wanted in (("projector_type", "dflash"), ("markov_head_type", "vanilla"), ("input_embedding_scale", 1)):
        if settings.get(key) not in (None, wanted):
            raise OutriderError(f"{source} has {key} {settings[key]!r}, which is not supported: expected {wanted!r}")


def _check_weights(files: HeadFiles) -> None:
    """Raise ``OutriderError`` if tensors that determine sizes are missing, have a wrong shape, or are quantised."""
    dims = {"fc.weight": 2, "hidden_norm.weight": 1, "layers.0.self_attn.q_norm.weight": 1}
    missing = next((name for name in dims if name not in files.tensors), None)
    if missing is not None:
        raise OutriderError(f"{files.source} is not a block drafter: {missing} is missing")
    files.check_dims(dims)
    files.refuse_quantised(MAPPINGS)


def _shape(files: HeadFiles, layer: Mapping[str, Any], target: TargetSizes) -> BlockShape:
    config, tensors, source = files.config, files.tensors, files.source
    own = _layers(files, layer, target.vocab_size)
    inner = config.get("dflash_config") or {}
    default = partial(default_hidden_states, target.num_layers, own.num_hidden_layers)
    width, ids = files.features(own.hidden_size, stated_layers(config), default)
    markov, output = tensors.get("markov_head.markov_w1.weight"), tensors.get("lm_head.weight")
    size = files.draft_size(files.integer(config, "draft_vocab_size", default=own.vocab_size), target.vocab_size)
    settings = {key: value for part in (config, inner) for key, value in part.items() if value is not None}
    shape = BlockShape(
        own,
        width,
        ids,
        files.integer(settings, "block_size"),
        files.integer({"mask_token_id": config.get("dspark_noise_token_id"), **settings}, "mask_token_id", 0),
        size,
        _windows(files, layer, own.num_hidden_layers),
        causal_windows=_causal_windows(files, layer),
        predicts_next=bool(config.get("sample_from_anchor", markov is not None)),
        markov_rank=0 if markov is None else markov.shape[-1],
        reduced="d2t" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        own_output=output is not None,
        output_scale=_factor(files, settings, "output_multiplier", 1.0),
        softcap=_factor(files, settings, "final_logit_softcapping", 0.0),
        **_dflash2_fields(files, settings, own.hidden_size, size),
    )
    if shape.max_drafts < 1:
        raise OutriderError(f"{source}: block_size {shape.block_size} leaves no token to draft")
    return shape


def stated_layers(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the hidden states that a config lists, and the layers, counted from 0, whose outputs it lists; None if absent."""
    inner = config.get("dflash_config") or {}
    return config.get("aux_hidden_state_layer_ids"), inner.get("target_layer_ids") or config.get("target_layer_ids")


def _dflash2_fields(files: HeadFiles, settings: Mapping[str, Any], hidden_size: int, num_tokens: int) -> dict[str, int]:
    """Return the fields of a shape that describe DFlash 2's convolutions and path selector, if the head has them."""
    tensors, source = files.tensors, files.source
    found: dict[str, int] = {}
    for part, mark, fields in (
        ("short convolutions", "_conv.", CONVOLUTIONS),
        ("path selector", "candidate_selector.", SELECTOR),
    ):
        name = next((name for name in tensors if mark in name), None)
        missing = [key for key in fields if not settings.get(key)]
        if name is not None and missing:
            raise OutriderError(f"{source} has DFlash 2's {part} ({name}), but config.json lacks {' and '.join(missing)}")
        if settings.get(next(iter(fields))):
            found |= {field: files.integer(settings, key) for key, field in fields.items()}
    if hidden_size % found.get("conv_group", 1):
        raise OutriderError(
            f"{source}: config.json says conv_group_size={found['conv_group']}: expected a divisor of {hidden_size}"
        )
    if found.get("num_candidates", 0) > num_tokens:
        raise OutriderError(
            f"{source}: config.json says selector_top_k={found['num_candidates']}: expected at most {num_tokens}"
        )
    other = next((name for name in tensors if name == "d2t" or name.startswith("markov_head.")), None)
    if "selector_rank" in found and other is not None:
        raise OutriderError(f"{source} has a path selector and {other}, which is not supported together")
    return found


def _causal_windows(files: HeadFiles, layer: Mapping[str, Any]) -> bool:
    """Return whether the block's tokens attend only to earlier ones in layers with a window.

    In z-lab's code ``is_causal`` applies to all layers; by default, layers with a window are causal and others are not.
    """
    config, kinds = files.config, layer.get("layer_types") or ["full_attention"]
    is_causal = config.get("is_causal", (config.get("dflash_config") or {}).get("causal"))
    if is_causal and "full_attention" in kinds:
        raise OutriderError(f"{files.source} has full attention that is causal within a block, which is not supported")
    if config.get("speculators_model_type") is not None and is_causal is None:
        is_causal = not config.get("sliding_window_non_causal", True)
    return "sliding_attention" in kinds and (is_causal is None or bool(is_causal))


def _layers(files: HeadFiles, layer: Mapping[str, Any], vocab_size: int) -> Qwen3Config:
    """Return the config of the head's layers. Missing sizes are taken from the weights."""
    tensors = files.tensors
    dim = tensors["layers.0.self_attn.q_norm.weight"].shape[-1]
    measured = {
        "hidden_size": ("hidden_norm.weight", 1),
        "intermediate_size": ("layers.0.mlp.gate_proj.weight", 1),
        "head_dim": ("layers.0.self_attn.q_norm.weight", 1),
        "num_attention_heads": ("layers.0.self_attn.q_proj.weight", dim),
        "num_key_value_heads": ("layers.0.self_attn.k_proj.weight", dim),
    }
    given = {key: layer[key] for key in (*LAYER_KEYS, "num_hidden_layers", "attention_bias") if layer.get(key) is not None}
    for key, (name, unit) in measured.items():
        if key not in given and name in tensors:
            given[key] = tensors[name].shape[0] // unit
    given.setdefault("num_hidden_layers", files.count_numbered(r"layers\.(\d+)\."))
    given.setdefault("vocab_size", vocab_size)
    given.setdefault("attention_bias", "layers.0.self_attn.q_proj.bias" in tensors)
    shape = given | {"attention_dropout": 0.0}
    return files.build(lambda: Qwen3Config(**shape), "its config is not valid for Qwen3 layers")


def _windows(files: HeadFiles, layer: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none."""
    kinds = layer.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise OutriderError(f"{files.source}: layer_types in config.json must be a list of {num_layers} kinds of layers")
    odd = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if odd is not None:
        raise OutriderError(f"{files.source}: unsupported kind of layer {odd!r}: expected full_attention or sliding_attention")
    if "sliding_attention" not in kinds[:num_layers]:
        return (0,) * num_layers
    window = files.integer(layer, "sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])


def _factor(files: HeadFiles, config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise OutriderError(f"{files.source}: config.json says {key}={value!r}: expected a number of at least 0")
    return float(value)


def default_hidden_states(target_layers: int, count: int) -> tuple[int, ...]:
    """Return ``count`` evenly spaced hidden states, z-lab's usual ones: the outputs of layers 1 to n - 3."""
    if count == 1 or target_layers < 5:
        return (target_layers // 2 + 1,)
    span = target_layers - 4
    return tuple(round(1 + index * span / (count - 1)) + 1 for index in range(count))


# --- writing ---------------------------------------------------------------------------------------------------------------


def check_exportable(shape: BlockShape) -> None:
    """Raise ``OutriderError`` for a head that ``export`` cannot write, because z-lab's layout lacks a part of it."""
    if shape.reduced or shape.own_embedding or shape.own_output:
        raise OutriderError(
            "a block drafter with its own vocabulary, embedding or output head cannot be written in z-lab's layout"
        )
    if min(shape.hidden_states) < 1:
        raise OutriderError("a block drafter that reads hidden state 0 cannot be written in z-lab's layout")


def export(head: BlockHead, folder: Path, num_target_layers: int, acceptance: Sequence[float] | None = None) -> None:
    """Write a head in z-lab's layout for DFlash or DFlash 2, or in DeepSeek's if it has a bias for the previous token.

    ``acceptance``: measured acceptance of each draft after the true tokens. Raises ``OutriderError`` like ``check_exportable``.
    """
    shape, config = head.shape, head.shape.config
    check_exportable(shape)
    layers = [index - 1 for index in shape.hidden_states]
    window = max(shape.windows) or None
    fields = {key: getattr(shape, field) for key, field in (CONVOLUTIONS | SELECTOR).items()}
    is_dflash2 = shape.conv_taps > 0 or shape.selector_rank > 0
    changed = {"output_multiplier": (shape.output_scale, 1.0), "final_logit_softcapping": (shape.softcap, 0.0)}
    written = {
        "architectures": ["Qwen3DSparkModel" if shape.markov_rank else f"DFlash{'2' if is_dflash2 else ''}DraftModel"],
        "model_type": "qwen3",
        **written_layers(config),
        "attention_bias": config.attention_bias,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in shape.windows],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "block_size": shape.block_size,
        "num_target_layers": num_target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": layers,
            **({"causal": shape.causal_windows} if window else {}),
            **({"block_size": shape.block_size} | fields if is_dflash2 else {}),
            **{key: value for key, (value, usual) in changed.items() if value != usual},
        },
        **({"is_causal": False} if window and not shape.causal_windows else {}),
        "dtype": dtype_name(head.fc.weight.dtype),
    }
    if shape.markov_rank:
        written |= {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": layers,
            "markov_rank": shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
        }
    if shape.predicts_next != bool(shape.markov_rank):
        written["sample_from_anchor"] = shape.predicts_next
    write_folder(folder, written, head.state_dict(), acceptance_by_position=acceptance)
