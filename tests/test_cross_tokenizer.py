"""A draft with another tokenizer: its distribution over the shared tokens, and its text in the target's tokens."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from engine.test_detokenizer import byte_level, sentencepiece_like
from runner.rounds import make_model, make_request, plain_logits, verdict_of
from runner.test_architectures import small_config
from tiny_folder import END, letter_tokenizer, make_folder, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from toy import outputs_of
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.proposers.cross_tokenizer import METHOD, WINDOW, CrossTokenizerProposer, TokenizerPair, Translation
from outrider.proposers.method import Setting
from outrider.runner import ModelRunner, RunnerConfig
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError

VOCAB = 30
EAGER = RunnerConfig(compile="never")
TEXT = "def add(first, second):\n    return first + second\n\nThe ship left the harbour at dawn, naïve café 12 + 30 = 42 你好! "


def metaspace():
    """Return words with a leading ▁, as in Llama 2 and Gemma: every text gets a leading space."""
    words = ["▁", "▁the", "▁ship", "▁def", "▁re", "turn", "at", "er", *"abcdefghijklmnopqrstuvwxyz(),:+=!0123456789ABCT"]
    vocab = {"<unk>": 0, "<eos>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    pieces = [("t", "u"), ("a", "t"), ("e", "r")]
    for word in ("tu", "tur"):
        vocab[word] = len(vocab)
    merges = [*pieces, ("tu", "r")]
    vocab = {word: token for token, word in enumerate(vocab)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


TOKENIZERS = {
    "large": make_tokenizer(340),
    "small": make_tokenizer(280),
    "characters": byte_level(),
    "metaspace": metaspace(),
    "bytes": sentencepiece_like(),
    "letters": letter_tokenizer(70, 0, pairs=18),
}
PAIRS = [("large", "small"), ("small", "large"), ("large", "metaspace"), ("metaspace", "small"), ("characters", "large")]


# --- committed text in the draft's tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_translation_does_not_depend_on_how_the_text_grows(target, draft):
    ids = TOKENIZERS[target].encode(TEXT * 4, add_special_tokens=False)
    pair, choose = TokenizerPair(TOKENIZERS[target], TOKENIZERS[draft]), random.Random(0)
    growing, at = Translation(pair), 0
    while at < len(ids):
        at = min(at + choose.randrange(1, 9), len(ids))
        text = growing.to_draft_ids(ids[:at])
        assert text is not None
        assert pair.draft.joined(text).lstrip() == pair.target.joined(ids[:at]).lstrip()
    at_once = Translation(pair).to_draft_ids(ids)
    assert growing.to_draft_ids(ids) == at_once == TOKENIZERS[draft].encode(TEXT * 4, add_special_tokens=False)
    assert len(ids) - growing._num_final <= 3 * WINDOW


def test_a_round_translates_only_the_end_of_the_output():
    tokenizer = TOKENIZERS["large"]
    ids = tokenizer.encode(TEXT * 20, add_special_tokens=False)
    pair = TokenizerPair(tokenizer, TOKENIZERS["small"])
    translation, lengths = Translation(pair), []
    encode = pair.draft.encode
    pair.draft.encode = lambda text, is_start: (lengths.append(len(text)), encode(text, is_start))[1]
    translation.to_draft_ids(ids)
    for at in range(200):
        translation.to_draft_ids(ids + ids[: at + 1])
    assert lengths[0] > 1000 and max(lengths[1:]) < 6 * 3 * WINDOW


def test_ids_without_a_token_do_not_stop_the_translation():
    pair = TokenizerPair(TOKENIZERS["large"], TOKENIZERS["small"])
    ids = TOKENIZERS["large"].encode(TEXT * 8, add_special_tokens=False)
    padding = len(pair.target.table) + 3  # a row of the embedding that no token uses
    translation = Translation(pair)
    text = translation.to_draft_ids([*ids[:5], padding, *ids[5:]])
    assert translation._num_final > 5
    assert pair.draft.joined(text) == pair.target.joined(ids)


def test_an_incomplete_character_is_translated_to_byte_tokens():
    pair = TokenizerPair(TOKENIZERS["characters"], TOKENIZERS["small"])
    ids = TOKENIZERS["characters"].encode("say 你好", add_special_tokens=False)
    translation = Translation(pair)
    for at in range(1, len(ids) + 1):
        text = translation.to_draft_ids(ids[:at])
        assert pair.draft.joined(text) == pair.target.joined(ids[:at])


def test_a_draft_without_bytes_waits_for_the_whole_character():
    translation = Translation(TokenizerPair(TOKENIZERS["small"], TOKENIZERS["letters"]))
    ids = TOKENIZERS["small"].encode("你", add_special_tokens=False)
    assert len(ids) > 1 and translation.to_draft_ids(ids[:1]) is None


def test_special_tokens_become_those_of_the_same_role():
    target, draft = make_tokenizer(300), metaspace()
    end, other = target.eos_token_id, draft.eos_token_id
    translation = Translation(TokenizerPair(target, draft))
    ids = [*target.encode("def", add_special_tokens=False), end, *target.encode("the", add_special_tokens=False)]
    text = translation.to_draft_ids(ids)
    assert text == [*draft.encode("def"), other, *draft.encode("the")]


def test_end_of_text_tokens_are_paired_by_name_before_they_are_paired_by_role():
    target, draft = make_tokenizer(300), make_tokenizer(280)
    for each in (target, draft):
        each.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    target.eos_token = "<|im_end|>"
    ends = [each.convert_tokens_to_ids("<|im_end|>") for each in (target, draft)]
    pair = TokenizerPair(target, draft)
    assert pair.specials == {0: 0, ends[0]: ends[1]} and pair.specials_back == {0: 0, ends[1]: ends[0]}
    draft.add_special_tokens({"eos_token": "<|stop|>"})  # the target has no token of this name
    pair = TokenizerPair(target, draft)
    assert pair.specials == {0: 0, ends[0]: ends[1]}
    assert pair.specials_back == {0: 0, ends[1]: ends[0], draft.eos_token_id: ends[0]}
    assert (ends[1], ends[0]) in pair.common and (draft.eos_token_id, ends[0]) not in pair.common


def test_the_drafts_own_bos_token_is_added_once():
    target, draft = make_tokenizer(300), make_tokenizer(280)
    draft.add_special_tokens({"bos_token": "<s>"})
    draft.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", draft.bos_token_id)]
    )
    ids = target.encode("def add", add_special_tokens=False)
    assert Translation(TokenizerPair(target, draft)).to_draft_ids(ids) == draft.encode("def add")
    same = TokenizerPair(draft, draft)
    assert Translation(same).to_draft_ids(draft.encode("def add")) == draft.encode("def add")


# --- drafts in the target's tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_drafted_text_is_tokenised_as_by_the_target(target, draft):
    ids = TOKENIZERS[target].encode(TEXT * 3, add_special_tokens=False)
    pair = TokenizerPair(TOKENIZERS[target], TOKENIZERS[draft])
    translation, exact, rounds = Translation(pair), 0, 0
    for at in range(5, len(ids) - 8, 3):
        text = translation.to_draft_ids(ids[:at])
        # as if the draft generated exactly this text
        follows = pair.target.joined(ids[at : at + 8]).decode(errors="ignore")
        drafted = pair.draft.segment(follows.encode())
        assert text is not None
        back = translation.to_target_ids(ids[:at], drafted)
        assert pair.target.joined(back) == pair.draft.joined(drafted)
        rounds += 1
        exact += back[:4] == ids[at : at + 4]
    assert exact > 0.75 * rounds


def test_a_token_across_the_border_is_split_there():
    """The target has a token "ab", but "a" is already committed, so the draft's "b" must not become "ab"."""
    target = letter_tokenizer(12, 0, pairs=0)
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}, merges=[("a", "b"), ("b", "c")]))
    backend.decoder = decoders.Fuse()
    joined = PreTrainedTokenizerFast(tokenizer_object=backend)
    pair = TokenizerPair(joined, target)
    b, c = pair.draft.ids[b"b"], pair.draft.ids[b"c"]
    translation = Translation(pair)
    translation.to_draft_ids([2, 0])
    assert translation.to_target_ids([2, 0], [b, c, c]) == [1, 2, 2]
    assert translation.to_target_ids([2, 0], [c, b, c]) == [2, 4]


