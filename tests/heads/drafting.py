"""Engines of tiny targets with letters as tokens, shared by the tests of several heads."""

from __future__ import annotations

from tiny_folder import letter_tokenizer
from toy import outputs_of
from toy_grammar import RuleGrammar

from outrider import LLM


def letters_llm(target, method, k=4, *, vocab_size, **options):
    """Return an LLM with coupled sampling that drafts k tokens by ``method``."""
    options = {"compile": "never", "same_text": True, **options}
    return LLM(target, tokenizer=letter_tokenizer(vocab_size, 1), method=method, num_draft_tokens=k, **options)


def texts_of(llm, prompts, params):
    return [completion.token_ids for completion in outputs_of(llm.generate(prompts, params))]


def even_and_odd(vocab_size):
    """Return a grammar of alternating even and odd tokens, which never ends."""
    return RuleGrammar(lambda text: range(len(text) % 2, vocab_size, 2), vocab_size, eos=-1)


def conversation(llm, params):
    """Return the token ids after three turns that each continue the text so far."""
    text = [3 + i * i % 17 for i in range(30)]
    for turn in range(3):
        text += texts_of(llm, [text], params)[0]
        text += [5 + turn, 9, 4]
    return text
