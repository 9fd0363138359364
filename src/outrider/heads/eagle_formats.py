"""EAGLE heads on disk: EAGLE-1/2, EAGLE-3 native and speculators are read; EAGLE-1, native and speculators are written.

The layers of an EAGLE-3 head are numbered in two ways. ``eagle_aux_hidden_state_layer_ids`` at the top of a config (vLLM,
speculators) follows transformers' ``hidden_states``; inside ``eagle_config`` (SGLang, SpecForge, ModelOpt) it counts layers
from 0 and means their outputs, one less. Both are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from outrider.heads.checkpoint import LAYER_KEYS, HeadFiles, TargetSizes, write_folder, written_layers
from outrider.heads.copied_tables import drop_copied_table
from outrider.heads.eagle import EagleHead, EagleShape, default_hidden_states
from outrider.runner.checkpoint_files import check_sizes
from outrider.types import OutriderError, dtype_name

IGNORED = (r"^t2d$", r"^verifier_", r"rotary_emb\.")
OTHER_KINDS = {  # by the beginning of a tensor's name
    "mask_hidden": "a P-EAGLE head, which makes all drafts in one pass",
    "additional_layers": "an EAGLE-3 head with several layers in SGLang's form",
}
OUT_BIAS = "layers.0.self_attn.o_proj.bias"
# Llama's layer, with variations seen from the weights: attention biases are read, norms within heads are refused by name.
LLAMA_LIKE = ("llama", "eagle", "qwen2", "qwen3")
SECTIONS = ("transformer_layer_config", "model", "eagle_config", "outrider")  # nested configs
FORMATS = ("native", "speculators")
EAGLE_1 = "LlamaForCausalLM"  # architecture of the authors' EAGLE-1 heads


def load(source: str | Path | HeadFiles, target: TargetSizes, model: PreTrainedModel | None = None) -> EagleHead:
    """Read a head for this target, in float32. ``model``: the target, whose embedding replaces a stored copy.

    Raises ``OutriderError`` if parts are missing or do not fit.
    """
    files = HeadFiles.read(source)
    config = files.config
    files.check_speculators(("eagle3",))
    files.rename(_plain_name)
    for mark, what in OTHER_KINDS.items():
        if any([name.startswith(mark) for name in files.tensors]):
            raise OutriderError(f"unsupported head in {files.source}: {what} ({mark}), expected EAGLE-1 to 3")
    files.check_sections(SECTIONS)
    layer = config.get("transformer_layer_config") or config.get("model") or config
    tensors = files.tensors
    bias = tensors.get("fc.bias")
    if bias is not None and not bias.is_meta and not bias.any():  # as ``export`` writes a head without one
        del tensors["fc.bias"]
    if "fc.weight" not in tensors:
        raise OutriderError(f"{files.source} is not an EAGLE head: fc.weight is missing")
    files.check_dims({"fc.weight": 2, "embed_tokens.weight": 2, "lm_head.weight": 2})
    if layer.get("model_type", "llama") not in LLAMA_LIKE:
        raise OutriderError(f"unsupported layers {layer['model_type']} in {files.source}: only Llama layers can be loaded")
    check_sizes(f"{files.source}/config.json", layer)
    if model is not None:
        drop_copied_table(tensors, "embed_tokens.weight", model.get_input_embeddings())
    llama = _llama(files, layer, target.vocab_size)
    if "layers.0.hidden_norm.weight" in tensors:
        shape = _shape_of_generation_3(files, llama, target)
    else:
        shape = _shape_of_generation_1(files, llama, target)
        tensors.pop("lm_head.weight", None)  # the output head is the target's; a stored one is a copy
    head = files.build(lambda: EagleHead(shape))
    files.offsets_to_ids()
    files.fill(head, IGNORED)
    head.check_fit(target)
    return head


def _plain_name(name: str) -> str:
    """Return the canonical tensor name: without prefixes, ``midlayer`` as layer 0."""
    return re.sub(r"^(model|eagle_module|draft_model)\.", "", name).replace("midlayer.", "layers.0.", 1)


def _llama(files: HeadFiles, layer: dict[str, Any], vocab_size: int) -> LlamaConfig:
    """Return the config of the head's layers. Layers are counted in the weights: some configs state the target's number."""
    given = {key: layer[key] for key in (*LAYER_KEYS, "mlp_bias") if layer.get(key) is not None}
    given["attention_bias"] = "layers.0.self_attn.q_proj.bias" in files.tensors  # configs call it qkv_bias or omit it
    num_layers = max(1, files.count_numbered(r"layers\.(\d+)\."))
    shape = given | {"num_hidden_layers": num_layers, "attention_dropout": 0.0}
    config = files.build(lambda: LlamaConfig(**shape), "its config is not valid for Llama layers")
    embedding = files.tensors.get("embed_tokens.weight")
    config.vocab_size = vocab_size if embedding is None else embedding.shape[0]
    config._attn_implementation = "outrider"
    return config


def _shape_of_generation_1(files: HeadFiles, llama: LlamaConfig, target: TargetSizes) -> EagleShape:
    tensors = files.tensors
    return EagleShape(
        1,
        llama,
        llama.hidden_size,
        (target.num_layers,),
        files.draft_size(llama.vocab_size, target.vocab_size),
        fc_bias="fc.bias" in tensors,
        out_bias=OUT_BIAS in tensors,
        first_layer_norm="layers.0.input_layernorm.weight" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
    )


def _shape_of_generation_3(files: HeadFiles, llama: LlamaConfig, target: TargetSizes) -> EagleShape:
    config, tensors = files.config, files.tensors
    is_speculators = "speculators_model_type" in config
    width, ids = files.features(llama.hidden_size, stated_layers(config), lambda: default_hidden_states(target.num_layers))
    output = tensors.get("lm_head.weight")
    return EagleShape(
        3,
        llama,
        width,
        ids,
        files.draft_size(llama.vocab_size if output is None else output.shape[0], target.vocab_size),
        reduced="d2t" in tensors,
        fc_bias="fc.bias" in tensors,
        out_bias=OUT_BIAS in tensors,
        norm_before_residual=bool(config.get("norm_before_residual", is_speculators)),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=bool(config.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in tensors,
        own_output=output is not None,
    )


def stated_layers(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the hidden states that a config lists, and the layers whose outputs ``eagle_config`` lists; None if absent."""
    key, inner = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config") or {}
    return config.get(key), inner.get(key)


