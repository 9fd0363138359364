"""Heads of the embedded target: they load, do not change the output, and have a minimum acceptance."""

from __future__ import annotations

import json

import pytest
from toy import outputs_of

from outrider import LLM, SamplingParams, family, native
from outrider.bench.workloads import builtin
from outrider.types import OutriderError

PROMPTS = ["def is_prime(n):\n", "import os\n\ndef read(path):\n", *(prompt.text for prompt in builtin("code", 6))]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
OPTIONS = {"compile": "never", "device": "cpu"}


@pytest.fixture(scope="module")
def plain():
    return [each.token_ids for each in outputs_of(LLM(method="plain", **OPTIONS).generate(PROMPTS, GREEDY))]


needs_kernels = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
# trees of one size: sizes chosen by measured times would make the acceptance depend on what else runs
TREE = ":max_nodes=8"
HEADS = [
    (f"medusa{TREE}", 1.6),
    (f"eagle:draft=eagle1{TREE}", 2.3),
    (f"eagle:draft=eagle3{TREE}", 2.3),
    (f"mtp{TREE}", 2.4),
    ("dflash", 1.8),
]
IN_8_BITS = [
    pytest.param(f"medusa:bits=8{TREE}", 1.6, marks=needs_kernels),
    pytest.param(f"eagle:bits=8{TREE}", 2.3, marks=needs_kernels),
]


@pytest.mark.parametrize(("method", "least"), [*HEADS, *IN_8_BITS])
def test_a_shipped_head_drafts_for_the_embedded_target(method, least, plain):
    llm = LLM(method=method, num_draft_tokens=3, **OPTIONS)
    assert [each.token_ids for each in outputs_of(llm.generate(PROMPTS, GREEDY))] == plain
    assert llm.stats.faults == 0
    assert llm.stats.mean_acceptance_length > least


@pytest.mark.parametrize("method", ["medusa:bits=4", "eagle:bits=3"])
def test_a_head_has_8_bits_or_its_own_precision(method):
    with pytest.raises(OutriderError, match="expected 8 or 16 or None"):
        LLM(method=method, **OPTIONS)


def test_every_shipped_head_has_a_card_with_measurements():
    heads = {name: folder for name, folder in family.drafts().items() if name != "draft"}
    assert set(heads) == {"medusa", "eagle1", "eagle3", "mtp", "dflash"}
    for folder in heads.values():
        measured = json.loads((folder / "measured.json").read_text())
        if "accuracies" in measured:
            first = measured["accuracies"][0][0]
        elif "acceptance_by_position" in measured:
            first = measured["acceptance_by_position"]["greedy"]["by_depth"][0]
        else:
            first = measured["held_out"]["held_1"]
        assert f"{first:.1%}" in (folder / "README.md").read_text()


@pytest.mark.parametrize("method", [*(method for method, _ in HEADS), "suffix+mtp"])
def test_a_conversation_is_not_read_again(method):
    """The drafts of each round are those made without the prefix cache: the head's cached entries are what it would compute."""
    texts, drafts = [], []
    for prefix_cache in (False, True):
        llm = LLM(method=method, num_draft_tokens=3, prefix_cache=prefix_cache, prefill_chunk=64, **OPTIONS)
        rounds: list[list[list[int]]] = []
        llm.engine.observer = lambda result, _, rounds=rounds: rounds.append(result.proposal.token_ids.tolist())
        text = "\n".join(PROMPTS)
        for question in ("\n\ndef last(items):\n", "\n\n# Now a shorter one.\n", "\n\nclass Stack:\n"):
            text += question
            text += outputs_of(llm.generate([text], GREEDY))[0].text
        other = "\n".join(PROMPTS[:-1]) + "\n\nimport re\n"  # a conversation that parts from it
        texts.append([text, outputs_of(llm.generate([other], GREEDY))[0].text])
        drafts.append(rounds)
        assert llm.stats.faults == 0
        share = llm.runner.cache.num_reused / max(llm.runner.cache.num_looked_up, 1)
        assert share > 0.6 if prefix_cache else share == 0
    assert texts[0] == texts[1]
    if "suffix" not in method:  # it drafts in a request's first round if its prompt is cached
        assert drafts[0] == drafts[1]


def test_each_sample_of_a_prompt_can_be_continued_from_the_cache():
    llm = LLM(method="mtp:max_nodes=8", num_draft_tokens=3, prefix_cache=True, max_batch=4, **OPTIONS)
    prompt = llm.encode(PROMPTS[2])
    params = SamplingParams(max_tokens=30, n=3, temperature=0.9, seed=1, ignore_eos=True)
    for sample in llm.generate([prompt], params)[0].outputs:
        before, text = llm.runner.cache.num_reused, [*prompt, *sample.token_ids, 5]
        llm.generate([text], SamplingParams(max_tokens=1))
        assert llm.runner.cache.num_reused - before > len(text) - 8  # the last round's tokens are not in the head's cache
