"""Tokens forced by a grammar do not change the output distribution: by enumeration, and in the engine for every method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_hybrids import hybrid
from toy import outputs_of, reference_probs
from toy_grammar import Rule, RuleGrammar

from outrider import LLM, SamplingParams
from outrider.engine import grammar_drafts
from outrider.engine.grammar_drafts import MAX_OWNERS, GrammarDrafts, TokenGuesser
from outrider.engine.validation import check, without_unusable
from outrider.proposers.base import ScriptedProposer
from outrider.sampling import Sampler
from outrider.sampling.grammar_masks import without_dead_ends
from outrider.types import Context, Proposal, Randomness, Request, Verdict
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.rejection import RejectionVerifier

from . import enumeration
from .drafts import draft_for
from .enumeration import Drafts, Law, Text, distance, draw_drafts, fixed_drafts, round_law
from .test_exact_law import CHAIN, EXACT, TREE
from .test_exact_law import SETTINGS as EVERY_SETTING
from .test_running_engine import DRAFT, METHODS, PROMPT, TARGET, excess_of, tiny_model, tokenizers

# --- one round, by enumeration -----------------------------------------------------------------------------------------------


def small_rule(output: Text) -> Sequence[int]:
    """After the first of four tokens force two: 2, then one that depends on the first. Elsewhere allow all three tokens."""
    at = len(output) % 4
    return [2] if at == 1 else [output[-2] % 2] if at == 2 else [0, 1, 2]


SMALL = RuleGrammar(small_rule, enumeration.VOCAB, eos=-1)
# Settings that can forbid a forced token: masks then fail the request with and without drafts; a grammar excludes min_tokens.
FORBIDDING = ("allowed", "banned", "min_tokens", "greedy, min_tokens")


def constrained(output: Text, params: SamplingParams) -> Request:
    prompt = enumeration.PROMPT
    return replace(enumeration.make_request(prompt + output, params, num_prompt=len(prompt)), matcher=SMALL.matcher())


def constrained_law(law: Law, output: Text, params: SamplingParams, length: int, rule: Rule = small_rule) -> Law:
    """Extend a distribution to ``length`` tokens, or to a dead end, with the constrained target."""
    total = dict(law)
    for short in range(length):
        for text in [text for text in total if len(text) == short]:
            weight, after = total[text], output + text
            if not rule(after):
                continue
            del total[text]
            logits = enumeration.TARGET.logits(enumeration.PROMPT + after)
            masked = replace(params, allowed_token_ids=tuple(rule(after)))
            for token, prob in enumerate(reference_probs(logits, enumeration.PROMPT, after, masked)):
                total[(*text, token)] = total.get((*text, token), 0.0) + weight * prob
    return total


def constrained_sampler(output: Text, params: SamplingParams, batch: int) -> Sampler:
    return Sampler([constrained(output, params)] * batch, enumeration.VOCAB)


def with_forced(output: Text, params: SamplingParams, own: Drafts, drafts_ahead: bool) -> Drafts:
    """Every proposal of ``own``, each with what the grammar forces before and after it, as the engine puts them together."""
    batch, num_nodes = len(own.weights), own.proposal.num_nodes
    requests = [replace(constrained(output, params), request_id=str(b)) for b in range(batch)]
    context = Context(tuple(requests), (9,) * batch, Sampler(requests, enumeration.VOCAB))
    forced = GrammarDrafts(ScriptedProposer(lambda context, k: own.proposal), drafts_ahead=drafts_ahead)
    forced.find_tokens(context)
    return Drafts(forced.propose(context, num_nodes), own.weights)


def round_with_forced(verifier: Verifier, output: Text, params: SamplingParams, drafts: Drafts) -> float:
    """Return the distance between the distributions of a round and of the constrained target. Forced tokens are accepted."""
    texts = enumeration.node_texts(drafts.proposal, output)
    logits = torch.stack([enumeration.TARGET.batch([enumeration.PROMPT + text for text in row]) for row in texts])
    sampler = constrained_sampler(output, params, len(logits))
    target = sampler.probs(logits, drafts.proposal.token_ids, drafts.proposal.parents)
    law = round_law(verifier, drafts, target)
    assert all(text[:2] == (2, 0) for text, weight in law.items() if weight > 0)
    longest = drafts.proposal.num_nodes + 1
    return distance(constrained_law(law, output, params, longest), constrained_law({(): 1.0}, output, params, longest))


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("setting", [name for name in EVERY_SETTING if name not in FORBIDDING])
@pytest.mark.parametrize("drafting", ["none", "point masses", "chain", "tree"])
def test_a_round_with_forced_tokens_is_lossless(drafting: str, setting: str, verifier: Verifier) -> None:
    params, output = EVERY_SETTING[setting], (0,)
    if drafting == "none":
        own = Drafts(Proposal.empty(1), torch.ones(1, dtype=torch.float64))
    elif drafting == "point masses":
        own = fixed_drafts([[1, 1, 0]])
    else:
        own = draw_drafts((*output, 2, 0), params, CHAIN[:2] if drafting == "chain" else TREE[:3])
    drafts = with_forced(output, params, own, drafts_ahead=True)
    num_own, is_chain = own.proposal.num_nodes, own.proposal.parents is None
    num_after = 2 if num_own == 2 and is_chain else 0  # the fourth token after the first one is forced again
    assert drafts.proposal.is_grammar is not None
    assert drafts.proposal.is_grammar.tolist() == [[True] * 2 + [False] * num_own + [True] * num_after] * len(own.weights)
    assert round_with_forced(verifier, output, params, drafts) < EXACT


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("setting", [name for name in EVERY_SETTING if name not in FORBIDDING])
@pytest.mark.parametrize(
    ("parents", "forced"),
    [
        ((-1, 0, 1, 2), [True, True, False, False, True, True]),
        ((-1, 0, 1, 1), [True, True, False, False]),
        ((-1, 0, 1, 2, 2), [True, True, False, False, False]),
    ],
)
def test_drafts_through_a_forced_span_are_lossless(
    parents: Sequence[int], forced: list[bool], setting: str, verifier: Verifier
) -> None:
    """A method that cannot draft after unread tokens samples the span itself, under the masks, and goes on after it."""
    params, output = EVERY_SETTING[setting], (0,)
    own = draw_drafts(output, params, parents, make_sampler=constrained_sampler)
    drafts = with_forced(output, params, own, drafts_ahead=False)
    assert drafts.proposal.is_grammar is not None and drafts.proposal.is_proposed is not None
    assert drafts.proposal.is_grammar.tolist() == [forced] * len(own.weights)
    is_own = [place < len(parents) for place in range(len(forced))]
    assert drafts.proposal.is_proposed.tolist() == [is_own] * len(own.weights)
    assert round_with_forced(verifier, output, params, drafts) < EXACT


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("setting", [name for name in EVERY_SETTING if name not in FORBIDDING])
def test_guesses_are_lossless(setting: str, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two forced tokens, the next ones are guessed, in place of the method's drafts."""
    monkeypatch.setattr(TokenGuesser, "guess", lambda self, before, allowed: 1 if allowed[1] else None)
    monkeypatch.setattr(grammar_drafts, "MAX_DRAFTS", 4)
    params, output = EVERY_SETTING[setting], (0,)
    drafts = with_forced(output, params, Drafts(Proposal.empty(1), torch.ones(1, dtype=torch.float64)), drafts_ahead=True)
    assert drafts.proposal.token_ids.tolist() == [[2, 0, 1, 1]]
    assert round_with_forced(verifier, output, params, drafts) < EXACT