def test_the_drafts_end_of_text_becomes_the_targets():
    target, draft = make_tokenizer(300), metaspace()
    translation = Translation(TokenizerPair(target, draft))
    ids = target.encode("def", add_special_tokens=False)
    translation.to_draft_ids(ids)
    assert translation.to_target_ids(ids, [draft.eos_token_id, 5]) == [target.eos_token_id]


def test_invalid_characters_in_drafts_are_harmless():
    pair = TokenizerPair(TOKENIZERS["characters"], TOKENIZERS["small"])
    ids = TOKENIZERS["characters"].encode("é", add_special_tokens=False)
    lone = pair.draft.ids[b"\xbf"]
    translation = Translation(pair)
    translation.to_draft_ids(ids[:1])
    assert pair.target.joined(translation.to_target_ids(ids[:1], [pair.draft.ids[b"A"], lone])) in (b"", b"A", b"A\xbf")


# --- the proposer -----------------------------------------------------------------------------------------------------------


def twin(seed=0):
    """Return a target and, as draft, its own weights with permuted ids, so that both predict the same."""
    target_tokenizer, draft_tokenizer = letter_tokenizer(VOCAB, 1, pairs=0), letter_tokenizer(VOCAB, 2, pairs=0)
    target = make_model(small_config("llama", vocab_size=VOCAB, tie_word_embeddings=False), seed)
    draft = copy.deepcopy(target)
    pair = TokenizerPair(target_tokenizer, draft_tokenizer)
    with torch.no_grad():
        for of_draft, of_target in pair.common:
            draft.get_input_embeddings().weight[of_draft] = target.get_input_embeddings().weight[of_target]
            draft.lm_head.weight[of_draft] = target.lm_head.weight[of_target]
    assert len(pair.common) == VOCAB
    return target, draft, {"tokenizer": target_tokenizer, "draft_tokenizer": draft_tokenizer}


