"""Fuzzing targets: one class for each kind of input, with valid seeds."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
from mutations import Mutate, of_bytes, of_json, of_safetensors, of_toml

ROOT = Path(__file__).resolve().parent.parent
SEEDS = ROOT / "tests" / "fuzz_seeds"  # former findings, by target
MAX_MESSAGE = 700  # characters of an error message
START_SECONDS, ANSWER_SECONDS = 180.0, 240.0


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
        return resident("self")

    def close(self) -> None:
        self._folder.cleanup()


def resident(pid: int | str) -> int:
    """Return the resident bytes of a process."""
    import resource

    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


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

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return of_toml(data, choose)

    def valid(self) -> list[bytes]:
        return [
            b'target = "/nowhere/model"\ndraft = "owner/name"\nnum_draft_tokens = 4\nverifier = "exact"\nsame_text = true\n',
            b'# a plan\n\nmethod = "suffix+draft:draft=/no"\nnum_draft_tokens = "auto"\nmax_batch = 4\nkv_memory = 0.5\n',
            b'method = "combined:ngram,draft"\ndtype = "float32"\ndevice = "cpu"\ncompile = "never"\nmax_len = 2048 # tokens\n',
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
    """Checkpoint files: ``NAME``, a line break, the file's bytes. The checkpoint is loaded and decodes four tokens."""

    name = "model"
    files: tuple[str, ...] = (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "model.safetensors",
    )
    words: tuple[str, ...] = (
        *("quantization_config", "text_config", "layer_types", "rope_scaling", "rope_parameters", "sliding_window", "auto_map"),
        *("architectures", "num_experts", "head_dim", "attn_implementation", "max_length", "eos_token_id", "vision_config"),
        *("tie_word_embeddings", "pad_token_id", "hidden_act", "torch_dtype", "chat_template", "added_tokens_decoder"),
    )

    def __init__(self) -> None:
        super().__init__()
        sys.path.insert(0, str(ROOT / "tests"))  # for the module that writes tiny checkpoints
        self.base = self.folder / "base"
        self._make()

    def _make(self) -> None:
        import_module("tiny_folder").make_folder(self.base)

    def valid(self) -> list[bytes]:
        return [f"{name}\n".encode() + (self.base / name).read_bytes() for name in self.files if (self.base / name).exists()]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        name, content = data.split(b"\n", 1)
        if name.endswith(b".safetensors"):
            change: Mutate = of_safetensors
        else:
            change = of_json(self.words) if name.endswith(b".json") else of_bytes
        return name + b"\n" + change(content, choose)

    def run(self, data: bytes) -> None:
        folder = self._with(self.base, data)
        refusing(lambda: self._decode(folder))

    def _with(self, base: Path, data: bytes) -> Path:
        """Copy a folder, with one file replaced by the bytes of the case."""
        name, content = data.split(b"\n", 1)
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        (folder / Path(name.decode()).name).write_bytes(content)
        return folder

    def _decode(self, folder: Path, **options: Any) -> None:
        from outrider import LLM, SamplingParams

        llm = LLM(folder, compile="never", **({"method": "plain"} | options))
        llm.generate("def add(", SamplingParams(max_tokens=4, ignore_eos=True))


HEADS = {"eagle1": "eagle", "eagle3": "eagle", "speculators": "eagle", "medusa": "medusa", "vllm_medusa": "medusa"}