# --- writing ---------------------------------------------------------------------------------------------------------------


def check_exportable(shape: EagleShape) -> None:
    """Raise ``OutriderError`` for an EAGLE-3 head without an output head, which no format can represent."""
    if not shape.own_output:
        raise OutriderError("a head that uses the target's output head cannot be exported: train one with its own output head")


def export(
    head: EagleHead,
    folder: Path,
    kind: str = "native",
    verifier: str = "",
    acceptance: list[float] | None = None,
    architecture: str = EAGLE_1,
) -> None:
    """Write a head. ``kind``: native or speculators (EAGLE-3 only); ``verifier``: the target's name, for the config.

    ``acceptance``: measured acceptance of the first, second, ... sibling, which determines tree shapes. ``architecture``: the
    name in the config of an EAGLE-1 head.
    """
    shape = head.shape
    if kind not in FORMATS:
        raise OutriderError(f"unknown format {kind!r}: expected {', '.join(FORMATS)}")
    if shape.generation == 1 and kind == "speculators":
        raise OutriderError("EAGLE-1 heads support the native format only")
    check_exportable(shape)
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name != "draft_ids"}
    if shape.generation == 1 or kind == "speculators":  # other formats use the target's
        tensors.setdefault("embed_tokens.weight", head.embedding_table())
    if head.draft_ids is not None:  # vLLM refuses these tables for a head over the whole vocabulary
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(shape.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    layer = _layer_config(head)
    if shape.generation == 1:
        # SGLang and the authors' code expect a bias of fc. No "bias" in the config: engines read it as the attention's.
        tensors.setdefault("fc.bias", torch.zeros_like(head.fc.weight[:, 0]))
        config = layer | {"architectures": [architecture]}
    elif kind == "native":
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
        config = layer | _variant(shape) | _native(shape)
    else:
        config = _variant(shape) | _speculators(layer, verifier)
    write_folder(folder, config, tensors, acceptance_by_rank=acceptance)


def _variant(shape: EagleShape) -> dict[str, Any]:
    """Return the entries of an EAGLE-3 config that both formats share."""
    norms = {name: getattr(shape, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    return norms | {
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.hidden_states),
    }


def _layer_config(head: EagleHead) -> dict[str, Any]:
    config = head.shape.config
    return {
        "model_type": "llama",
        **written_layers(config),
        "mlp_bias": config.mlp_bias,
        "attention_bias": config.attention_bias and head.shape.out_bias,
        **({"qkv_bias": True} if config.attention_bias else {}),
        "torch_dtype": dtype_name(head.fc.weight.dtype),
    }


def _native(shape: EagleShape) -> dict[str, Any]:
    inner = [index - 1 for index in shape.hidden_states]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": inner, "use_aux_hidden_state": True},
    }


def _speculators(layer: dict[str, Any], verifier: str) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "torch_dtype": layer["torch_dtype"],
    }
