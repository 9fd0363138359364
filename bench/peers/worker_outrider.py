"""Our own engine, behind the same protocol as its peers and through its public API only."""

from __future__ import annotations

import gc
from typing import Any

import torch
from protocol import ChunkClock, Request, Sample, WorkerArgs, serve

import outrider
from outrider import LLM, SamplingParams


class OutriderEngine:
    """One `LLM` at a time, built anew where the method or K changes."""

    def __init__(self, args: WorkerArgs) -> None:
        torch.set_num_threads(args.threads)
        self.args = args
        self.key: tuple[str, int] | None = None
        self.llm: Any = None

    def prepare(self, request: Request) -> None:
        key = (request.method, request.k)
        if self.key == key:
            return
        self.drop()
        options: dict[str, Any] = {"method": request.method}
        if request.method == "draft":
            if self.args.draft is None:
                raise ValueError("method draft needs --draft")
            options["draft"] = self.args.draft
        if request.method != "plain":
            options["num_draft_tokens"] = request.k
        if self.args.dtype != "auto":
            options["dtype"] = self.args.dtype
        self.llm = LLM(self.args.target, **options)
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
        dtype = getattr(self.llm, "dtype", None)
        chosen = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
        return {"version": getattr(outrider, "__version__", "unknown"), "torch": torch.__version__, **chosen}


if __name__ == "__main__":
    serve(OutriderEngine)