class Cut:
    """A verifier that cuts accepted drafts before a dead end, as the engine does; all rows belong to one request."""

    def __init__(self, inner: Verifier, request: Request) -> None:
        self._inner, self._request = inner, request

    def verify(self, proposal: Proposal, target: torch.Tensor, randomness: Randomness) -> Verdict:
        verdict = self._inner.verify(proposal, target, randomness)
        return without_dead_ends(verdict, proposal, [self._request] * len(verdict.paths))


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("setting", ["greedy", "warm", "repetition", "hot"])
@pytest.mark.parametrize("drafting", ["point masses", "chain", "tree"])
def test_drafts_into_a_dead_end_are_lossless(drafting: str, setting: str, verifier: Verifier) -> None:
    """After 1 then 2 no token is allowed, at any position in the drafts: up to there the distribution is plain decoding's."""

    def rule(output: Text) -> Sequence[int]:
        return [] if output[-2:] == (1, 2) else [0, 1, 2]

    params, output = EVERY_SETTING[setting], (0,)
    matcher = RuleGrammar(rule, enumeration.VOCAB, eos=-1).matcher()
    request = replace(constrained(output, params), matcher=matcher)
    parents = (-1, -1, 1, 2) if drafting == "tree" else CHAIN
    own = fixed_drafts([[1, 2, 0]]) if drafting == "point masses" else draw_drafts(output, params, parents, replacement=False)
    batch = len(own.weights)
    requests = tuple(replace(request, request_id=str(b)) for b in range(batch))
    context = Context(requests, (9,) * batch, Sampler(requests, enumeration.VOCAB))
    checked = without_unusable(check(own.proposal, context.limits, 9, enumeration.VOCAB), context).proposal
    assert params.is_greedy or min(checked.lens) < own.proposal.num_nodes  # some are cut
    laws: dict[Text, float] = {}
    for b in range(batch):  # each row with its own width
        alone = checked.take([b]).narrow([int(checked.lens[b])])
        texts = enumeration.node_texts(alone, output)
        logits = torch.stack([enumeration.TARGET.batch([enumeration.PROMPT + text for text in row]) for row in texts])
        target = Sampler([request], enumeration.VOCAB).probs(logits, alone.token_ids, alone.parents)
        for text, weight in round_law(Cut(verifier, request), Drafts(alone, own.weights[b : b + 1]), target).items():
            laws[text] = laws.get(text, 0.0) + weight
    longest = own.proposal.num_nodes + 1

    def law_of(law: Law) -> Law:
        return constrained_law(law, output, params, longest, rule)

    assert distance(law_of(laws), law_of({(): 1.0})) < EXACT


