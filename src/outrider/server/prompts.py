"""Convert texts and chat messages to token ids, in worker processes with time and memory limits."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.engine.config import eos_token_ids
from outrider.engine.prompts import check_takes_tools, template_of
from outrider.errors import OutriderError, PromptTooLong
from outrider.server.pool import WorkerPool

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.server.config import Client, ServerConfig
    from outrider.server.protocol import ChatBody
    from outrider.server.tokenization import TokenizeBody

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a function in another thread

OWN_METHODS = ("encode", "_encode_plus", "apply_chat_template")  # methods of transformers that workers reimplement


def tokenizer_data(llm: LLM) -> dict[str, Any] | None:
    """Return the tokenizer data for workers, or None if the tokenizer needs more than the ``tokenizers`` library."""
    from transformers import PreTrainedTokenizerFast

    found, plain = llm.tokenizer, PreTrainedTokenizerFast
    if not isinstance(found, plain) or any(getattr(type(found), name) is not getattr(plain, name) for name in OWN_METHODS):
        return None
    backend = copy(found.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return {
        "tokenizer": backend.to_str(),
        "split_special_tokens": found.split_special_tokens,
        "template": template_of(found),
        "tool_template": template_of(found, with_tools=True),
        "special_tokens": found.special_tokens_map,
        "vocab_size": max(llm.runner.vocab_size, len(found)),
        "mask_size": llm.runner.vocab_size,
        "eos_token_ids": sorted(eos_token_ids(llm.runner, found)),
    }


class Prompts:
    """Convert prompts and messages to token ids. Texts that are too long for any tokenization to fit are refused first.

    Tokenizers that workers cannot run (written in Python, or with overridden methods) run in the server's helper thread, with
    a limit on size but not on time.
    """

    def __init__(self, llm: LLM, config: ServerConfig, data: Mapping[str, Any] | None, in_helper_thread: InThread) -> None:
        """``data``: of ``tokenizer_data``; ``in_helper_thread`` runs a function in the server's helper thread."""
        self._llm, self._in_helper_thread, self._data, tokenizer = llm, in_helper_thread, data, llm.tokenizer
        self.pool: WorkerPool | None = None
        # The longest token counts characters (for byte-level tokenizers bytes).
        longest = 1 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1)
        self._max_characters = llm.runner.max_len * longest
        if data is not None:
            limits = {"seconds": config.text_timeout, "memory": int(config.worker_memory * 2**30), "nice": 0, "for_texts": True}
            self.pool = WorkerPool("tokenise a text", {**data, **limits}, config.workers, eager=True)

    async def encode(
        self, prompts: Sequence[str] | Sequence[list[int]], client: Client, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of prompts (all strings or all token ids). Raises ``OutriderError`` for an invalid prompt."""
        for prompt in prompts:
            self._check_size(prompt)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts or self.pool is None:
            found: list[list[int]] = await self._in_helper_thread(
                lambda: [self._llm.encode(each, add_special_tokens) for each in prompts]
            )
            return found
        job = {"texts": texts, "add_special_tokens": add_special_tokens}
        return await self._tokenised(job, sum(map(len, texts)), client)

    async def chat(self, body: ChatBody | TokenizeBody, client: Client) -> list[list[int]]:
        """Return one prompt, rendered by the tokenizer's chat template. Raises ``OutriderError`` for invalid messages."""
        messages = [message.for_template() for message in body.messages or ()]
        tools, variables = body.template_tools, dict(body.variables)
        most = self._llm.runner.max_len
        if len(messages) > most:  # every message takes at least one token
            raise PromptTooLong(
                f"the prompt is too long: {len(messages)} messages do not fit into the context of {most} tokens: send fewer"
            )
        calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
        shown = "".join(message["content"] + message.get("reasoning_content", "") for message in messages)
        num_characters = self._check_size(shown + "".join(map(json.dumps, [*calls, *tools, variables])))
        template = None if self._data is None else self._data["tool_template" if tools else "template"]
        if template is None:
            return [await self._in_helper_thread(lambda: self._llm.chat_prompt(messages, tools, variables))]
        if tools:
            check_takes_tools(template)
        job = {"messages": messages, "tools": list(tools), "variables": variables}
        return await self._tokenised(job, num_characters, client)

    async def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Raises ``OutriderError`` without a tokenizer."""
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise OutriderError("the text of token ids needs a tokenizer, and this model has none")
        decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(await self._in_helper_thread(lambda: decode(list(token_ids))))

    async def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's name of each token of a text."""
        assert self._llm.tokenizer is not None  # it has encoded the text
        convert = self._llm.tokenizer.convert_ids_to_tokens
        found: list[str | None] = await self._in_helper_thread(lambda: convert(list(token_ids)))
        return [name or "" for name in found]

    async def _tokenised(self, job: dict[str, Any], num_characters: int, client: Client) -> list[list[int]]:
        assert self.pool is not None
        scheduler = self._llm.engine.scheduler
        answer = await self.pool.do({**job, "max_tokens": scheduler.max_len - 1}, num_characters, client)
        if "too_long" in answer:
            scheduler.check_prompt_len(answer["too_long"])
        return [self._llm.checked_prompt(token_ids, job.get("add_special_tokens", True)) for token_ids in answer["ids"]]

    def _check_size(self, prompt: str | Sequence[int]) -> int:
        """Return the prompt's length. Raises ``OutriderError`` if no tokenization of it can fit into the context."""
        if not isinstance(prompt, str):
            self._llm.engine.scheduler.check_prompt_len(len(prompt))
            return len(prompt)
        if len(prompt) > self._max_characters:
            raise PromptTooLong(
                f"the prompt is too long: it has {len(prompt)} characters, and the context of {self._llm.runner.max_len} "
                f"tokens takes at most {self._max_characters}: shorten it"
            )
        return len(prompt)
