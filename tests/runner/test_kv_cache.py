"""After every commit the cache equals that of a fresh forward pass over the committed tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from outrider.proposers.draft_model import DraftOptions, load_draft
from outrider.proposers.method import Setting
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.kv_cache import CacheShape, KVCache, LayerShape
from outrider.runner.layouts import shared_chunk
from outrider.runner.loading import cache_argument
from outrider.runner.longrope import LongRows
from outrider.runner.state_cache import StateKey, StateShape, StateShapes, grouped
from outrider.runner.survey import survey_without_weights
from outrider.types import Context, OutriderError

from .rounds import Rounds, contents, force_padding, make_model, make_text, proposal_of, untouched, verdict_of
from .test_architectures import small_config, start

SHAPE = CacheShape.uniform(num_layers=2, num_kv_heads=2, key_dim=3, value_dim=5)


def fresh(model, text):
    """Return keys and values of a plain forward pass: [L, Hkv, T, D] each."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([text]), **{cache_argument(model): cache}, use_cache=True)
    return torch.stack([layer.keys[0] for layer in cache.layers]), torch.stack([layer.values[0] for layer in cache.layers])


def assert_cache_holds_the_text(rounds, but_last=1):
    for request in rounds.requests:
        text = request.token_ids[: len(request.token_ids) - but_last]
        assert rounds.runner.cache.cached_len(request.request_id) == len(text)
        for got, expected in zip(contents(rounds.runner.cache, request.request_id), fresh(rounds.model, text), strict=True):
            torch.testing.assert_close(got.float(), expected, rtol=1e-4, atol=1e-4)


def test_cache_equals_a_plain_forward_after_chains_and_tree_paths():
    rounds = start("llama")
    rounds.step([[5, 6, 7], [8], []], [[0, 1, 2], [], []], [1, 2, 3])
    assert_cache_holds_the_text(rounds)
    trees = [[-1, -1, 1, 0, 2], [-1, 0, 0], [-1, -1, -1]]
    rounds.step([[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]], [[1, 2, 4], [0, 2], [2]], [1, 2, 3], trees)
    assert_cache_holds_the_text(rounds)
    rounds.step([[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]], [[0, 3], [0, 1], []], [1, 2, 3], trees)
    assert_cache_holds_the_text(rounds)


def test_a_released_row_is_reused():
    rounds = start("llama")
    rounds.step([[5, 6], [8], []], [[0], [], []], [1, 2, 3])
    rounds.runner.release(["r1", "r9"])
    rounds.requests[1].token_ids[:] = make_text(25, 99)
    rounds.requests[1].request_id = "new"
    rounds.step([[5, 6], [8], []], [[0], [0], []], [1, 2, 3])
    assert_cache_holds_the_text(rounds)


def test_contents_survive_more_requests_and_longer_sequences():
    model = make_model(small_config("llama", max_position_embeddings=600))
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never", max_batch=5))
    rounds = Rounds(runner, model, [make_text(9, 0)])
    rounds.step([[1]], [[0]], [2])
    for number in range(1, 5):  # rows grow 1, 2, 4, 5; slots 256 to 512
        rounds.requests += Rounds(runner, model, [make_text(100 * number - 3, number)]).requests
        rounds.requests[-1].request_id = f"n{number}"
        rounds.step([[1, 2]] * (number + 1), [[0]] * (number + 1), [3] * (number + 1))
    assert_cache_holds_the_text(rounds)
    assert runner.cache.capacity < 600 + 65


def test_drafts_scored_but_not_committed_survive_a_growing_cache():
    rounds = start("llama", lengths=(20,))
    context = Context(tuple(rounds.requests), (2,), None)
    rounds.runner.score(context, proposal_of([[5, 6]]))
    rounds.runner.cache.row("another")
    rounds.runner.cache.reserve(300)
    rounds.runner.commit(context, verdict_of([[0, 1]], [7]))
    rounds.requests[0].token_ids += [5, 6, 7]
    assert_cache_holds_the_text(rounds)


def test_fork_copies_the_cached_prefix_and_then_diverges():
    rounds = start("llama", lengths=(20,))
    rounds.step([[5, 6]], [[0]], [7])
    for name in ("f1", "f2"):
        rounds.runner.fork("r0", name, 100)
        twin = Rounds(rounds.runner, rounds.model, [rounds.requests[0].token_ids]).requests[0]
        twin.request_id = name
        assert rounds.runner.cache.cached_len(name) == len(twin.token_ids) - 1
        rounds.requests.append(twin)
    rounds.step([[1], [2], [3, 4]], [[0], [], [0, 1]], [8, 9, 10])
    rounds.step([[1], [2], [3, 4]], [[0], [], [0, 1]], [8, 9, 10])
    assert_cache_holds_the_text(rounds)


