"""Bodies and answers of ``POST /tokenize`` and ``POST /detokenize``, as in vLLM. Unknown fields are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from outrider.server.protocol import Body, Messages, Text, TokenIds, Tools, Variables, shown_tools

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.server.config import Client
    from outrider.server.prompts import Prompts


class TokenizeBody(Body):
    """Body of ``POST /tokenize``: a prompt as for completions, or messages as for chat completions."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # default: True for a prompt; of messages the chat template writes them
    return_token_strs: bool = False
    # with messages only
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: Literal[False] = False
    chat_template_kwargs: Variables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if self.prompt is not None and name in self.model_fields_set:
                raise ValueError(f"{name} needs messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens needs prompt: the chat template writes the special tokens of messages")
        return self

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools for the chat template."""
        return shown_tools(self.tools or [])

    @property
    def variables(self) -> dict[str, Any]:
        """The variables for the chat template."""
        return {**self.chat_template_kwargs, "add_generation_prompt": self.add_generation_prompt}


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: Text | None = None
    tokens: TokenIds


async def tokenized(body: TokenizeBody, llm: LLM, prompts: Prompts, client: Client) -> dict[str, Any]:
    """Return the answer of ``POST /tokenize``. Raises ``OutriderError`` for a prompt that is too long or invalid."""
    if body.messages is not None:
        (token_ids,) = await prompts.chat(body, client)
    else:
        (token_ids,) = await prompts.encode([body.prompt or ""], client, body.add_special_tokens is not False)
    names = await prompts.names(token_ids) if body.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": llm.runner.max_len, "tokens": token_ids, "token_strs": names}


async def detokenized(body: DetokenizeBody, prompts: Prompts, client: Client) -> dict[str, Any]:
    """Return the answer of ``POST /detokenize``, special tokens included. Raises ``OutriderError`` for invalid token ids."""
    checked = await prompts.encode([body.tokens], client) if body.tokens else [[]]  # an empty text may have no tokens
    return {"prompt": await prompts.text(checked[0])}
