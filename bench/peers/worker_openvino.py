"""Peer OpenVINO GenAI: one pipeline per method; K is set per request. Models are exported once, then cached."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import ChunkClock, Request, Sample, WorkerArgs, content_key, serve

# For 16 bits the processor chooses the arithmetic: bfloat16 if supported. The weight format is always given, because the
# exporter's default for models of a billion parameters and more is 8 bits.
WEIGHT_FORMATS = {"float32": "fp32", "float16": "fp16", "int8": "int8", "int4": "int4"}


class OpenVinoEngine:
    """Holds one pipeline at a time, because a second target at 1B would not fit in memory."""

    def __init__(self, args: WorkerArgs) -> None:
        self.args = args
        self.method: str | None = None
        self.pipeline: Any = None

    def prepare(self, request: Request) -> None:
        if self.method == request.method:
            return
        self.drop()
        options: dict[str, Any] = dict(self._properties(), scheduler_config=_scheduler(self.args))
        if request.method == "draft":
            if self.args.draft.endswith(".gguf"):
                raise ValueError("OpenVINO GenAI does not read draft models from GGUF files")
            dtype = self.args.dtype if self.args.dtype == "float32" else "float16"  # drafts have 16 bits in every engine
            draft = _export(self.args.draft, dtype, self.args.cache_dir)
            options["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", **self._properties())
        elif request.method == "ngram":
            options["prompt_lookup"] = True
        self.pipeline = openvino_genai.LLMPipeline(str(self._target()), "CPU", **options)
        self.method = request.method

    def _target(self) -> Path:
        return _export(self.args.target, self.args.dtype, self.args.cache_dir)

    def _properties(self) -> dict[str, Any]:
        """Return pipeline properties: 16-bit arithmetic where supported (the default), unless float32 is requested."""
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": self.args.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": self._arithmetic(),  # the default on a CPU is 8 bit; with matrix units only bf16 works
        }
        if self.args.dtype == "float32":
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        return properties

    def _arithmetic(self) -> str:
        default: str = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        return "f32" if self.args.dtype == "float32" else default

    def generate(self, prompt: list[int], request: Request) -> Sample:
        config = _generation_config(request)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        clock = ChunkClock()

        def on_tokens(token_ids: Any) -> Any:
            clock.chunk(1 if isinstance(token_ids, int) else len(token_ids))
            return openvino_genai.StreamingStatus.RUNNING

        result = self.pipeline.generate(ids, config, TokenStreamer(on_tokens))
        return clock.sample([int(token) for token in result.tokens[0]])

    def drop(self) -> None:
        self.pipeline, self.method = None, None
        gc.collect()

    def meta(self) -> dict[str, Any]:
        target = self._target()
        size = (target / "openvino_model.bin" if target.is_dir() else target).stat().st_size
        return {"version": openvino_genai.__version__, "arithmetic": self._arithmetic(), "weight_bytes": size}


class TokenStreamer(openvino_genai.StreamerBase):
    """Passes token ids on without decoding them."""

    def __init__(self, on_tokens: Any) -> None:
        super().__init__()
        self.on_tokens = on_tokens

    def write(self, token: Any) -> Any:
        return self.on_tokens(token)

    def end(self) -> None:
        pass


def _scheduler(args: WorkerArgs) -> Any:
    config = openvino_genai.SchedulerConfig()
    config.enable_prefix_caching = False  # every engine prefills the prompt in each repetition
    config.max_num_batched_tokens = max(args.max_len, 256)
    config.max_num_seqs = 1
    return config


def _generation_config(request: Request) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.max_tokens
    config.ignore_eos = True
    config.do_sample = request.temperature > 0
    if config.do_sample:
        config.temperature = request.temperature
        config.rng_seed = request.seed
    if request.method != "plain":
        config.num_assistant_tokens = request.k
    if request.method == "ngram":
        config.max_ngram_size = 3
    return config


def _export(model: str, dtype: str, cache_dir: str) -> Path:
    """Convert a checkpoint once per content and weight format. The folder is moved into place when it is complete.

    GGUF files are returned unchanged.
    """
    source = Path(model).resolve()
    if source.suffix == ".gguf":
        return source
    folder = Path(cache_dir) / "openvino" / f"{source.name}-{dtype}-{content_key(source)}"
    if folder.exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
    command += ["--task", "text-generation-with-past", "--weight-format", WEIGHT_FORMATS[dtype]]
    done = subprocess.run([*command, str(partial)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError("OpenVINO export failed: " + (done.stdout.strip().splitlines() or ["no output"])[-1])
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    serve(OpenVinoEngine)