@pytest.mark.parametrize("same_text", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_differs_only_in_ids_is_fully_accepted(temperature, same_text):
    target, draft, options = twin()
    llm = LLM(
        target, draft=draft, method="cross-tokenizer", num_draft_tokens=3, compile="never", same_text=same_text, **options
    )
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True, seed=3)
    llm.generate([[1, 2, 3], [4] * 9, [5]], params)
    assert llm.stats.faults == 0
    assert llm.stats.num_accepted >= 0.98 * llm.stats.num_drafts


class Drafting:
    """A draft with another vocabulary, and running requests."""

    def __init__(self, temperatures, max_len=256, **params):
        self.model = make_model(small_config("llama", vocab_size=VOCAB, max_position_embeddings=max_len))
        self.tokenizers = letter_tokenizer(VOCAB, 1), letter_tokenizer(VOCAB, 2)
        self.pair = TokenizerPair(*self.tokenizers)
        runner = ModelRunner.load(copy.deepcopy(self.model), EAGER)
        self.proposer = CrossTokenizerProposer(runner, VOCAB, self.pair)
        self.requests = [
            make_request(f"r{b}", [(7 * i + b) % VOCAB for i in range(3 + 5 * b)]) for b in range(len(temperatures))
        ]
        for request, temperature in zip(self.requests, temperatures, strict=True):
            request.params = SamplingParams(temperature=temperature, **params)

    def propose(self, k, limits=None):
        context = Context(tuple(self.requests), tuple(limits or [k] * len(self.requests)), Sampler(self.requests, VOCAB))
        self.proposal = self.proposer.propose(context, k)
        self.context = context
        return self.proposal

    def commit(self, accepted, next_tokens):
        self.proposer.commit(self.context, verdict_of([list(range(count)) for count in accepted], next_tokens))
        for b, request in enumerate(self.requests):
            request.token_ids += [*self.proposal.token_ids[b, : accepted[b]].tolist(), next_tokens[b]]

    def fresh(self, request):
        """Return the committed text in a new draft's tokens."""
        return Translation(self.pair).to_draft_ids(request.token_ids)

    def expected(self, request, drafts, temperature):
        """Return the draft's distribution after text and drafts, restricted to the shared tokens, in the target's ids."""
        own = plain_logits(self.model, self.fresh(request) + drafts)[-1]
        shared = torch.full((VOCAB,), -torch.inf)
        for of_draft, of_target in self.pair.common:
            shared[of_target] = own[of_draft]
        return (shared / temperature).softmax(-1)

    def check(self):
        to_draft = {of_target: of_draft for of_draft, of_target in self.pair.common}
        for b, request in enumerate(self.requests):
            ids = self.proposal.token_ids[b, : int(self.proposal.lens[b])].tolist()
            if request.params.temperature == 0:
                text = self.fresh(request)
                while len(text) < len(self.fresh(request)) + 4 * len(ids):
                    text.append(int(plain_logits(self.model, text)[-1].argmax()))
                said = self.pair.draft.joined(text[len(self.fresh(request)) :])
                assert ids and said.startswith(self.pair.target.joined(ids))
                continue
            for node, token in enumerate(ids):
                expected = self.expected(request, [to_draft[before] for before in ids[:node]], request.params.temperature)
                torch.testing.assert_close(self.proposal.probs[b, node], expected, rtol=1e-3, atol=1e-5)
                assert expected[token] > 0