def test_a_fork_and_a_rollback_of_an_unknown_request_take_no_row():
    """A draft model is not asked about every request that a round commits."""
    rounds = start("llama", max_batch=1, lengths=(4,))
    rounds.runner.release(["r0"])
    assert not rounds.runner.fork("r0", "f1", 3)
    rounds.runner.rollback("r0", 5)
    rounds.runner.cache.row("f1")


def test_more_requests_than_rows_raise_without_affecting_running_ones():
    rounds = start("llama", max_batch=2, lengths=(4, 5))
    rounds.step([[1], [2]], [[0], []], [3, 4])
    with pytest.raises(OutriderError, match="more than 2 concurrent requests: raise max_batch"):
        rounds.runner.cache.row("third")
    rounds.step([[1], [2]], [[0], []], [3, 4])
    assert_cache_holds_the_text(rounds)


def test_a_sequence_beyond_the_context_raises_in_one_line():
    rounds = start("llama", lengths=(65,))
    with pytest.raises(OutriderError, match="65 tokens exceeds the context of 64"):
        rounds.step([[]], [[]], [1])


def test_max_len_bounds_the_context():
    assert start("llama", max_len=30, lengths=(30,)).runner.max_len == 30
    with pytest.raises(OutriderError, match="31 tokens exceeds the context of 30"):
        start("llama", max_len=30, lengths=(31,)).step([[]], [[]], [1])


def test_a_long_draft_in_a_batch_with_a_request_at_its_limit_succeeds():
    rounds = start("llama", lengths=(63, 15), max_len=64)
    rounds.step([[], []], [[], []], [1, 2])
    rounds.runner.release(["r1"])
    rounds.requests[1].token_ids[:] = make_text(15, 3)
    rounds.step([[], list(range(1, 49))], [[], list(range(48))], [1, 2])


def test_commit_without_a_score_raises():
    rounds = start("llama", lengths=(5,))
    context = Context(tuple(rounds.requests), (0,), None)
    with pytest.raises(RuntimeError, match="without the score"):
        rounds.runner.commit(context, verdict_of([[]], [1]))


def test_a_repeated_score_reports_hidden_states_of_prefilled_tokens():
    """If another request of the batch failed, a score is repeated for tokens that are already cached."""
    rounds = start("llama", lengths=(40, 5))
    runner, context = rounds.runner, Context(tuple(rounds.requests), (2, 2), None)
    texts = [request.token_ids for request in rounds.requests]
    while not all(runner.prefill(context.request_ids, texts, (1,))):
        pass
    first, again = (runner.score(context, proposal_of([[5, 6], [7]]), (1,)) for _ in range(2))
    for b, length in enumerate((39 + 1 + 2, 4 + 1 + 1)):
        assert again.hidden[1][b].shape[0] == length
        torch.testing.assert_close(again.hidden[1][b], first.hidden[1][b])
    runner.commit(context, verdict_of([[0], []], [7, 8]))
    for request, tokens in zip(rounds.requests, ([5, 7], [8]), strict=True):
        request.token_ids += tokens
    assert [states.shape[0] for states in runner.score(context, proposal_of([[], []]), (1,)).hidden[1]] == [1, 1]


@pytest.mark.parametrize(
    ("unread", "counts"),
    [
        ([1000], [256]),
        ([1000, 50], [206, 50]),
        ([0, 1000, 300], [0, 128, 128]),
        ([300, 300, 300], [256, 0, 0]),
        ([100, 300, 40], [100, 116, 40]),
        ([20, 30], [20, 30]),
        ([0, 0], [0, 0]),
    ],
)
def test_prefill_chunk_is_shared_by_waiting_requests(unread, counts):
    assert shared_chunk(unread, 256) == counts
    assert sum(shared_chunk(unread, 1)) == min(1, sum(unread))


def test_a_short_prompt_prefills_together_with_a_long_one():
    rounds = start("llama", lengths=(60, 25))
    texts = [request.token_ids for request in rounds.requests]
    found = [rounds.runner.prefill(["r0", "r1"], texts) for _ in range(4)]
    assert found == [[False, False], [False, True], [False, True], [True, True]]
    rounds.step([[5, 6], [7]], [[0], []], [1, 2])
    assert_cache_holds_the_text(rounds)


