"""Peer llama.cpp: its own server, built for this machine. Checkpoints are converted and quantised with its own tools.

Times are those reported by the server, so that HTTP and JSON are not included. The number of drafts is fixed when the server
starts, which takes one or two seconds because weights are memory-mapped.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from protocol import Request, Sample, WorkerArgs, content_key, serve

HOME = Path(sys.prefix)  # environment made by install.py, which contains llama.cpp/ and build/
TOOLS = HOME / "build" / "bin"
QUANTISED = {"q8_0": "Q8_0", "q4_k_m": "Q4_K_M"}  # llama.cpp's names
UNQUANTISED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
START_SECONDS = 300


class LlamaCppEngine:
    """Runs one server at a time."""

    def __init__(self, args: WorkerArgs) -> None:
        self.args = args
        self.key: tuple[str, int] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.target = model_file(args.target, args.dtype, args.cache_dir)

    def prepare(self, request: Request) -> None:
        key = (request.method, request.k)
        if self.key == key:
            return
        self.drop()
        options = ["--model", str(self.target), *common_options(self.args)]
        if request.method == "draft":
            draft = model_file(self.args.draft, draft_dtype(self.args.dtype), self.args.cache_dir)
            options += ["--spec-type", "draft-simple", "--spec-draft-model", str(draft), "--spec-draft-n-max", str(request.k)]
        elif request.method == "ngram":
            options += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
            options += ["--spec-ngram-simple-size-m", str(request.k)]
        self.port = _free_port()
        command = [str(TOOLS / "llama-server"), *options, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        self._wait()
        self.key = key

    def _wait(self) -> None:
        assert self.process is not None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.process.returncode} while loading; see the log")
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"llama-server was not ready after {START_SECONDS} s")

    def generate(self, prompt: list[int], request: Request) -> Sample:
        body = {
            "prompt": prompt,
            "n_predict": request.max_tokens,
            "ignore_eos": True,
            "temperature": request.temperature,
            "samplers": ["temperature"],
            "seed": request.seed,
            "cache_prompt": False,  # every engine prefills the prompt in each repetition
            "return_tokens": True,
        }
        status, text = self._ask("POST", "/completion", json.dumps(body))
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {text[:200]}")
        return sample_of(json.loads(text), len(prompt))

    def _ask(self, verb: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(verb, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def drop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process, self.key = None, None

    def meta(self) -> dict[str, Any]:
        package = json.loads((HOME / "peer.json").read_text())["source"] if (HOME / "peer.json").is_file() else "unknown"
        return {"version": package, "weight_bytes": self.target.stat().st_size}


def sample_of(answer: dict[str, Any], prompt_tokens: int) -> Sample:
    """Return tokens and times of one answer. The first token is emitted by the prefill pass."""
    times = answer["timings"]
    if times["prompt_n"] != prompt_tokens:
        raise RuntimeError(f"llama-server processed {times['prompt_n']} of {prompt_tokens} prompt tokens")
    first = times["prompt_ms"] / 1000
    return Sample([int(token) for token in answer["tokens"]], first + times["predicted_ms"] / 1000, first, 1)


def common_options(args: WorkerArgs) -> list[str]:
    """Return options for one sequence, without caches between requests and without the web page."""
    threads = str(args.threads)
    options = ["--threads", threads, "--threads-batch", threads, "--ctx-size", str(args.max_len), "--parallel", "1"]
    return [*options, "--no-cache-prompt", "--cache-ram", "0", "--no-ui", "--fit", "off"]


def draft_dtype(dtype: str) -> str:
    """Return the number format of draft models: 16 bits, as in every engine."""
    return "bfloat16" if dtype in QUANTISED else dtype


def model_file(model: str, dtype: str, cache_dir: str) -> Path:
    """Convert a checkpoint once per content and number format. The file is moved into place when it is complete.

    GGUF files are returned unchanged.
    """
    source = Path(model).resolve()
    if source.suffix == ".gguf":
        return source
    if dtype not in QUANTISED | UNQUANTISED:
        raise ValueError(f"llama.cpp does not support dtype {dtype}")
    folder = Path(cache_dir) / "llamacpp" / f"{source.name}-{content_key(source)}"
    file = folder / f"{dtype}.gguf"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    if dtype in QUANTISED:
        whole = model_file(model, "bfloat16", cache_dir)
        command = [str(TOOLS / "llama-quantize"), str(whole), str(partial), QUANTISED[dtype], str(os.cpu_count() or 1)]
    else:
        script = Path(__file__).with_name("convert_llamacpp.py")
        command = [sys.executable, str(script), str(source), "--outfile", str(partial), "--outtype", UNQUANTISED[dtype]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed: " + (done.stdout.strip().splitlines() or ["no output"])[-1])
    partial.rename(file)
    return file


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    """Terminate the server when its worker is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    serve(LlamaCppEngine)
