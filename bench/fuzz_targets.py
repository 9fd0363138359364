"""Fuzzing targets: one class for each kind of input, with valid seeds."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
from mutations import Mutate, of_bytes, of_gguf, of_json, of_safetensors, of_toml
from processes import resident

ROOT = Path(__file__).resolve().parent.parent
SEEDS = ROOT / "tests" / "fuzz_seeds"  # former findings, by target
MAX_MESSAGE = 700  # characters of an error message
ANSWER_SECONDS = 240.0


class Finding(Exception):
    """A wrong outcome, in one line."""


def check_refusal(message: str) -> None:
    """Raise ``Finding`` unless the message is one short line without Python internals."""
    if not message.strip() or len(message) > MAX_MESSAGE or "\n" in message.strip():
        raise Finding(f"an error message of {len(message)} characters, {len(message.splitlines())} lines: {message[:80]!r}")
    for inside in ("Traceback", " object at 0x", "<class '", "<function"):
        if inside in message:
            raise Finding(f"the error message shows Python internals: {message[:160]!r}")


class Target:
    """One kind of input. ``run`` raises ``Finding`` or an unexpected exception if an input is handled wrongly."""

    name: str

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        """Return mutated bytes."""
        return of_bytes(data, choose)

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-fuzz-")
        self.folder = Path(self._folder.name)

    @cache  # noqa: B019 - as long as the process
    def seeds(self) -> list[bytes]:
        """Return valid inputs and former findings."""
        kept = [file.read_bytes() for file in sorted((SEEDS / self.name).glob("*")) if file.is_file()]
        return [*self.valid(), *kept]

    def valid(self) -> list[bytes]:
        """Return valid inputs."""
        raise NotImplementedError

    def run(self, data: bytes) -> None:
        """Process an input as Outrider would for a user."""
        raise NotImplementedError

    def memory(self) -> int:
        """Return the resident bytes of the process that handles inputs."""
        return resident()

    def close(self) -> None:
        self._folder.cleanup()


def refusing(work: Callable[[], object]) -> None:
    """Call ``work``. If it raises ``OutriderError``, check the message."""
    from outrider.types import OutriderError

    try:
        work()
    except OutriderError as error:
        check_refusal(str(error))


class PlanTarget(Target):
    """Plans of ``outrider serve``: options are checked and merged; no model is loaded."""

    name = "plan"

    def __init__(self) -> None:
        super().__init__()
        (self.folder / "model").mkdir()  # plans name folders relative to their own
        (self.folder / "model" / "config.json").write_text("{}")

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return of_toml(data, choose)

    def valid(self) -> list[bytes]:
        return [
            b'target = "model"\ndraft = "model"\nnum_draft_tokens = 4\nverifier = "exact"\nsame_text = true\n',
            b'# plan\nmethod = "suffix+draft:draft.draft=model"\nnum_draft_tokens = "auto"\nmax_batch = 4\nkv_memory = 0.5\n',
            b'method = "eagle:hidden_states=2,4,6:draft=model"\ndtype = "float32"\ncompile = "never"\nmax_len = 99 # tokens\n',
        ]

    def run(self, data: bytes) -> None:
        from outrider.cli.options import MethodOptions, ModelOptions
        from outrider.cli.serve import filled
        from outrider.cli.session import resolve
        from outrider.engine.options import Speculation
        from outrider.engine.plan import Plan
        from outrider.options import declared
        from outrider.runner.config import RunnerConfig

        file = self.folder / "plan.toml"
        file.write_bytes(data)

        def read() -> None:
            plan = Plan.read(file)
            models, methods = filled(ModelOptions(), plan), filled(MethodOptions(), plan)
            limits = {name: plan.given(name) for name in ("max_batch", "kv_memory") if plan.given(name) is not None}
            given = {"target": models.target, **resolve(models, methods), **limits}
            for kind in (Speculation, RunnerConfig):
                kind(**{name: given[name] for name in declared(kind) if name in given})
            plan.write(self.folder / "again.toml")
            if Plan.read(self.folder / "again.toml").values != plan.values:
                raise Finding("a plan changes when it is written and read again")

        refusing(read)


class ModelTarget(Target):
    """Files of checkpoints: ``FOLDER/NAME`` and a line break, then the file's bytes. The folder is loaded, and decodes."""

    name = "model"
    files: tuple[str, ...] = (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    )
    words: tuple[str, ...] = (
        *("quantization_config", "text_config", "layer_types", "rope_scaling", "rope_parameters", "sliding_window", "auto_map"),
        *("architectures", "num_experts", "head_dim", "attn_implementation", "max_length", "eos_token_id", "vision_config"),
        *("tie_word_embeddings", "pad_token_id", "hidden_act", "torch_dtype", "chat_template", "added_tokens_decoder"),
        *("weight_map", "total_size", "metadata"),
    )

    def __init__(self) -> None:
        super().__init__()
        sys.path.insert(0, str(ROOT / "tests"))  # which writes tiny checkpoints
        self.folders: list[str] = []
        self._make()

    def _make(self) -> None:
        """Write the valid folders, and name them in ``self.folders``."""
        import_module("tiny_folder").make_folder(self.folder / "llama")
        from transformers import AutoModelForCausalLM

        shutil.copytree(self.folder / "llama", self.folder / "sharded")
        (self.folder / "sharded" / "model.safetensors").unlink()
        AutoModelForCausalLM.from_pretrained(self.folder / "llama").save_pretrained(
            self.folder / "sharded", max_shard_size="8KB"
        )
        self.folders = ["llama", "sharded"]

    def valid(self) -> list[bytes]:
        names = [f"{folder}/{name}" for folder, name in itertools.product(self.folders, self.files)]
        return [f"{name}\n".encode() + path.read_bytes() for name in names if (path := self.folder / name).exists()]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        name, content = data.split(b"\n", 1)
        if name.endswith(b".safetensors"):
            change: Mutate = of_safetensors
        elif name.endswith(b".gguf"):
            change = of_gguf
        else:
            change = of_json(self.words) if name.endswith(b".json") else of_bytes
        return name + b"\n" + change(content, choose)

    def run(self, data: bytes) -> None:
        folder = self._with(data)
        refusing(lambda: self._decode(folder))

    def _with(self, data: bytes) -> Path:
        """Return a copy of a valid folder in which the case replaces one file."""
        name, content = data.split(b"\n", 1)
        base, _, file = name.decode().rpartition("/")
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / base, folder)
        (folder / file).write_bytes(content)
        return folder

    def _decode(self, target: Path, **options: Any) -> None:
        from outrider import LLM, SamplingParams

        llm = LLM(target, compile="never", **({"method": "plain"} | options))
        llm.generate("def add(", SamplingParams(max_tokens=4, ignore_eos=True))