# --- the running engine ------------------------------------------------------------------------------------------------------

EOS, VOCAB = 2, 8


def rule(output: Text) -> Sequence[int]:
    """Allow 3, a choice, the token that follows from it, 6, a choice, the end of the text."""
    at = len(output)
    return [[3], [0, 1, 5, 7], [], [6], [1, 4], [EOS]][at] if at != 2 else [{0: 1, 1: 4, 5: 5, 7: 3}[output[1]]]


GRAMMAR = RuleGrammar(rule, VOCAB, EOS)
SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties and bias": SamplingParams(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={3: -9.0, 6: 2.0, 4: 1.0},
    ),
}
SAMPLES = 1024


@torch.no_grad()
def exact_law(params: SamplingParams) -> Law:
    law, open_texts = {}, {(): 1.0}
    while open_texts:
        text, weight = open_texts.popitem()
        if text and text[-1] == EOS:
            law[text] = weight
            continue
        logits = TARGET(torch.tensor([PROMPT + list(text)])).logits[0, -1].double().tolist()
        masked = replace(params, allowed_token_ids=rule(text))
        for token, prob in enumerate(reference_probs(logits, PROMPT, text, masked)):
            if prob > 0:
                open_texts[(*text, token)] = weight * prob
    return law


def engine(method: str, **options: object) -> LLM:
    options = {"draft": draft_for(method, TARGET, DRAFT), "num_draft_tokens": 3, "compile": "never", **options}
    return LLM(TARGET, method=method, **tokenizers(VOCAB, method), **options)


@pytest.mark.parametrize(
    ("method", "name"), [(method, "penalties and bias") for method in METHODS] + [("draft", name) for name in SETTINGS][:2]
)
def test_constrained_samples_follow_the_targets_distribution(method: str, name: str) -> None:
    params = SETTINGS[name]
    llm = engine(method, max_batch=256)
    found = outputs_of(llm.generate([PROMPT], replace(params, n=SAMPLES, max_tokens=9, seed=7, grammar=GRAMMAR)))
    assert (
        llm.stats.faults == 0 and llm.stats.num_grammar_tokens >= SAMPLES
    )  # some methods draft the other forced tokens themselves
    law, counts = exact_law(params), Counter(tuple(completion.token_ids) for completion in found)
    assert counts.keys() <= law.keys()
    observed = torch.tensor([float(counts[text]) for text in law], dtype=torch.float64)
    assert excess_of(observed, torch.tensor(list(law.values()), dtype=torch.float64) * SAMPLES) < 1


