"""Format responses as OpenAI's API does: whole or in chunks, with log-probabilities and usage."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Any, ClassVar

from outrider.engine.logprobs import TokenLogprobs
from outrider.runner.tokenizers import BROKEN, token_bytes
from outrider.server.formats import Preamble
from outrider.server.replies import Part, Reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.engine.detokenizer import Detokenizer
    from outrider.engine.outputs import Chunk, Completion, Emission
    from outrider.engine.stats import GenerationStats


class TokenTexts:
    """Map token ids to their text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: list[bytes] = []

    def load(self) -> None:
        """Decode the whole vocabulary once, which takes about a second for a large one."""
        if self._tokenizer is not None and not self._bytes:
            self._bytes = token_bytes(self._tokenizer)

    def bytes_of(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def decoded(self, token_ids: Sequence[int], skips_special: bool = True) -> str:
        """Return the text of tokens, by default without special ones."""
        if self._tokenizer is None:
            return ""
        options = {"skip_special_tokens": skips_special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(token_ids), **options))

    def text(self, token: int) -> str:
        """Return the token's text: OpenAI's ``bytes:`` notation for an incomplete character, the name for a special token."""
        found = self.bytes_of(token)
        if found or self._tokenizer is None:
            try:
                return found.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
        return str(self._tokenizer.convert_ids_to_tokens(token) or "")


