"""Text in, text out: the facade that owns a tokenizer and an engine.

Knows prompts and completions; everything about rounds is the engine's.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from outrider.engine.config import (
    build_policy,
    build_proposer,
    build_verifiers,
    eos_token_ids,
    load_tokenizer,
    split_options,
    warn_of_limits,
)
from outrider.engine.detokenizer import DetokenizerFactory
from outrider.engine.engine import Emission, Engine
from outrider.engine.outputs import Chunk, Completion, GenerationInterrupted
from outrider.engine.scheduler import Scheduler
from outrider.engine.stats import GenerationStats
from outrider.runner import ModelRunner
from outrider.types import OutriderError, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.engine.config import ModelSource

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None

SEED_STRIDE = 0x9E3779B97F4A7C15  # keeps the seeds of a prompt's samples apart


class LLM:
    """A target, and whatever rides ahead of it. Not thread-safe.

    >>> llm = LLM("Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B")
    >>> for chunk in llm.stream("def quicksort(", SamplingParams(max_tokens=256)):
    ...     print(chunk.text, end="")
    """

    def __init__(
        self, target: ModelSource | None = None, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
    ) -> None:
        """Loads a folder, a hub id or takes a loaded transformers model; None is the embedded family, its drafts included.

        ``options`` are the fields of ``engine.config.Speculation`` (draft, drafts, method, num_draft_tokens, verifier,
        proposer, draft_tokenizer, method_options, same_text) and of ``runner.RunnerConfig``. Raises ``OutriderError`` for
        unknown ones, for a model that cannot be loaded or rolled back, and for a draft that does not fit.
        """
        if target is None:
            from outrider.family import TARGET, drafts

            target = TARGET
            options = {"drafts": drafts(), **options}
        self.speculation, runner_config = split_options(options)
        self.tokenizer = tokenizer or load_tokenizer(target, runner_config.trust_remote_code)
        self.runner = ModelRunner.load(target, runner_config)
        self.proposer = build_proposer(self.speculation, self.runner, self.tokenizer)
        warn_of_limits(self.speculation, runner_config, self.runner, self.proposer)
        self.policy = build_policy(self.speculation, self.runner, self.proposer)
        scheduler = Scheduler(
            self.runner.max_batch,
            self.runner.max_len,
            sorted(eos_token_ids(self.runner, self.tokenizer)),
            DetokenizerFactory(self.tokenizer) if self.tokenizer is not None else None,
            self.runner.borders,
        )
        verifiers = build_verifiers(self.speculation)
        coupled = self.speculation.same_text
        self.engine = Engine(self.runner, self.proposer, verifiers, self.policy, scheduler, coupled)
        self._ids = itertools.count()
        self._inbox: dict[str, deque[Emission]] = {}  # emissions of requests whose reader was not the one who stepped

    @property
    def stats(self) -> GenerationStats:
        """Totals over everything generated so far."""
        return self.engine.stats

    def warmup(self, k: int, batch: int = 1) -> None:
        """Does now what would make the first rounds slow: compiling, and measuring passes without drafts and with k."""
        hidden = self.proposer.needs_hidden
        self.runner.prepare(hidden)
        self.proposer.warmup(k, batch)
        for width in sorted({1, 1 + self.proposer.num_nodes(k)}):
            self.runner.costs.record_pass(width, batch, 0, self.runner.pass_cost(width, batch, 0, hidden=hidden))

    def price_plain(self) -> None:
        """Measures one pass without drafts where drafts are a fixed number, so that statistics can tell what plain decoding
        would have taken: such rounds never run without drafts and so learn no price of their own."""
        k = self.speculation.num_draft_tokens
        if isinstance(k, int) and k > 0:
            self.runner.costs.record_pass(1, 1, 0, self.runner.pass_cost(1, 1, 0, repeat=1, hidden=self.proposer.needs_hidden))

    def generate(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """One completion for each prompt and sample, prompts in order, samples of a prompt together.

        A request whose target fails ends with ``finish_reason="error"``; if all do, ``OutriderError`` is raised. Ctrl-C raises
        ``GenerationInterrupted``, which carries what was there.
        """
        completions: list[Completion] = []
        try:
            for _ in self._run(prompts, params, completions):
                pass
        except KeyboardInterrupt as interrupt:
            raise GenerationInterrupted(completions) from interrupt
        return completions

    def stream(self, prompts: Prompts, params: Params = None) -> Generator[Chunk, None, None]:
        """The same, as it comes: chunks of several prompts or samples are told apart by their indices."""
        return self._run(prompts, params, [])

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> Completion:
        """The assistant's next message. For a stream: ``llm.stream(llm.chat_prompt(messages))``."""
        return self.generate(self.chat_prompt(messages), params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages ({"role", "content"}) -> the token ids that the tokenizer's chat template makes of them."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise OutriderError("this tokenizer has no chat template: use generate with a plain prompt")
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    def encode(self, prompt: Prompt) -> list[int]:
        """Text or token ids -> token ids. Raises ``OutriderError`` for ids that there are not."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise OutriderError("a text prompt needs a tokenizer: pass one, or give token ids")
            return self.accepted(self.tokenizer.encode(prompt))
        return self._in_vocabulary(list(prompt))

    def accepted(self, token_ids: Sequence[int]) -> list[int]:
        """What a text was tokenised to -> a prompt: where that is nothing, the token with which texts begin."""
        if not token_ids and self.tokenizer is not None and self.tokenizer.bos_token_id is not None:
            token_ids = [self.tokenizer.bos_token_id]
        return self._in_vocabulary(list(token_ids))

    def _in_vocabulary(self, token_ids: list[int]) -> list[int]:
        if any(not isinstance(token, int) or not 0 <= token < self.runner.vocab_size for token in token_ids):
            raise OutriderError(f"a prompt holds token ids outside the vocabulary of {self.runner.vocab_size}")
        return token_ids

    def requests_for(self, token_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """The requests that one prompt and its ``n`` samples become, each with a seed of its own."""
        seed = params.seed if params.seed is not None else random.SystemRandom().getrandbits(63)
        return [self._request(token_ids, params, (seed + i * SEED_STRIDE) % 2**63) for i in range(params.n)]

    def _request(self, token_ids: Sequence[int], params: SamplingParams, seed: int) -> Request:
        generator = torch.Generator().manual_seed(seed)
        matcher = None if params.grammar is None else params.grammar.matcher()
        return Request(f"r{next(self._ids)}", list(token_ids), len(token_ids), params, seed, generator, matcher)

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _run(self, prompts: Prompts, params: Params, completions: list[Completion]) -> Generator[Chunk, None, None]:
        """Runs requests to their end, filling ``completions``. Whatever happens, none of them stays in the engine."""
        open_ids: dict[str, Completion] = {}
        try:
            self._submit(prompts, params, completions, open_ids)
            while open_ids:
                for request_id in [request_id for request_id in open_ids if self._inbox[request_id]]:
                    completion, inbox = open_ids[request_id], self._inbox[request_id]
                    while inbox:
                        chunk = completion.add(inbox.popleft())
                        if chunk.finish_reason is not None:
                            del open_ids[request_id], self._inbox[request_id]
                        yield chunk
                if open_ids and not any(self._inbox[request_id] for request_id in open_ids):
                    self._step()
        finally:
            for request_id, completion in open_ids.items():
                completion.text += self.engine.abort(request_id)
                completion.finish_reason = "abort"
                self._inbox.pop(request_id, None)
        if completions and all(completion.finish_reason == "error" for completion in completions):
            raise OutriderError(completions[0].error or "the target failed")

    def _step(self) -> None:
        for emission in self.engine.step():
            inbox = self._inbox.get(emission.request_id)
            if inbox is not None:
                inbox.append(emission)

    def _submit(self, prompts: Prompts, params: Params, completions: list[Completion], open_ids: dict[str, Completion]) -> None:
        """Queues n requests for each prompt; all prompts are checked before any of them runs."""
        encoded = self._encode_all(prompts)
        shared = params if params is not None else SamplingParams()
        each = [shared] * len(encoded) if isinstance(shared, SamplingParams) else list(shared)
        if len(each) != len(encoded):
            raise OutriderError(f"{len(encoded)} prompts, but {len(each)} sampling parameters: give one, or one for each")
        for prompt_index, (token_ids, chosen) in enumerate(zip(encoded, each, strict=True)):
            requests = self.requests_for(token_ids, chosen)
            for sample_index, request in enumerate(requests):
                completion = Completion(request.request_id, prompt_index, sample_index, len(token_ids))
                self.engine.add(request, fork_of=requests[0].request_id if sample_index else None)
                open_ids[request.request_id] = completion
                self._inbox[request.request_id] = deque()
                completions.append(completion)

    def _encode_all(self, prompts: Prompts) -> list[list[int]]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        each = cast("Sequence[Prompt]", [prompts] if is_one else prompts)
        return [self.encode(prompt) for prompt in each]
