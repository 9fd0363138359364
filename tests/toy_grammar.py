"""Grammars given by a function that returns the allowed next tokens of an output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rule = Callable[[tuple[int, ...]], Collection[int]]


@dataclass(frozen=True)
class RuleGrammar:
    """``rule`` returns the allowed tokens after an output; no token is allowed after ``eos`` or a forbidden token."""

    rule: Rule
    vocab_size: int
    eos: int

    def matcher(self) -> RuleMatcher:
        return RuleMatcher(self)


@dataclass
class RuleMatcher:
    grammar: RuleGrammar
    num_asked: int = 0

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
        self.num_asked += 1
        grammar, text = self.grammar, (*output, *path)
        for at in range(len(output), len(text)):
            if text[at] == grammar.eos or text[at] not in grammar.rule(text[:at]):
                return None
        mask = torch.zeros(grammar.vocab_size, dtype=torch.bool)
        mask[list(grammar.rule(text))] = True
        return mask
