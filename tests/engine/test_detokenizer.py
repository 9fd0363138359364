"""Streaming text: joined chunks equal the full decode, no chunk has an incomplete character, stop strings are never emitted."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.engine.detokenizer import BROKEN, BytesDetokenizer, DetokenizerFactory, StopScanner, WindowDetokenizer
from outrider.runner.tokenizers import ByteTable

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "naïve café, Größe, 100 €",
    "你好,世界。日本語のテキスト",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 done",
    "mixed 混ぜる 🎉 text\twith\r\nlines",
    "العربية עברית हिन्दी",
]


def byte_level():
    """Return a byte-level BPE so small that most of these characters consist of several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS[:2], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def sentencepiece_like():
    """Return a tokenizer of words with a leading ▁ and bytes. Like Llama 2's, it strips the first space when decoding."""
    words = ["▁def", "▁add", "▁text", "done", "▁"]
    vocab = {"<unk>": 0, "<eos>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for word in words:
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


def other():
    """Return the same tokenizer with a decoder of another kind, for which there is no table of bytes."""
    tokenizer = sentencepiece_like()
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece_like(), "other": other()}


def ids_of(kind, text):
    tokenizer = TOKENIZERS[kind]
    if kind == "byte-level":
        return tokenizer.encode(text, add_special_tokens=False)
    return [2 + byte for byte in text.encode()]


def decode(kind, ids):
    return TOKENIZERS[kind].decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def in_chunks(detokenizer, ids, choose):
    """Feed the ids in rounds of 1 to 6 tokens."""
    chunks, at = [], 0
    while at < len(ids):
        size = choose.randrange(1, 7)
        chunks.append(detokenizer.feed(ids[at : at + size]))
        at += size
    return chunks


