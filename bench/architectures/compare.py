"""Compare the greedy output of every method with transformers' own ``generate``, for one tiny model."""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from architectures import tiny
from outrider import LLM, SamplingParams
from outrider.bench.race import first_difference
from outrider.errors import first_line
from outrider.runner.loading import quiet
from outrider.types import OutriderError

LENGTHS = (5, 41, 150)  # prompt lengths in tokens: below, above and far above windows and prefill chunks
NEW_TOKENS = 28
NOISE = 0.04  # noise of a draft model's weights relative to the target's, so that some drafts are accepted
FEWEST_KINDS = 5  # minimum number of different tokens in an output
SEEDS = 4
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "ngram": {"method": "ngram"},
    "draft": {},
    "early-exit": {"method": "early-exit"},
    "low-bit": {"method": "low-bit"},
}


@dataclass
class Result:
    """Result for one architecture."""

    name: str
    verdict: str  # runs, refused, wrong, fails, not built
    reason: str = ""  # if it does not run
    cells: dict[str, str] = field(default_factory=dict)  # method -> same (accepted/drafted), refused: why, differs: where
    seconds: float = 0.0


def compare(name: str, methods: Sequence[str] = tuple(METHODS)) -> Result:
    """Run an architecture or one of ``tiny.VARIANTS`` with ``methods``. Never raises: a failure is a result."""
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            result = _compared(name, methods)
    except OutriderError as error:
        result = Result(name, "refused", str(error))
    except Exception as error:
        result = Result(name, "fails", f"{type(error).__name__}: {first_line(error)}")
    result.seconds = round(time.perf_counter() - started, 1)
    return result


def _compared(name: str, methods: Sequence[str]) -> Result:
    try:
        config = tiny.tiny_config(name)
        first = tiny.tiny_model(config, 0)
    except Exception as error:  # transformers' own refusals
        return Result(name, "not built", f"{type(error).__name__}: {first_line(error)}")
    options: dict[str, Any] = {"compile": "never", "prefill_chunk": 64, "num_draft_tokens": 4}
    options["max_len"] = tiny.ASKED_LENGTH.get(name)
    LLM(copy.deepcopy(first), method="plain", **options)  # refuses unsupported models before the slow generate of transformers
    model, wanted = _worth_comparing(config, first)
    result = Result(name, "runs")
    with tempfile.TemporaryDirectory() as folder:
        source: Any = model
        if tiny.is_multimodal(name):  # load from a folder, like a downloaded model
            model.save_pretrained(folder)
            any_tokenizer().save_pretrained(folder)
            source = folder
        for method in methods:
            drafting = METHODS[method]
            given = {"draft": _draft_of(model)} if method == "draft" else {}
            result.cells[method] = _cell(source, wanted, {**options, **drafting, **given})
    wrong = [method for method, cell in result.cells.items() if cell.startswith("differs")]
    if wrong:
        result.verdict, result.reason = "wrong", f"{wrong[0]}: {result.cells[wrong[0]]}"
    elif result.cells.get("plain", "").startswith("refused"):
        result.verdict, result.reason = "refused", result.cells["plain"].removeprefix("refused: ")
    return result


def prompts() -> list[list[int]]:
    """Return prompts of random tokens with repeated n-grams."""
    draw = random.Random(1)
    texts = []
    for length in LENGTHS:
        text: list[int] = []
        while len(text) < length:
            seen = len(text) > 8 and draw.random() < 0.4
            start = draw.randrange(len(text) - 6) if seen else 0
            text += text[start : start + 6] if seen else [draw.randrange(3, tiny.VOCAB) for _ in range(6)]
        texts.append(text[:length])
    return texts


def _worth_comparing(config: Any, first: PreTrainedModel) -> tuple[PreTrainedModel, list[list[int]]]:
    """Return a model whose outputs have at least ``FEWEST_KINDS`` different tokens (or the best seed), and its outputs."""
    tried: list[tuple[int, PreTrainedModel, list[list[int]]]] = []  # different tokens, model, outputs
    for seed in range(SEEDS):
        if seed > 0:
            config.get_text_config(decoder=True).tie_word_embeddings = config.tie_word_embeddings = False
        model = first if seed == 0 else tiny.tiny_model(config, seed)
        texts = [_generated(model, prompt) for prompt in prompts()]
        tried.append((min(len(set(text)) for text in texts), model, texts))
        if tried[-1][0] >= FEWEST_KINDS:
            break
    _, model, texts = max(tried, key=lambda each: each[0])
    return model, texts


def _generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return the greedy output of transformers' ``generate``."""
    ids = torch.tensor([prompt])
    config = model.generation_config
    assert config is not None
    config.eos_token_id = config.forced_eos_token_id = config.forced_bos_token_id = None
    config.pad_token_id = 0
    generate: Any = model.generate
    out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, num_beams=1)
    return out[0, len(prompt) :].tolist()


def _cell(source: Any, wanted: list[list[int]], options: dict[str, Any]) -> str:
    """Return the table cell for one method."""
    try:
        llm = LLM(copy.deepcopy(source), **options)
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        found = [each.outputs[0].token_ids for each in llm.generate(prompts(), params)]
    except OutriderError as error:
        return f"refused: {error}"
    stats = llm.stats
    for prompt, text, other in zip(itertools.count(1), wanted, found, strict=False):
        if (at := first_difference(text, other)) is not None:
            return f"differs: prompt {prompt}, token {at + 1}"
    return f"same ({stats.num_accepted}/{stats.num_drafts})" if stats.num_drafts else "same"


def _draft_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with noise added to its weights."""
    draft = copy.deepcopy(model)
    torch.manual_seed(7)
    for parameter in draft.parameters():
        parameter.data.add_(torch.randn_like(parameter) * NOISE * parameter.std().nan_to_num())
    return draft


def any_tokenizer() -> PreTrainedTokenizerFast:
    """Return a placeholder tokenizer, because prompts are token ids."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(tiny.VOCAB)}, "0")))
