"""transformers: a generation_config.json and a short program that calls ``generate``, for one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from outrider.export.deployment import Deployment, gguf_files
from outrider.export.engine import Engine, Export, typical
from outrider.method_text import split_method
from outrider.proposers.portable import Form
from outrider.types import OutriderError

FILE, PROGRAM = "generation_config.json", "generate.py"
HEADS = "give the plan a draft model, or export to vLLM"
EXIT_SHARE = 4  # early exit after 1/4 of the layers, if the plan does not set it

TEMPLATE = '''"""Assisted generation with transformers: python generate.py "a prompt". Written by outrider export."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

TARGET = {target}
{constants}
tokenizer = AutoTokenizer.from_pretrained(TARGET)
model = AutoModelForCausalLM.from_pretrained(TARGET, dtype={dtype}){device}
config = GenerationConfig.from_pretrained(Path(__file__).resolve().parent)
{more}inputs = tokenizer(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read(), return_tensors="pt").to(model.device)
output = model.generate(**inputs, generation_config=config{arguments})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
'''


class Transformers(Engine):
    """Supports draft models with any tokenizer, n-grams, and early exit."""

    name: ClassVar[str] = "transformers"
    instead: ClassVar[Mapping[Form, str]] = {
        Form.FEWER_BITS: "give the plan a draft model",
        Form.PARALLEL_HEADS: HEADS,
        Form.FEATURE_HEAD: HEADS,
        Form.OWN_HEAD: HEADS,
        Form.BLOCK_DRAFTER: HEADS,
    }

    def export(self, deployment: Deployment, folder: Path, own_code: bool) -> Export:
        for file in gguf_files(deployment):
            raise OutriderError(f"the program for transformers loads folders, but {file} is a file: export to vllm")
        settings, model = self._drafting(deployment)
        ids = {name: getattr(deployment.config, name, None) for name in ("bos_token_id", "pad_token_id")}
        config: dict[str, Any] = {name: value for name, value in ids.items() if value is not None}
        # generate() fills entries that are left out from the model's own settings, which Outrider does not apply.
        config |= {"eos_token_id": deployment.eos_token_ids or None, "repetition_penalty": 1.0}
        config |= {"do_sample": False, "max_new_tokens": 256} | settings
        device = deployment.given("device")
        moved = "" if device is None else f".to({device!r})"
        dtype = repr(deployment.given("dtype") or "auto")
        program = TEMPLATE.format(target=repr(deployment.target), dtype=dtype, device=moved, **model)
        notes = ["transformers drafts for one sequence at a time, and its server does not draft."]
        if ignored := _ignored(deployment):
            notes.append(f"transformers has no such settings, so that they are not exported: {', '.join(ignored)}.")
        num_drafts = 0 if deployment.kind.form is Form.NO_DRAFTS else deployment.k
        if num_drafts and deployment.own_k is None:
            notes.append(typical(num_drafts))
        files = {FILE: json.dumps(config, indent=2) + "\n", PROGRAM: program}
        return Export(("python", PROGRAM), files=files, notes=notes, num_drafts=num_drafts)

    def _drafting(self, deployment: Deployment) -> tuple[dict[str, Any], dict[str, str]]:
        """Return entries of the generation config and the variable parts of the program."""
        kind, form = deployment.kind, deployment.kind.form
        program = {"constants": "", "more": "", "arguments": ""}
        schedule = "heuristic" if deployment.own_k is None else "constant"
        assisted = {
            "num_assistant_tokens": deployment.k,
            "num_assistant_tokens_schedule": schedule,
            "assistant_confidence_threshold": 0.0,  # drafts have the requested length
        }
        if form is Form.NO_DRAFTS:
            return {}, program
        if form is Form.LOOKUP:
            return {"prompt_lookup_num_tokens": deployment.k, "max_matching_ngram_size": kind.config.max_n}, program
        if form is Form.FIRST_LAYERS:
            layers = kind.config.layers or max(1, deployment.config.num_hidden_layers // EXIT_SHARE)
            program["more"] = _given("model", assisted)
            return {**assisted, "assistant_early_exit": layers}, program
        if form in (Form.SMALL_MODEL, Form.FOREIGN_MODEL):
            program["constants"] = f"DRAFT = {kind.source!r}\n"
            program["more"] = "assistant = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=model.dtype).to(model.device)\n"
            program["more"] += _given("assistant", assisted)
            program["arguments"] = ", assistant_model=assistant"
            if form is Form.FOREIGN_MODEL:
                program["more"] += "assistant_tokenizer = AutoTokenizer.from_pretrained(DRAFT)\n"
                program["arguments"] += ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer"
            return assisted, program
        raise self.refuse(deployment)


def _ignored(deployment: Deployment) -> list[str]:
    """Return the names of the plan's settings that transformers lacks. It does not compile, so that "never" holds anyway."""
    names = ("max_len", "max_batch", "kv_memory", "compile")
    lowest = {"min_n"} & split_method(deployment.method)[1].keys()
    return [*(name for name in names if deployment.given(name) not in (None, "never")), *lowest]


def _given(model: str, settings: Mapping[str, Any]) -> str:
    """Return code that stores settings in the draft model's generation config, where transformers reads them."""
    return "".join(f"{model}.generation_config.{name} = {value!r}\n" for name, value in settings.items())