def test_probs_of_sampled_drafts_are_the_drafts_over_the_common_tokens():
    drafting = Drafting([0.7, 1.0, 1.3])
    assert 15 < len(drafting.pair.common) < VOCAB
    for accepted in ([4, 4, 4], [0, 0, 0], [4, 0, 2], [1, 3, 4]):
        assert drafting.propose(4).lens.tolist() == [4, 4, 4]
        drafting.check()
        drafting.commit(accepted, [10, 11, 12])


def test_greedy_drafts_are_the_drafts_own_text():
    drafting = Drafting([0.0, 0.0])
    for accepted in ([2, 1], [0, 0], [1, 2]):
        proposal = drafting.propose(4)
        assert proposal.probs is None and proposal.lens.min() >= 2
        drafting.check()
        drafting.commit(accepted, [10, 11])


def test_greedy_and_sampled_requests_share_a_batch():
    drafting = Drafting([0.0, 1.0, 0.0])
    for accepted in ([2, 4, 1], [0, 1, 2]):
        proposal = drafting.propose(4)
        for row in (0, 2):  # point masses as one-hots
            hot = proposal.probs[row, : int(proposal.lens[row])]
            assert (hot.max(-1).values == 1).all() and (hot.sum(-1) == 1).all()
        drafting.check()
        drafting.commit(accepted, [10, 11, 12])


def test_limits_and_the_drafts_context_are_respected():
    drafting = Drafting([1.0, 0.0, 1.0], max_len=24)
    assert drafting.propose(3, [3, 1, 0]).lens.tolist() == [3, 1, 0]
    drafting.requests[0].token_ids += [3] * 20
    lens = drafting.propose(3).lens.tolist()
    assert lens[0] == 0
    assert drafting.propose(3, [0, 0, 0]).lens.tolist() == [0, 0, 0]


def test_a_mask_without_common_tokens_gives_no_drafts():
    drafting = Drafting([1.0])
    alone = sorted(set(range(VOCAB)) - {of_target for _, of_target in drafting.pair.common})
    drafting.requests[0].params = SamplingParams(temperature=1.0, allowed_token_ids=tuple(alone))
    assert drafting.propose(3).lens.tolist() == [0]


