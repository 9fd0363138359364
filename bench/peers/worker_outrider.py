"""Outrider with the same protocol as its peers, through its public API only."""

from __future__ import annotations

import gc
from typing import Any

import torch
from protocol import ChunkClock, Request, Sample, WorkerArgs, serve

import outrider
from outrider import LLM, SamplingParams


class OutriderEngine:
    """Holds one `LLM`, rebuilt when the method or K changes."""

    def __init__(self, args: WorkerArgs) -> None:
        torch.set_num_threads(args.threads)
        self.args = args
        self.key: tuple[str, int | str] | None = None
        self.llm: Any = None

    def prepare(self, request: Request) -> None:
        k: int | str = "auto" if request.schedule == "auto" else request.k
        key = (request.method, k)
        if self.key == key:
            return
        self.drop()
        options: dict[str, Any] = {
            "method": request.method,
            **_numbers(self.args.dtype),
            "max_len": self.args.max_len,
            "max_batch": 1,
            "prefix_cache": False,
            "compile": "always",
        }
        if request.method == "draft":
            options["draft"] = self.args.draft
            if self.args.dtype != "auto":  # by default drafts above 64 MB are rounded to 4 bits; other engines keep 16
                options["method_options"] = {"bits": 16}
        if request.method != "plain":
            options["num_draft_tokens"] = k
        self.llm = LLM(self.args.target, **options)
        self.llm.warmup(request.k)
        self.key = key

    def generate(self, prompt: list[int], request: Request) -> Sample:
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=True,
        )
        token_ids: list[int] = []
        clock = ChunkClock()
        for chunk in self.llm.stream(prompt, params):
            clock.chunk(len(chunk.token_ids))
            token_ids += chunk.token_ids
        return clock.sample(token_ids)

    def drop(self) -> None:
        self.llm, self.key = None, None
        gc.collect()

    def meta(self) -> dict[str, Any]:
        return {"version": outrider.__version__, "torch": torch.__version__}


def _numbers(dtype: str) -> dict[str, str]:
    """Return engine options for a number format. 8- and 4-bit weights are quantised when the checkpoint is loaded."""
    return {"weights": dtype} if dtype in ("int8", "int4") else {"dtype": dtype}


if __name__ == "__main__":
    serve(OutriderEngine)