class QuantisedTarget(ModelTarget):
    """Quantised checkpoints in each of their formats."""

    name = "quantised"
    files = ("config.json", "model.safetensors")
    words = (
        *("quantization_config", "quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "zero_point"),
        *("config_groups", "weights", "num_bits", "strategy", "symmetric", "format", "actorder", "type", "targets", "ignore"),
        *("weight_block_size", "fmt", "modules_to_not_convert", "input_activations", "dtype", "torch_dtype", "version"),
    )

    def _make(self) -> None:
        writers = import_module("quantised_folders")
        for kind, layers in writers.FORMATS.items():
            writers.write(self.folder / kind, *layers, hidden_size=64, intermediate_size=128, head_dim=16)
        writers.write_experts(self.folder / "experts")
        self.folders = [*writers.FORMATS, "experts"]


class GgufTarget(ModelTarget):
    """GGUF files."""

    name = "gguf"
    files = ("model.gguf",)

    def _make(self) -> None:
        writers = import_module("gguf_files")
        codes = writers.Kind
        kinds = {"llama": writers.mixed, "qwen2": lambda name: codes.Q8_0, "qwen3": lambda name: codes.F16}
        for architecture, kind_of in kinds.items():
            (self.folder / architecture).mkdir()
            model = writers.make_model(architecture, num_hidden_layers=1)
            writers.write(self.folder / architecture / "model.gguf", model, kind_of)
        self.folders = list(kinds)

    def run(self, data: bytes) -> None:
        folder = self._with(data)
        refusing(lambda: self._decode(folder / "model.gguf"))


class HeadTarget(ModelTarget):
    """Files of heads in each of their formats, drafting for their targets."""

    name = "head"
    files = ("config.json", "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
    words = (
        *("eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "transformer_layer_config", "norm_output"),
        *("speculators_config", "speculators_model_type", "norm_before_fc", "medusa_num_heads", "truncated_vocab_size", "bias"),
        *("num_hidden_layers", "rope_scaling", "architectures", "target_hidden_size", "qkv_bias", "head_dim"),
        *("use_aux_hidden_state", "dflash_config", "block_size", "mask_token_id", "target_layer_ids", "markov_rank"),
        *("num_target_layers", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "layer_types"),
        *("text_config", "backbone_hidden_size", "num_centroids", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
    )

    def _make(self) -> None:
        self._asked: dict[str, tuple[Path | None, str]] = {}  # folder -> its target, None if it is one, and the method
        self._make_eagle_and_medusa()
        self._make_blocks()
        self._make_mtp()
        self.folders = list(self._asked)

    def _make_eagle_and_medusa(self) -> None:
        writers, target = import_module("heads.writers"), self.folder / "target"
        import_module("tiny_folder").make_folder(target, hidden_size=writers.HIDDEN, num_hidden_layers=6)
        sizes = {"eagle1": (), "eagle3": (64,), "speculators": (64,), "medusa": (2,), "vllm_medusa": (2,)}
        for kind, more in sizes.items():
            getattr(writers, f"write_{kind}")(self.folder / kind, 320, *more)
            self._asked[kind] = target, "medusa" if "medusa" in kind else "eagle"

    def _make_blocks(self) -> None:
        writers, target = import_module("heads.block_checkpoints"), self.folder / "block-target"
        self._save(writers.block_target(), target)
        tables = writers.head_tensors()
        heads = {
            "dflash": (writers.native_config(), tables),
            "dflash2": (writers.second_config(), tables | writers.second_tensors()),
            "dspark": (writers.dspark_config(), tables | writers.markov_tensors()),
            "dflash-speculators": (writers.speculators_config(), tables),
        }
        for kind, (config, tensors) in heads.items():
            writers.write(self.folder / kind, config, tensors)
            self._asked[kind] = target, "dflash"

    def _make_mtp(self) -> None:
        writers, assistants = import_module("heads.mtp_checkpoints"), import_module("heads.test_assistant")
        for family in writers.FAMILIES:
            model = writers.tiny_target(family)
            writers.write_checkpoint(family, self.folder / family, model)
            self._save(None, self.folder / family)
            self._asked[family] = None, "mtp"
        self._save(assistants.gemma(), self.folder / "gemma-target", assistants.VOCAB)
        assistants.drafter(**assistants.ORDERED).save_pretrained(self.folder / "assistant")
        self._asked["assistant"] = self.folder / "gemma-target", "mtp"

    @staticmethod
    def _save(model: Any, folder: Path, vocab: int = 61) -> None:
        """Save a target, unless it is there, and a tokenizer of letters."""
        if model is not None:
            model.save_pretrained(folder)
        import_module("tiny_folder").letter_tokenizer(vocab, 1).save_pretrained(folder)

    def run(self, data: bytes) -> None:
        folder = self._with(data)
        target, method = self._asked[data.split(b"/", 1)[0].decode()]
        if target is None:
            refusing(lambda: self._decode(folder, method=method, num_draft_tokens=2))
        else:
            refusing(lambda: self._decode(target, method=f"{method}:draft={folder}", num_draft_tokens=2))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "[a-z]{2,9}"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TALK = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b"}], "name": "c"},
]
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
TOKENS = {"stop_token_ids": [3], "banned_token_ids": [7], "allowed_token_ids": [3, 5, 9]}
TOP_LOGPROBS = {"logprobs": True, "top_logprobs": 2}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "def add(", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 2}),
    ("completions", {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "stop": ["\n", "x"], "logit_bias": {"5": 1}}),
    ("completions", {"prompt": [[5, 6], [7]], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}),
    ("completions", {"prompt": "x", "max_tokens": 9, **SCHEMA, "speculative": {"num_draft_tokens": 2, "method": "plain"}}),
    ("completions", {"prompt": "y", "max_tokens": 3, "min_p": 0.1, **PENALTIES, **TOKENS, "ignore_eos": True}),
    ("chat/completions", {"messages": TALK, "max_completion_tokens": 4, **TOP_LOGPROBS, "presence_penalty": 0.1}),
    ("chat/completions", {"messages": [{"role": "user", "content": "é"}], "max_tokens": 4, "stream": True, "top_k": 3}),
    ("responses", {"input": [{"role": "user", "content": "b"}], "instructions": "a", "max_output_tokens": 4, "stream": True}),
]