class TokenEnds:
    """Where each token of a choice ends in its text. Counts the tokens of a part of the text."""

    def __init__(self, detokenizer: Detokenizer | None = None) -> None:
        """``detokenizer``: the engine's for this choice, or None without a tokenizer: the text is empty."""
        self._detokenizer = detokenizer
        self._ends: list[int] = []  # number of characters after each token

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Append tokens and return where each one begins. Every token of the choice must be added, in order."""
        begins, end = [], self._ends[-1] if self._ends else 0
        for token in token_ids:
            text = self._detokenizer.feed((token,)) if self._detokenizer is not None else ""
            own = text.lstrip(BROKEN) or text  # an incomplete character of the tokens before may be replaced first
            begins.append(end + len(text) - len(own))
            end += len(text)
            self._ends.append(end)
        return begins

    def count(self, start: int, end: float) -> int:
        """Return the number of tokens after the one that completes the first ``start`` characters and before character ``end``.

        A token that is partly in the text and partly in a marker around it is not counted.
        """
        first = bisect_left(self._ends, start) + 1 if start else 0
        return max(bisect_right(self._ends, end) - first, 0)


def speculation_metrics(stats: GenerationStats) -> dict[str, Any]:
    """Return a request's speculation counts under vLLM's names (``--per-request-spec-decode-metrics summary``).

    A step is a round with drafts; entry j of the histogram counts the steps that accepted exactly j drafts.
    """
    steps = stats.num_drafted_rounds
    histogram = [stats.acceptance_histogram.get(accepted, 0) for accepted in range(max(stats.acceptance_histogram) + 1)]
    histogram[0] -= stats.num_rounds - steps
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / steps,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafts,
        "num_spec_tokens": stats.most_drafts,
    }


@dataclass
class Answer:
    """Response of one call: its choices in order, updated while they are generated."""

    call_id: str
    model: str
    tokens: TokenTexts
    choices: list[Completion] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time()))
    preamble: Preamble | None = None  # before JSON
    delimiters: frozenset[int] = frozenset()  # special tokens that are not skipped in the text
    token_ends: dict[int, TokenEnds] = field(default_factory=lambda: defaultdict(TokenEnds))  # of the choices that need them

    kind: ClassVar[str] = ""
    chunk_kind: ClassVar[str] = ""
    ends_with_done: ClassVar[bool] = True  # whether a complete stream ends with [DONE]
    ping: ClassVar[bytes] = b": ping\n\n"  # keeps a silent stream open: clients ignore such comments

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.call_id, "object": kind, "created": self.created, "model": self.model}

    def response(self) -> dict[str, Any]:
        """Return the complete response."""
        choices = [self.choice(index, completion, is_whole=True) for index, completion in enumerate(self.choices)]
        return {**self.head(self.kind), "choices": choices, **self._usage_and_metrics()}

    def add(self, index: int, emission: Emission) -> Chunk:
        """Append an emission to a choice and return it as a chunk."""
        return self.choices[index].add(emission)

    @property
    def scores_prompts(self) -> bool:
        """Return whether the response contains log-probabilities of the prompts."""
        return False

    def _usage_and_metrics(self) -> dict[str, Any]:
        """Return the usage and, for a single choice that had drafts, vLLM's ``speculative_decoding`` metrics."""
        usage: dict[str, Any] = {"usage": self.usage()}
        if len(self.choices) == 1 and self.choices[0].stats.num_drafted_rounds:
            usage["metrics"] = {"speculative_decoding": speculation_metrics(self.choices[0].stats)}
        return usage

    def usage(self) -> dict[str, Any]:
        """Return token counts. OpenAI's accepted and rejected prediction tokens count drafts."""
        # all samples of a prompt share it, so it counts once
        prompts = {completion.prompt_index: completion for completion in reversed(self.choices)}
        num_prompt = sum(completion.num_prompt_tokens for completion in prompts.values())
        generated = sum(len(completion.token_ids) for completion in self.choices)
        accepted = sum(completion.stats.num_accepted for completion in self.choices)
        drafted = sum(completion.stats.num_drafts for completion in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": generated,
            "total_tokens": num_prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(completion.stats.num_cached for completion in prompts.values())},
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning(),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def num_reasoning(self) -> int:
        """Return the number of tokens of reasoning in all choices."""
        return 0

    def opening(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream."""
        return []

    def events(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the stream chunk with the tokens that one round added to a choice; nothing if they complete nothing."""
        choice = self.choice(index, chunk, is_whole=False)
        is_empty = not any(choice.get(name) for name in ("text", "delta", "logprobs", "finish_reason"))
        return [] if is_empty else [{**self.head(self.chunk_kind), "choices": [choice]}]

    def failure(self, status: int, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the end of a stream that failed. ``status``: of HTTP; ``body``: the error in OpenAI's format."""
        return [body]

    def usage_chunk(self) -> dict[str, Any]:
        """Return the final chunk, which contains the usage and no choices."""
        return {**self.head(self.chunk_kind), "choices": [], **self._usage_and_metrics()}

    def choice(self, index: int, part: Chunk, is_whole: bool) -> dict[str, Any]:
        """Return a choice with the text of a chunk, or of the whole completion."""
        raise NotImplementedError


@dataclass
class Echo:
    """A prompt at the beginning of a response."""

    text: str = ""
    token_ids: Sequence[int] = ()  # only if log-probabilities are wanted
    offsets: Sequence[int] = ()  # where each of them begins
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens after the first, which nothing predicts


@dataclass
class CompletionAnswer(Answer):
    """Response of ``/v1/completions``."""

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    echoes: list[Echo] = field(default_factory=list)  # of each prompt, if the answer begins with it

    @property
    def scores_prompts(self) -> bool:
        return any(echo.token_ids for echo in self.echoes)

    def add(self, index: int, emission: Emission) -> Chunk:
        chunk = super().add(index, emission)
        if emission.prompt_logprobs:
            self.echoes[chunk.prompt_index].logprobs = emission.prompt_logprobs
        return chunk

    def choice(self, index: int, part: Chunk, is_whole: bool) -> dict[str, Any]:
        echo, logprobs = self.echoes[part.prompt_index] if self.echoes else Echo(), None
        if part.logprobs is not None:
            first = [TokenLogprobs(0.0)] if echo.token_ids else []
            logprobs = self._logprobs([*echo.token_ids, *part.token_ids], [*first, *echo.logprobs, *part.logprobs])
            if first:
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
            begins = self.token_ends[index].add(part.token_ids)
            logprobs["text_offset"] = [*echo.offsets, *(len(echo.text) + begin for begin in begins)]
        return _choice(index, part, logprobs, text=echo.text + part.text)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "tokens": [self.tokens.text(token) for token in token_ids],
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [  # N or N + 1: the generated token is always among them
                {self.tokens.text(other): _finite(value) for other, value in [*each.top, (token, each.logprob)]}
                for token, each in zip(token_ids, logprobs, strict=True)
            ],
        }


@dataclass
class ChatAnswer(Answer):
    """Response of ``/v1/chat/completions``."""

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    replies: dict[int, Reply] = field(default_factory=lambda: defaultdict(Reply))  # reader of each choice

    def add(self, index: int, emission: Emission) -> Chunk:
        if index in self.token_ends:
            self.token_ends[index].add(emission.token_ids)
        return super().add(index, emission)

    def num_reasoning(self) -> int:
        return sum(ends.count(*span) for index, ends in self.token_ends.items() for span in self.replies[index].reasoning_spans)

    def opening(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        head = self.head(self.chunk_kind)
        return [{**head, "choices": [_choice(i, choice, None, delta=role)]} for i, choice in enumerate(self.choices)]

    def events(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the chunks. The finish reason of calls has its own: OpenAI's client ends a call at the chunk after it."""
        events = super().events(index, chunk)
        choice = events[0]["choices"][0] if events else {}
        if chunk.finish_reason is None or "tool_calls" not in choice.get("delta", {}):
            return events
        calls = choice | {"finish_reason": None, "stop_reason": None}
        ending = choice | {"delta": {}, "logprobs": None}
        return [{**events[0], "choices": [each]} for each in (calls, ending)]

    def choice(self, index: int, part: Chunk, is_whole: bool) -> dict[str, Any]:
        logprobs = None if part.logprobs is None else self._logprobs(part.token_ids, part.logprobs)
        reply = self.replies[index]
        said = reply.feed(part.text)
        if part.finish_reason is not None:
            said.add(reply.finish())
        content = {"message": said.message()} if is_whole else {"delta": said.delta()}
        choice = _choice(index, part, logprobs, **content)
        if part.finish_reason == "stop" and reply.num_calls and not reply.is_one_call:  # as in OpenAI's API
            choice["finish_reason"] = "tool_calls"
        return choice

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for token, each in zip(token_ids, logprobs, strict=True):
            alternatives = [self._entry(other, value) for other, value in each.top]
            content.append({**self._entry(token, each.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.tokens.text(token), "logprob": _finite(logprob), "bytes": list(self.tokens.bytes_of(token))}


@dataclass(kw_only=True)
class ItemAnswer(ChatAnswer):
    """Response that consists of items in the order of the reply. A stream has events that begin, extend and end items."""

    ends_with_done: ClassVar[bool] = False

    def events(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        reply = self.replies[index]
        events = self._part_events(reply, reply.feed(chunk.text))
        if chunk.finish_reason is not None:
            events += [*self._part_events(reply, reply.finish()), *self._end_events(chunk)]
        return events

    def _part_events(self, reply: Reply, part: Part) -> list[dict[str, Any]]:
        """Return the events of a part, in its order: only the last item may be incomplete."""
        events = []
        for kind, said in part.pieces:
            if kind == "call":
                events += [*self._call_events(said), *([] if reply.is_one_call else self._close_events())]
            else:
                events += self._text_events("message" if kind == "content" else kind, said)
        return events

    def _text_events(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the events that add a text, which may be empty, to an item of this kind."""
        raise NotImplementedError

    def _call_events(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a call, or of its next arguments."""
        raise NotImplementedError

    def _close_events(self) -> list[dict[str, Any]]:
        """Return the events that complete the last item."""
        raise NotImplementedError

    def _end_events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the last events, after those of the last chunk's text."""
        raise NotImplementedError


def _finite(logprob: float) -> float:
    """Clip to OpenAI's minimum of -9999, because JSON has no minus infinity."""
    return max(logprob, -9999.0)


def _choice(index: int, part: Chunk, logprobs: dict[str, Any] | None, **content: str | dict[str, Any]) -> dict[str, Any]:
    reasons = {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
    return {"index": index, **content, "logprobs": logprobs, **reasons}
