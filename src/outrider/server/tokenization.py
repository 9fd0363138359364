"""Bodies of ``POST /tokenize`` and ``POST /detokenize``, as in vLLM. Unknown fields are refused."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from outrider.server.protocol import Body, Messages, Text, TokenIds, Tools, Variables, shown_tools


class TokenizeBody(Body):
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
    model: Text | None = None
    tokens: TokenIds