class BodyTarget(Target):
    """Bodies of completion requests: the path, a line break, the body. Sent to a separate server process."""

    name = "body"
    words: tuple[str, ...] = (
        *("stream", "stream_options", "n", "logprobs", "top_logprobs", "logit_bias", "stop", "stop_token_ids", "speculative"),
        *("response_format", "allowed_token_ids", "banned_token_ids", "messages", "prompt", "max_completion_tokens", "min_p"),
    )

    def __init__(self) -> None:
        super().__init__()
        from outrider.bench.load.own_server import own_server

        limits = ["--max-len", "128", "--max-batch", "8", "--max-body", "200000", "--schema-timeout", "1"]
        self._open = ExitStack()
        self._server = self._open.enter_context(own_server(["--compile", "never", *limits]))
        self._log = self._open.enter_context(self._server.log.open("rb"))
        self._http = self._open.enter_context(httpx.Client(base_url=self._server.url, timeout=ANSWER_SECONDS))

    def valid(self) -> list[bytes]:
        return [f"/v1/{path}\n".encode() + json.dumps(body).encode() for path, body in BODIES]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        path, body = data.split(b"\n", 1)
        return path + b"\n" + of_json(self.words)(body, choose)

    def run(self, data: bytes) -> None:
        path, body = data.split(b"\n", 1)
        self.ask(path.decode(), body)

    def ask(self, path: str, body: bytes) -> None:
        """Send a request. Raises ``Finding`` unless it is answered or rejected as a client error."""
        try:
            answer = self._http.post(path, content=body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            raise Finding(f"no answer: {type(error).__name__}") from None
        if answer.status_code >= 500:
            raise Finding(f"status {answer.status_code}: {answer.text[:200]}")
        if answer.status_code >= 400:
            check_refusal(answer.json()["error"]["message"])
        said = self._log.read()  # since the last call
        if b'"traceback"' in said or b"Traceback" in said:
            raise Finding(f"the log has a traceback: {said[said.find(b'raceback') :][-200:]!r}")
        if self._server.process.poll() is not None:
            raise Finding(f"the server has ended with code {self._server.process.returncode}")

    def memory(self) -> int:
        return resident(self._server.process.pid)

    def close(self) -> None:
        self._open.close()
        super().close()


class SchemaTarget(BodyTarget):
    """JSON schemas of requested answers, sent to a server."""

    name = "schema"
    words = (
        *("$ref", "$defs", "anyOf", "allOf", "oneOf", "not", "enum", "const", "pattern", "format", "items", "prefixItems"),
        *("patternProperties", "additionalProperties", "required", "minLength", "maxLength", "minItems", "maxItems", "type"),
        *("multipleOf", "minimum", "maximum", "exclusiveMinimum", "if", "then", "else", "dependentRequired", "propertyNames"),
        "x-guidance",
    )

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return of_json(self.words)(data, choose)

    def valid(self) -> list[bytes]:
        tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "$ref": "#/$defs/t"}
        either = {"anyOf": [{"const": "a"}, {"enum": [1, None, "b"]}, {"type": "string", "format": "date", "maxLength": 12}]}
        both = {"allOf": [{"type": "number", "multipleOf": 0.5}, {"exclusiveMinimum": 1, "maximum": 9}]}
        fixed = {"type": "array", "prefixItems": [PERSON, either], "items": False, "minItems": 1}
        return [json.dumps(schema).encode() for schema in (PERSON, tree, either, both, fixed)]

    def run(self, data: bytes) -> None:
        opening = b'{"prompt": "x", "max_tokens": 12, "response_format": {"type": "json_schema", "json_schema": {"schema": '
        self.ask("/v1/completions", opening + data + b"}}}")


KINDS = (PlanTarget, ModelTarget, QuantisedTarget, GgufTarget, HeadTarget, BodyTarget, SchemaTarget)
TARGETS: dict[str, type[Target]] = {kind.name: kind for kind in KINDS}
