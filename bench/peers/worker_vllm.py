"""Peer vLLM (CPU build): one process per method and K, because both are fixed when the engine is built."""

from __future__ import annotations

import os
from typing import Any

from protocol import ChunkClock, Request, Sample, WorkerArgs, serve


class VllmEngine:
    """vLLM in this process, stepped manually so that the first chunk can be timed."""

    def __init__(self, args: WorkerArgs) -> None:
        _set_environment(args)
        from vllm import LLM, __version__

        self.args = args
        self.version = __version__
        self.requests = 0
        self.llm: Any = LLM(
            model=args.target,
            dtype=args.dtype,
            max_model_len=args.max_len,
            max_num_seqs=1,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,  # every engine prefills the prompt in each repetition
            speculative_config=_speculative(args),
            disable_log_stats=True,
        )

    def prepare(self, request: Request) -> None:
        if (request.method, request.k) != (self.args.method, self.args.k):
            raise ValueError(f"this process was built for {self.args.method} with K = {self.args.k}")

    def generate(self, prompt: list[int], request: Request) -> Sample:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            seed=request.seed if request.temperature > 0 else None,
        )
        engine = self.llm.llm_engine
        self.requests += 1
        token_ids: list[int] = []
        clock = ChunkClock()
        engine.add_request(str(self.requests), TokensPrompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                token_ids = list(output.outputs[0].token_ids)
                clock.chunk(len(token_ids))
        return clock.sample(token_ids)

    def drop(self) -> None:
        self.llm = None

    def meta(self) -> dict[str, Any]:
        return {"version": self.version}


def _set_environment(args: WorkerArgs) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")  # 0.32 cannot load its saved code on a CPU
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _speculative(args: WorkerArgs) -> dict[str, Any] | None:
    if args.method == "draft":
        return {"method": "draft_model", "model": args.draft, "num_speculative_tokens": args.k}
    if args.method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": args.k, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return None


if __name__ == "__main__":
    serve(VllmEngine)
