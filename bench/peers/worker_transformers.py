"""Peer `transformers`: `generate`, assisted generation and prompt lookup."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from protocol import ChunkClock, Request, Sample, WorkerArgs, serve
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class ChunkStreamer(BaseStreamer):
    """Records every chunk of tokens; `generate` emits the prompt first."""

    def __init__(self, clock: ChunkClock) -> None:
        self.clock = clock
        self.saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self.saw_prompt:
            self.clock.chunk(value.numel())
        self.saw_prompt = True

    def end(self) -> None:
        pass


class TransformersEngine:
    """Keeps target and draft loaded; method and K are arguments of `generate`."""

    def __init__(self, args: WorkerArgs) -> None:
        torch.set_num_threads(args.threads)
        self.dtype = getattr(torch, args.dtype)
        self.paths = {"target": args.target, "draft": args.draft}
        self.models: dict[str, Any] = {}

    def _model(self, role: str) -> Any:
        if role not in self.models:
            model = AutoModelForCausalLM.from_pretrained(self.paths[role], dtype=self.dtype).eval()
            model.generation_config.eos_token_id = None  # every engine emits exactly max_tokens
            model.generation_config.pad_token_id = 0
            self.models[role] = model
        return self.models[role]

    def prepare(self, request: Request) -> None:
        self._model("target")
        if request.method == "draft":
            _set_schedule(self._model("draft").generation_config, request)

    def generate(self, prompt: list[int], request: Request) -> Sample:
        ids = torch.tensor([prompt])
        options = self._options(request)
        torch.manual_seed(request.seed)
        clock = ChunkClock()
        with torch.inference_mode():
            output = self._model("target").generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_tokens,
                streamer=ChunkStreamer(clock),
                **options,
            )
        return clock.sample(output[0, len(prompt) :].tolist())

    def _options(self, request: Request) -> dict[str, Any]:
        sampled = request.temperature > 0
        options: dict[str, Any] = {"do_sample": sampled}
        if sampled:
            options |= {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        if request.method == "draft":
            options["assistant_model"] = self._model("draft")
        elif request.method == "ngram":
            options |= {"prompt_lookup_num_tokens": request.k, "max_matching_ngram_size": 3}
        return options

    def drop(self) -> None:
        self.models.clear()

    def meta(self) -> dict[str, Any]:
        return {"version": transformers.__version__, "torch": torch.__version__}


def _set_schedule(config: Any, request: Request) -> None:
    """Set constant K, K adapted to acceptance, or K cut at low draft confidence (transformers' default)."""
    config.num_assistant_tokens = request.k
    config.num_assistant_tokens_schedule = "heuristic" if request.schedule == "heuristic" else "constant"
    config.assistant_confidence_threshold = 0.4 if request.schedule == "dynamic" else 0.0


if __name__ == "__main__":
    serve(TransformersEngine)