@pytest.mark.parametrize("k", [0, 1, 4, "auto"])
@pytest.mark.parametrize("same_text", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_constrained_and_free_requests_in_a_batch_equal_plain_decoding(method: str, same_text: bool, k: int | str) -> None:
    """Greedy without same-text mode, and sampled with it: two samples of each kind, with prompts of different lengths."""
    temperatures = (0.0, 1.0) if same_text else (0.0,)
    params = [
        SamplingParams(max_tokens=12, temperature=temperature, seed=5, n=2, grammar=grammar, frequency_penalty=0.3)
        for temperature in temperatures
        for grammar in (GRAMMAR, None)
    ]
    prompts = [PROMPT, [4] * 40, [7, 1, 7], [6]][: len(params)]

    def texts(method: str, k: int | str) -> list[list[int]]:
        llm = engine(method, max_batch=3, num_draft_tokens=k, same_text=same_text)
        found = [completion.token_ids for completion in outputs_of(llm.generate(prompts, params))]
        assert llm.stats.faults == 0 and (llm.stats.num_grammar_tokens > 0) == (k != 0)
        return found

    assert texts(method, k) == texts("plain", 0)


@pytest.mark.parametrize("method", ["ngram", "early-exit", "low-bit", "mtp", "eagle"])
def test_a_recurrent_target_emits_the_same_text(method: str) -> None:
    """Its passes score at most ``max_drafts`` drafts of a request, including forced ones."""
    target = hybrid("qwen3_5_text", vocab_size=VOCAB)
    grammar = RuleGrammar(lambda output: [[6], [3]][len(output) % 2] if len(output) % 9 < 7 else [1, 3, 4, 5], VOCAB, EOS)
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3, n=2, grammar=grammar)

    def texts(method: str, grammar_drafts: bool) -> list[list[int]]:
        options = {"draft": draft_for(method, target), "num_draft_tokens": 3, "max_drafts": 4, "same_text": True}
        llm = LLM(target, method=method, compile="never", grammar_drafts=grammar_drafts, **options)
        found = [completion.token_ids for completion in outputs_of(llm.generate([PROMPT, [5] * 50], params))]
        assert llm.stats.faults == 0 and (llm.stats.num_grammar_tokens > 0) == grammar_drafts
        return found

    assert texts(method, True) == texts("plain", False)


def test_a_larger_vocabulary_and_longer_runs_emit_the_same_text_with_every_method() -> None:
    """Runs are longer than one round can score."""
    target, draft = tiny_model(3, 40, 20.0), tiny_model(4, 40, 20.0, layers=1)
    grammar = RuleGrammar(lambda output: [output[-1] % 7 + 3] if len(output) % 25 else range(3, 40), 40, EOS)
    params = SamplingParams(max_tokens=70, temperature=0.9, seed=5, grammar=grammar)
    texts = {}
    for method in ("plain", "suffix", "draft", "early-exit", "eagle", "suffix+draft"):
        options = {"draft": draft_for(method, target, draft), "num_draft_tokens": 3, "same_text": True, "compile": "never"}
        llm = LLM(target, method=method, **options)
        texts[method] = [completion.token_ids for completion in outputs_of(llm.generate([PROMPT, [9] * 20], params))]
        assert llm.stats.faults == 0 and llm.stats.num_grammar_tokens >= 100 and llm.stats.num_rounds <= 2 * 10
    assert len(texts["plain"][0]) == 70 and all(found == texts["plain"] for found in texts.values())


def test_owners_do_not_learn_from_each_other() -> None:
    """A guess is accepted more often after the same text: statistics would reveal the outputs of others."""
    drafts = GrammarDrafts(ScriptedProposer(lambda context, k: Proposal.empty(1)), drafts_ahead=True)
    request, allowed = constrained((0,), SamplingParams()), torch.tensor([True, True, False, False])

    def guess(owner: str) -> int | None:
        return drafts._guesser(replace(request, request_id=f"{owner}/1")).guess(0, allowed)

    drafts._guesser(replace(request, request_id="ada/0")).learn(0, allowed, 1)
    assert guess("ada") == 1 and guess("bob") is None
    for number in range(MAX_OWNERS):
        guess(str(number))
    assert guess("ada") is None and len(drafts._guessers) == MAX_OWNERS