def test_each_tokenizer_gets_the_detokenizer_meant_for_it():
    assert isinstance(DetokenizerFactory(TOKENIZERS["byte-level"])([1]), BytesDetokenizer)
    assert isinstance(DetokenizerFactory(TOKENIZERS["sentencepiece"])([1]), BytesDetokenizer)
    assert isinstance(DetokenizerFactory(TOKENIZERS["other"])([1]), WindowDetokenizer)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_chunks_join_to_the_text_without_broken_characters(kind, text):
    ids = ids_of(kind, text)
    assert len(ids) > len(text.split())
    for seed in range(10):
        detokenizer = DetokenizerFactory(TOKENIZERS[kind])([])
        chunks = in_chunks(detokenizer, ids, random.Random(seed))
        assert not any(BROKEN in chunk for chunk in chunks)
        assert "".join(chunks) + detokenizer.flush() == decode(kind, ids) == text


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_decode_as_the_tokenizer_does(seed):
    choose = random.Random(seed)
    tokenizer = TOKENIZERS["byte-level"]
    ids = [choose.randrange(len(tokenizer)) for _ in range(60)]
    detokenizer = DetokenizerFactory(tokenizer)([])
    assert "".join(in_chunks(detokenizer, ids, choose)) + detokenizer.flush() == decode("byte-level", ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_incomplete_last_character_is_emitted_only_by_flush(kind):
    ids = ids_of(kind, "ok 🎉")[:-1]
    detokenizer = DetokenizerFactory(TOKENIZERS[kind])([])
    shown = "".join(detokenizer.feed([token]) for token in ids)
    assert shown == "ok "
    assert set(detokenizer.flush()) == {BROKEN}


@pytest.mark.parametrize("kind", ["sentencepiece", "other"])
def test_invalid_bytes_do_not_hold_text_back_forever(kind):
    detokenizer = DetokenizerFactory(TOKENIZERS[kind])([])
    shown = "".join(detokenizer.feed([2 + 0xFF]) for _ in range(100))
    assert len(shown) >= 80


def test_a_stray_byte_of_sentencepiece_is_one_broken_character():
    """The tokenizers library breaks all characters of a run of byte tokens; earlier ones are already shown here."""
    detokenizer = DetokenizerFactory(TOKENIZERS["sentencepiece"])(ids_of("sentencepiece", "🎉"))
    ids = [*ids_of("sentencepiece", "你"), 2 + 0x80, *ids_of("sentencepiece", "ok")]
    assert "".join(detokenizer.feed([token]) for token in ids) == f"你{BROKEN}ok"


@pytest.mark.parametrize("kind", ["sentencepiece", "other"])
def test_a_leading_space_after_the_prompt_is_kept(kind):
    tokenizer = TOKENIZERS[kind]
    prompt, output = tokenizer.convert_tokens_to_ids(["▁def"]), tokenizer.convert_tokens_to_ids(["▁add", "▁text"])
    detokenizer = DetokenizerFactory(tokenizer)([prompt] if isinstance(prompt, int) else prompt)
    assert detokenizer.feed(output) + detokenizer.flush() == " add text"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_are_skipped_and_added_tokens_are_decoded(kind):
    tokenizer = TOKENIZERS[kind]
    detokenizer = DetokenizerFactory(tokenizer)([])
    assert detokenizer.feed([tokenizer.eos_token_id]) + detokenizer.flush() == ""
    if kind == "byte-level":
        assert detokenizer.feed([tokenizer.convert_tokens_to_ids("<tool>")]) == "<tool>"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_are_kept_on_request(kind):
    tokenizer = TOKENIZERS[kind]
    ids = [*ids_of(kind, "naïve"), tokenizer.eos_token_id, *ids_of(kind, "text"), tokenizer.eos_token_id]
    detokenizer = DetokenizerFactory(tokenizer)([], skip_special_tokens=False)
    text = "".join(detokenizer.feed([token]) for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert text.count(tokenizer.eos_token) == 2


def test_special_tokens_are_named_while_another_thread_adds_tokens_to_the_table():
    tokenizer = TOKENIZERS["sentencepiece"]
    factory = DetokenizerFactory(tokenizer)

    class Growing(ByteTable):
        def items(self):
            for item in super().items():
                self[max(self) + 1]
                yield item

    factory([2, 3])  # the table is of tokens of prompts
    factory._table.__class__ = Growing
    assert factory([], skip_special_tokens=False).feed([tokenizer.eos_token_id]) == "<eos>"


def test_ids_outside_the_tokenizer_decode_to_nothing():
    assert DetokenizerFactory(TOKENIZERS["byte-level"])([]).feed([len(TOKENIZERS["byte-level"]) + 5]) == ""


@pytest.mark.parametrize("seed", range(30))
def test_a_stop_string_ends_the_text_where_a_full_search_finds_it(seed):
    choose = random.Random(seed)
    text = "".join(choose.choice("ab") for _ in range(40))
    stops = ["".join(choose.choice("ab") for _ in range(choose.randrange(2, 7))) for _ in range(choose.randrange(1, 4))]
    scanner, shown = StopScanner(stops), ""
    for at, character in enumerate(text):
        shown += scanner.feed(character)
        done = [text[: at + 1].find(stop) for stop in stops if stop in text[: at + 1]]
        if done:
            assert scanner.stopped_by in stops and shown == text[: min(done)]
            return
        assert scanner.stopped_by is None and text.startswith(shown)
        held = text[len(shown) : at + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)
    assert shown + scanner.flush() == text


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_a_stop_string_counts_if_a_character_that_may_stop_completes_it(seed, keeps):
    choose = random.Random(seed)
    text = "".join(choose.choice("ab") for _ in range(40))
    stops = ["".join(choose.choice("ab") for _ in range(choose.randrange(1, 7))) for _ in range(choose.randrange(1, 4))]
    scanner, shown, least = StopScanner(stops, keeps), "", choose.randrange(12)
    for at, character in enumerate(text, start=1):
        shown += scanner.feed(character, may_stop=at > least)
        ends = [stop for stop in stops if text[:at].endswith(stop) and at > least]
        if ends:
            longest = max(ends, key=len)
            assert scanner.stopped_by == longest and shown == (text[:at] if keeps else text[: at - len(longest)])
            return
        assert scanner.stopped_by is None and text.startswith(shown)
    assert shown + scanner.flush() == text


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_only_tokens_of_the_text_are_looked_up(kind, monkeypatch):
    tokenizer, found = TOKENIZERS[kind], []
    name_of = tokenizer.convert_ids_to_tokens
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", lambda ids: found.append(ids) or name_of(ids))
    factory, ids = DetokenizerFactory(tokenizer), ids_of(kind, "add")
    texts = [factory([]).feed(ids) for _ in range(2)]
    assert texts == ["add"] * 2 and sorted(found) == sorted(set(ids))