class Narrow:
    """A grammar that allows the same few tokens at every position."""

    def __init__(self, allowed):
        self.mask = torch.zeros(VOCAB, dtype=torch.bool)
        self.mask[allowed] = True

    def allowed(self, output, path):
        return self.mask


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_without_shared_tokens_does_not_fail(temperature):
    """Without a distribution, every request of the batch would lose its drafts."""
    drafting = Drafting([temperature, 1.0], frequency_penalty=0.1)
    alone = sorted(set(range(VOCAB)) - {of_target for _, of_target in drafting.pair.common})[:2]
    drafting.requests[0].matcher = Narrow(alone)
    proposal = drafting.propose(3)
    assert proposal.lens.tolist() == [3, 3] and set(proposal.token_ids[0].tolist()) <= set(alone)
    assert proposal.probs[0].sum(-1).tolist() == pytest.approx([1, 1, 1])


def test_greedy_requests_with_masks_are_drafted_within_them():
    shared = [of_target for _, of_target in Drafting([0.0]).pair.common]
    drafting = Drafting([0.0], allowed_token_ids=tuple(shared[:3]))
    assert set(drafting.propose(4).token_ids[0].tolist()) <= set(shared[:3])


def test_released_requests_free_their_rows():
    drafting = Drafting([1.0, 0.0])
    for turn in range(6):
        drafting.propose(2)
        drafting.proposer.release([request.request_id for request in drafting.requests])
        for request in drafting.requests:
            request.request_id += str(turn)
    assert not drafting.proposer._translations


# --- selection --------------------------------------------------------------------------------------------------------------


def test_a_named_draft_with_another_tokenizer_is_translated_automatically(tmp_path):
    target = make_folder(tmp_path / "target", seed=1)
    draft = make_folder(tmp_path / "draft", tokenizer=make_tokenizer(300))
    assert LLM(target, draft=draft, compile="never").proposer.name == "cross-tokenizer"
    with pytest.raises(OutriderError, match="or the method 'cross-tokenizer'"):
        LLM(target, draft=draft, method="draft", compile="never")
    same = make_folder(tmp_path / "same")
    assert LLM(target, draft=same, compile="never").proposer.name == "draft"


def test_output_is_unchanged_by_a_draft_folder_with_another_tokenizer(tmp_path):
    target = make_folder(tmp_path / "target", seed=1)
    draft = make_folder(tmp_path / "draft", seed=1, tokenizer=make_tokenizer(300))
    prompts, params = ["def add(", "naïve 你好", "The ship" * 40], SamplingParams(max_tokens=30, ignore_eos=True)
    texts = []
    for options in ({"method": "plain"}, {"draft": draft, "num_draft_tokens": 4}):
        llm = LLM(target, compile="never", **options)
        texts.append([completion.token_ids for completion in outputs_of(llm.generate(prompts, params))])
        assert llm.stats.faults == 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("tokenizer", "draft_tokenizer", "message"),
    [
        (None, letter_tokenizer(VOCAB, 1), "needs the target's tokenizer"),
        (letter_tokenizer(VOCAB, 1), None, "needs the draft's tokenizer"),
        (letter_tokenizer(20, 1, pairs=0), "digits", "no common token"),
    ],
)
def test_an_incompatible_pair_is_rejected_in_one_line(tokenizer, draft_tokenizer, message):
    if draft_tokenizer == "digits":
        draft_tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"1": 0, "2": 1}, merges=[])))
    model = make_model(small_config("llama", vocab_size=VOCAB))
    target = ModelRunner.load(copy.deepcopy(model), EAGER)
    with pytest.raises(OutriderError, match=message) as error:
        METHOD.build(Setting(target, tokenizer, model, draft_tokenizer))
    assert "\n" not in str(error.value)


def test_no_special_token_is_drafted_as_text():
    tokenizer = make_tokenizer(300)
    pair = TokenizerPair(tokenizer, make_tokenizer(280))
    assert END.encode() not in pair.target.ids
    assert (0, 0) in pair.common