class HeadTarget(ModelTarget):
    """Files of heads in all formats: ``FORMAT/NAME``, a line break, the file's bytes."""

    name = "head"
    files = ("config.json", "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
    words = (
        *("eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "transformer_layer_config", "norm_output"),
        *("speculators_config", "speculators_model_type", "norm_before_fc", "medusa_num_heads", "truncated_vocab_size", "bias"),
        *(
            "num_hidden_layers",
            "rope_scaling",
            "architectures",
            "target_hidden_size",
            "qkv_bias",
            "head_dim",
            "use_aux_hidden_state",
        ),
    )

    def _make(self) -> None:
        writers = import_module("heads.writers")
        import_module("tiny_folder").make_folder(self.base, hidden_size=writers.HIDDEN, num_hidden_layers=6)
        sizes = {"eagle1": (), "eagle3": (64,), "speculators": (64,), "medusa": (2,), "vllm_medusa": (2,)}
        for kind, more in sizes.items():
            getattr(writers, f"write_{kind}")(self.folder / kind, 320, *more)

    def valid(self) -> list[bytes]:
        files = [(kind, name) for kind, name in itertools.product(HEADS, self.files) if (self.folder / kind / name).exists()]
        return [f"{kind}/{name}\n".encode() + (self.folder / kind / name).read_bytes() for kind, name in files]

    def run(self, data: bytes) -> None:
        kind = data.split(b"/", 1)[0].decode()
        folder = self._with(self.folder / kind, data)
        method = f"{HEADS[kind]}:draft={folder}"
        refusing(lambda: self._decode(self.base, method=method, num_draft_tokens=2))


class BodyTarget(Target):
    """Bodies of completion requests: the path, a line break, the body. Sent to a separate server process."""

    name = "body"
    words: tuple[str, ...] = (
        *("stream", "stream_options", "n", "logprobs", "top_logprobs", "logit_bias", "stop", "stop_token_ids", "speculative"),
        *("response_format", "allowed_token_ids", "banned_token_ids", "messages", "prompt", "max_completion_tokens", "min_p"),
    )

    def __init__(self) -> None:
        super().__init__()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log = (self.folder / "log").open("w+b")
        limits = ["--max-len", "128", "--max-batch", "8", "--max-body", "200000", "--schema-timeout", "1"]
        command = [sys.executable, "-m", "outrider", "serve", "--port", str(port), "--compile", "never", *limits]
        self._server = subprocess.Popen(command, stderr=self._log, stdout=subprocess.DEVNULL)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_SECONDS)
        self._seen = 0  # bytes of the log that were read
        started = time.monotonic()
        while not self._is_ready():
            if self._server.poll() is not None or time.monotonic() - started > START_SECONDS:
                raise SystemExit(f"the server did not start: {(self.folder / 'log').read_text()[-300:]}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def valid(self) -> list[bytes]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}}}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("completions", {"prompt": "def add(", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 2}),
            (
                "completions",
                {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "stop": ["\n", "x"], "logit_bias": {"5": 1}},
            ),
            (
                "completions",
                {"prompt": [[5, 6], [7]], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3},
            ),
            (
                "completions",
                {
                    "prompt": "x",
                    "max_tokens": 9,
                    "response_format": form,
                    "speculative": {"num_draft_tokens": 2, "method": "plain"},
                },
            ),
            (
                "chat/completions",
                {
                    "messages": [
                        {"role": "system", "content": "a"},
                        {"role": "user", "content": [{"type": "text", "text": "b"}], "name": "c"},
                    ],
                    "max_completion_tokens": 4,
                    "logprobs": True,
                    "top_logprobs": 2,
                    "presence_penalty": 0.1,
                },
            ),
            ("chat/completions", {"messages": [{"role": "user", "content": "é"}], "max_tokens": 4, "stream": True, "top_k": 3}),
        ]
        return [f"/v1/{path}\n".encode() + json.dumps(body).encode() for path, body in bodies]

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
        self._log.seek(self._seen)
        said = self._log.read()
        self._seen += len(said)
        if b'"traceback"' in said or b"Traceback" in said:
            raise Finding(f"the log has a traceback: {said[said.find(b'raceback') :][-200:]!r}")
        if self._server.poll() is not None:
            raise Finding(f"the server has ended with code {self._server.returncode}")

    def memory(self) -> int:
        return resident(self._server.pid)

    def close(self) -> None:
        self._http.close()
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
        self._log.close()
        super().close()


class SchemaTarget(BodyTarget):
    """JSON schemas of requested answers, sent to a server."""

    name = "schema"
    words = (
        *("$ref", "$defs", "anyOf", "allOf", "oneOf", "not", "enum", "const", "pattern", "format", "items", "prefixItems"),
        *(
            "patternProperties",
            "additionalProperties",
            "required",
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "multipleOf",
        ),
        *(
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "if",
            "then",
            "else",
            "dependentRequired",
            "propertyNames",
            "x-guidance",
            "type",
        ),
    )

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return of_json(self.words)(data, choose)

    def valid(self) -> list[bytes]:
        person = {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "[a-z]{2,9}"}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name"],
            "additionalProperties": False,
        }
        tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "$ref": "#/$defs/t"}
        either = {"anyOf": [{"const": "a"}, {"enum": [1, None, "b"]}, {"type": "string", "format": "date", "maxLength": 12}]}
        both = {"allOf": [{"type": "number", "multipleOf": 0.5}, {"exclusiveMinimum": 1, "maximum": 9}]}
        fixed = {"type": "array", "prefixItems": [person, either], "items": False, "minItems": 1}
        return [json.dumps(schema).encode() for schema in (person, tree, either, both, fixed)]

    def run(self, data: bytes) -> None:
        opening = b'{"prompt": "x", "max_tokens": 12, "response_format": {"type": "json_schema", "json_schema": {"schema": '
        self.ask("/v1/completions", opening + data + b"}}}")


TARGETS: dict[str, type[Target]] = {kind.name: kind for kind in (PlanTarget, ModelTarget, HeadTarget, BodyTarget, SchemaTarget)}
