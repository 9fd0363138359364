"""SGLang: flags of ``python -m sglang.launch_server``, as of 0.5.21.

SGLang counts the last committed token as a draft, so ``--speculative-num-draft-tokens`` is K + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from outrider.export import heads
from outrider.export.deployment import Deployment
from outrider.export.engine import TEMPERATURE_NOTE, Engine, Export, gpu_environment, typical
from outrider.proposers.portable import Form
from outrider.types import OutriderError

LAUNCH = ("python", "-m", "sglang.launch_server")
SMALLER = "give the plan a draft model, or an EAGLE head trained on the target"
MTP_TYPES = (  # model types that SGLang turns into an MTP head's (``ModelConfig._config_draft_model``)
    *("qwen3_next", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "mimo", "step3p5", "step3p7", "hy_v3"),
    *("deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *("glm4_moe", "glm4_moe_lite", "glm_ocr", "glm_moe_dsa", "ernie4_5_moe", "exaone_moe", "nemotron_h"),
    *("longcat_flash", "bailing_moe", "gemma4_assistant"),
)
TREE_NODES = 60  # drafts per tree on a GPU, as in Outrider


class Sglang(Engine):
    """Supports draft models, EAGLE heads as chains or trees, and its own trie of n-grams."""

    name: ClassVar[str] = "SGLang"
    instead: ClassVar[Mapping[Form, str]] = {
        Form.FIRST_LAYERS: SMALLER,
        Form.FEWER_BITS: SMALLER,
        Form.PARALLEL_HEADS: "train an EAGLE head, or export to vLLM",
    }

    def export(self, deployment: Deployment, folder: Path, own_code: bool) -> Export:
        flags, num_drafts, notes = self._drafting(deployment, folder)
        if flags and deployment.own_k is None and deployment.kind.form is not Form.BLOCK_DRAFTER:
            notes = [typical(num_drafts), *notes]
        environment = gpu_environment(deployment.given("device"))
        general = {
            "model-path": deployment.target,
            "served-model-name": deployment.name,
            "host": "127.0.0.1",
            "port": 8000,
            "dtype": deployment.given("dtype"),
            "device": "cuda" if environment else deployment.given("device"),
            "context-length": deployment.given("max_len"),
            "max-running-requests": deployment.given("max_batch"),
            "sampling-defaults": "openai",  # its default takes a request's missing settings from the model's files
        }
        command = [*LAUNCH]
        for name, value in {**general, **flags}.items():
            command += [] if value is None else [f"--{name}", str(value)]
        if deployment.given("kv_memory") is not None:
            notes = [*notes, "SGLang has no limit in GiB for its cache: --mem-fraction-static sets a share of the memory."]
        if deployment.given("compile") == "never":
            command.append("--disable-cuda-graph")
        return Export(command, environment=environment, notes=[*notes, TEMPERATURE_NOTE], num_drafts=num_drafts)

    def _drafting(self, deployment: Deployment, folder: Path) -> tuple[dict[str, str | int], int, list[str]]:
        """Return SGLang's flags for drafting, without dashes, the number of drafts, and the differences to Outrider."""
        kind, form, k = deployment.kind, deployment.kind.form, deployment.k
        chain: dict[str, str | int] = {
            "speculative-num-steps": k,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": k + 1,
        }
        if form is Form.NO_DRAFTS:
            return {}, 0, []
        if form in (Form.SMALL_MODEL, Form.FOREIGN_MODEL):
            if form is Form.FOREIGN_MODEL:
                raise OutriderError(
                    "SGLang needs a draft with the target's tokenizer: give the plan another draft, or export to transformers"
                )
            return {"speculative-algorithm": "STANDALONE", "speculative-draft-model-path": kind.source, **chain}, k, []
        if form is Form.LOOKUP:
            note = "SGLang uses a trie over all requests and ignores min_n and max_n; it needs a CUDA GPU."
            return {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": k + 1}, k, [note]
        if form is Form.BLOCK_DRAFTER:
            source, shape = heads.block_drafter(kind, deployment, folder, reads_speculators=False)
            model: dict[str, str | int] = {"speculative-draft-model-path": source}
            note = f"SGLang drafts the head's whole blocks: {shape.max_drafts} tokens."
            if shape.markov_rank:
                return {"speculative-algorithm": "DSPARK", **model}, shape.max_drafts, [note]
            num_drafts = shape.max_drafts if deployment.own_k is None else min(k, shape.max_drafts)
            dflash = {"speculative-algorithm": "DFLASH", **model, "speculative-dflash-block-size": num_drafts + 1}
            return dflash, num_drafts, [note] if deployment.own_k is None else []
        if not kind.drafts_trees:
            raise self.refuse(deployment)
        own: str | None
        if form is Form.FEATURE_HEAD:
            own, eagle = heads.feature_head(kind, deployment, folder, "LlamaForCausalLMEagle")
            algorithm = "EAGLE3" if eagle.generation == 3 else "EAGLE"
        else:
            own = heads.own_head(kind, deployment, self.name, MTP_TYPES)
            algorithm = "NEXTN"  # with one layer of the target's kind
        head: dict[str, str | int] = {} if own is None else {"speculative-draft-model-path": own}
        asked = k if kind.config.top_k == 1 else kind.config.max_nodes or min(TREE_NODES, 2 * k)
        num_drafts = min(asked, kind.config.top_k + (k - 1) * kind.config.top_k**2)  # SGLang expands top_k paths per step
        notes = [f"SGLang's trees of {k} steps have at most {num_drafts} drafts."] if num_drafts < asked else []
        chain |= {"speculative-eagle-topk": kind.config.top_k, "speculative-num-draft-tokens": num_drafts + 1}
        return {"speculative-algorithm": algorithm, **head, **chain}, num_drafts, notes