def test_a_prompt_that_fits_the_last_chunk_is_left_to_its_first_round():
    rounds = start("llama", lengths=(50, 20, 5), prefill_chunk=48)
    runner, ids, texts = rounds.runner, ["r0", "r1", "r2"], [request.token_ids for request in rounds.requests]
    rounds.hidden = (1,)
    found = [
        (runner.prefill(ids, texts, (1,)), runner.cache.cached_len("r0"), runner.is_prefilled(ids, texts)) for _ in range(2)
    ]
    assert found == [([False, True, True], 29, [False, False, True]), ([True, True, True], 29, [False, False, True])]
    shapes, run = [], runner.passes.run
    runner.passes.run = lambda tokens, *args: shapes.append(tokens.shape[1]) or run(tokens, *args)
    rounds.step([[5, 6], [7], [8]], [[0, 1], [], [0]], [1, 2, 3])
    assert shapes == [21 + 2 + 20 + 1 + 5 + 1]
    assert_cache_holds_the_text(rounds)


def test_padded_passes_prefill_before_the_score(monkeypatch):
    force_padding(monkeypatch)
    rounds = start("llama", lengths=(40, 5), prefill_chunk=64)
    texts = [request.token_ids for request in rounds.requests]
    assert rounds.runner.prefill(["r0", "r1"], texts) == [True, True]
    assert rounds.runner.is_prefilled(["r0", "r1"], texts) == [True, True]
    assert rounds.runner.cache.cached_len("r0") == 39


def test_a_path_is_gathered_in_order():
    cache = KVCache(SHAPE, 3, 100, torch.float32, torch.device("cpu"))
    row = cache.row("a")
    cache.reserve(20)
    keys, values = cache.stores
    keys[:] = torch.arange(cache.capacity).view(1, 1, 1, -1, 1).float()
    values[:] = -keys[..., :1]
    before = keys.clone()
    cache.gather_path(row, 10, [1, 2, 5])
    assert keys[1, row, 1, 8:16, 0].tolist() == [8, 9, 11, 12, 15, 13, 14, 15]
    assert values[0, row, 0, 10:13, 4].tolist() == [-11, -12, -15]
    cache.gather_path(row, 0, [0, 1, 2])
    cache.gather_path(row, 0, [])
    assert torch.equal(keys[:, row, :, :10], before[:, row, :, :10])


def test_cache_memory_grows_and_shrinks_with_use():
    cache = KVCache(SHAPE, 64, 100_000, torch.float32, torch.device("cpu"))
    assert [store.numel() for store in cache.stores] == [0, 0]
    cache.row("a")
    cache.reserve(10)
    assert [store.shape for store in cache.stores] == [(2, 1, 2, 256, 3), (2, 1, 2, 256, 5)]


def test_the_memory_of_a_row_includes_its_recurrent_states():
    states = StateShapes(*grouped({StateKey(0, 0, False): StateShape((4,)), StateKey(0, 0, True): StateShape((3,), 4)}))
    shape = CacheShape.of({1: LayerShape(2, 3, 5)}, states=states)
    cache = KVCache(shape, 1, 1000, torch.float16, torch.device("cpu"))
    cache.row("a")
    cache.reserve(10)
    assert cache.row_bytes(cache.capacity) == sum(tensor.nbytes for tensor in cache.tensors)


def test_the_memory_limit_of_the_target_does_not_shorten_the_drafts_context():
    model, config = make_model(small_config("llama")), RunnerConfig(kv_memory=2e-5, compile="never")
    target = ModelRunner.load(untouched(model), config)
    assert target.max_len < 64
    assert load_draft(Setting(target, draft=untouched(model)), DraftOptions()).max_len == 64


def test_growing_keeps_the_drafts_of_a_large_tree():
    cache = KVCache(SHAPE, 3, 1000, torch.float32, torch.device("cpu"))
    row = cache.row("a")
    cache.reserve(256)
    cache.cached_lens[row] = 5
    cache.stores[0][:, row] = torch.arange(256).view(1, 1, -1, 1)
    cache.reserve(257, 200)
    assert cache.capacity > 256 and torch.equal(cache.stores[0][0, row, 0, :205, 0], torch.arange(205.0))


def test_a_wide_chunk_of_one_request_does_not_widen_the_rows_beyond_what_was_admitted():
    rounds = start("llama", lengths=(60, 30))
    rounds.runner.prefill(["r0"], [rounds.requests[0].token_ids])
    reserved = []
    rounds.runner.cache.reserve = reserved.append
    rounds.runner.layouts.chain([[5], [6] * 30], [0, 1], [59, 0])
    assert reserved == [60]


def test_the_flags_of_long_rows_move_with_the_rows():
    budget = 1200 * CacheShape.uniform(1, 1, 8, 8).floats_per_token * 4
    cache = KVCache(CacheShape.uniform(1, 1, 8, 8), 4, 400, torch.float32, torch.device("cpu"), budget)
    long_rows = LongRows(100, 4, torch.device("cpu"))
    cache.on_compact = long_rows.keep_rows
    assert cache.admit("long", 200) and cache.admit("other", 120) and cache.admit("short", 120)
    rows, lens = [cache.row(name) for name in ("long", "other", "short")], (150, 90, 100)
    cache.reserve(200)
    long_rows.update(rows, [range(length) for length in lens], cache.cached_lens)
    for row, length in zip(rows, lens, strict=True):
        cache.cached_lens[row] = length - 1
    cache.release(["long", "other"])
    assert cache.admit("next", 300) and cache.row("short") == 0
    long_rows.update([0], [range(101)], cache.cached_lens)  # it crosses the border: its keys have the short frequencies
    assert cache.cached_lens[0] == 0 and long_rows.is_long[0]


@pytest.mark.parametrize("grow", ["slots", "rows", "compact"])
def test_layers_of_several_shapes_and_shared_layers_are_stored_correctly(grow):
    first, second = LayerShape(2, 3, 5), LayerShape(1, 4, 4)
    shape = CacheShape.of({0: first, 1: second, 3: first}, shared={4: 1, 5: 3})
    assert shape.layer_places == ((0, 0), (1, 0), None, (0, 1), (1, 0), (0, 1))
    assert shape.floats_per_token == 2 * 2 * 8 + 8
    budget = 400 * shape.floats_per_token * 4
    cache = KVCache(shape, 4, 1000, torch.float32, torch.device("cpu"), budget if grow == "compact" else None)
    row = cache.row("a")
    cache.reserve(20)
    cache.cached_lens[row] = 5
    for number, store in enumerate(cache.stores):
        store[:, row] = torch.arange(store.shape[3]).view(1, 1, -1, 1) + 100 * number
    if grow == "slots":
        cache.reserve(300)
    elif grow == "rows":
        cache.row("b")
    else:
        cache.admit("a", 20)
        cache.row("b")
        cache.release(["b"])
        assert cache.admit("c", 100)
    for number, store in enumerate(contents(cache, "a")):
        assert store.shape[1:] == (((2, 5, 3), (2, 5, 5), (1, 5, 4), (1, 5, 4))[number])
        assert torch.equal(store[0, 0, :, 0], torch.arange(5) + 100.0 * number)
    cache.gather_path(cache.row("a"), 1, [1])
    assert [store[0, 0, 1, 0].item() for store in contents(cache, "a")] == [2, 102, 202, 302]


@pytest.mark.parametrize(
    "model_type, shape",
    [
        ("llama", (2, 2, 8, 8)),
        ("gpt2", (2, 4, 8, 8)),
        ("deepseek_v3", (2, 4, 16, 12)),
    ],
)
def test_the_shape_is_the_models_own(model_type, shape):
    config = small_config(model_type)
    assert survey_without_weights(config, AutoModelForCausalLM._model_mapping[type(config)]) == CacheShape.uniform(*shape)


def test_a_cache_that_grew_in_a_pass_can_be_written_to_outside_of_one():
    cache = KVCache(CacheShape.uniform(1, 1, 2, 2), 2, 64, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        cache.row("a")
        cache.reserve(16)
    cache.stores[0].normal_()
    with torch.inference_mode():
        cache.stores[1].zero_()
    cache.cached_lens[cache.row("a")] = 3
    cache.gather_path(cache.row("a"), 1, [1])
    cache.copy_prefix("a", "b", 3)


def test_admission_of_a_long_request_does_not_grow_the_rows_before_it_needs_them():
    shape = CacheShape.uniform(1, 1, 8, 8)
    cache = KVCache(shape, 4, 2000, torch.float32, torch.device("cpu"), 3000 * shape.floats_per_token * 4)
    for name in "abcd":
        assert cache.admit(name, 100)
        cache.row(name)
    cache.reserve(200)
    cache.release(list("bcd"))
    rows, slots = cache.num_rows, cache.capacity
    assert cache.admit("long", 1200) and cache.num_rows < rows  # compacted
    assert cache.capacity == slots
    cache.reserve(1200)
    assert cache.capacity >= 1200
