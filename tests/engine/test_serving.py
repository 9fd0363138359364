"""Engine features for serving: K per request, chunked prefill, the prefix cache, memory limits and fair scheduling."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_folder import make_folder
from toy import outputs_of

from outrider import LLM, SamplingParams
from outrider.engine import queue
from outrider.engine.policy import FixedLength
from outrider.engine.queue import FairQueue
from outrider.proposers.base import ScriptedProposer
from outrider.runner.kv_cache import MIN_SHARED_PREFIX, SLACK, CacheShape, KVCache
from outrider.types import OutriderError, Proposal

from .toy import TableRunner, make_engine, make_request, oracle, outputs, run

PROMPTS = [[3, 4, 5], [7], [1, 2, 3, 4, 5, 6, 8, 9]]


def requests(**params):
    return [make_request(f"r{b}", prompt, **({"max_tokens": 23} | params)) for b, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("k", [0, 2, 6])
def test_requests_can_have_their_own_k(k):
    runner = TableRunner()
    asked = requests()
    asked[0].num_draft_tokens, asked[1].num_draft_tokens = 0, 5
    found = run(make_engine(oracle(runner), k, runner=runner), asked)
    assert outputs(found) == outputs(run(make_engine(), requests()))
    longest = [max(len(emission.token_ids) for emission in found[f"r{b}"]) - 1 for b in range(3)]
    assert longest == [0, 5, k]


def test_no_policy_asks_for_more_drafts_than_the_proposer_makes():
    runner = TableRunner()
    proposer = oracle(runner)
    proposer.max_drafts = 3
    found = run(make_engine(proposer, 6, runner=runner), requests())
    assert outputs(found) == outputs(run(make_engine(), requests()))
    assert max(len(emission.token_ids) for emission in found["r0"]) == 4


def test_a_requests_own_k_limits_the_depth_of_trees():
    runner = TableRunner()

    def chain_as_tree(context, k):
        drafts = oracle(runner).propose(context, 4)
        width = drafts.num_nodes
        return Proposal(drafts.token_ids, drafts.lens, None, torch.arange(-1, width - 1).repeat(len(context.requests), 1))

    asked = requests()
    asked[0].num_draft_tokens, asked[1].num_draft_tokens = 0, 2
    proposer = ScriptedProposer(chain_as_tree)
    found = run(make_engine(proposer, 4, runner=runner), asked)
    assert outputs(found) == outputs(run(make_engine(), requests()))
    assert [max(len(emission.token_ids) for emission in found[f"r{b}"]) - 1 for b in range(3)] == [0, 2, 4]


def test_a_long_prompt_does_not_delay_other_requests():
    runner = TableRunner()
    runner.chunk = 4
    engine = make_engine(oracle(runner, 1), 2, runner=runner)
    engine.add(make_request("short", [3, 4], max_tokens=30))
    engine.step()
    engine.add(make_request("long", list(range(1, 17)) * 2, max_tokens=5))
    steps = []
    while engine.has_work:
        steps.append({emission.request_id for emission in engine.step()})
    assert steps[:7] == [{"short"}] * 7 and steps[8] == {"short", "long"}
    wanted = outputs(run(make_engine(), [make_request("long", list(range(1, 17)) * 2, max_tokens=5)]))
    runner.chunk = 4
    assert outputs(run(engine, [make_request("long", list(range(1, 17)) * 2, max_tokens=5)])) == wanted


def test_a_prompt_whose_prefill_fails_does_not_affect_others(monkeypatch):
    runner = TableRunner()
    prefill = runner.prefill

    def failing(ids, texts, hidden):
        if "r1" in ids:
            raise MemoryError("no memory")
        return prefill(ids, texts, hidden)

    monkeypatch.setattr(runner, "prefill", failing)
    found = outputs(run(make_engine(runner=runner), requests()))
    wanted = outputs(run(make_engine(), requests()))
    assert found["r1"][2] == "error"
    assert (found["r0"], found["r2"]) == (wanted["r0"], wanted["r2"])


def test_a_failed_chunk_of_a_single_prompt_is_not_run_again(monkeypatch):
    runner, calls = TableRunner(), []

    def failing(ids, texts, hidden):
        calls.append(ids)
        raise MemoryError(f"no memory {len(calls)}")

    monkeypatch.setattr(runner, "prefill", failing)
    (emission,) = run(make_engine(runner=runner), requests()[:1])["r0"]
    assert calls == [["r0"]] and "no memory 1" in emission.error


def test_after_a_fault_only_later_requests_get_drafts():
    runner = TableRunner(max_len=400)
    good, calls = oracle(runner), []

    def fails_once(context, k):
        calls.append(context.request_ids)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return good.propose(context, k)

    engine = make_engine(ScriptedProposer(fails_once), 3, runner=runner)
    wanted = outputs(run(make_engine(runner=TableRunner(max_len=400)), [make_request("r", [5], max_tokens=300)]))
    for name in ("r", "later"):
        assert outputs(run(engine, [make_request(name, [5], max_tokens=300)]))[name] == wanted["r"]
    assert calls[:2] == [("r",), ("later",)] and engine.stats.faults == 1 and engine.stats.num_accepted > 50


def test_a_proposer_prefills_long_prompts_in_chunks_without_delaying_others():
    runner = TableRunner()
    proposer, asked = oracle(runner), []

    def prefill(requests):
        asked.append([request.request_id for request in requests])
        return [request.request_id == "r0" or len(asked) > 4 for request in requests]

    proposer.prefill = prefill
    policy, limits = FixedLength(3), []
    policy.observe = lambda context, round_: limits.append([limit > 0 for limit in context.limits])
    found = run(make_engine(proposer, policy=policy, runner=runner), requests())
    assert outputs(found) == outputs(run(make_engine(), requests()))
    assert asked == [["r0", "r1", "r2"], *[["r1", "r2"]] * 4]
    assert [True, False, False] in limits  # the policy does not take unread requests for ones without drafts
    assert [len(emission.token_ids) for emission in found["r0"]][:5] == [4] * 5
    assert [len(emission.token_ids) for emission in found["r1"]][:6] == [1, 1, 1, 1, 4, 4]


def test_a_proposer_prefills_nothing_if_no_drafts_are_requested():
    runner, asked = TableRunner(), []
    proposer = oracle(runner)
    proposer.prefill = lambda requests: asked.append(requests) or [True] * len(requests)
    assert outputs(run(make_engine(proposer, 0, runner=runner), requests())) == outputs(run(make_engine(), requests()))
    assert not asked


def test_no_drafts_are_requested_while_a_round_prefills_the_prompt():
    runner = TableRunner()
    runner.short = 4  # r2's eight tokens are prefilled in its first round
    found = run(make_engine(oracle(runner), 3, runner=runner), requests())
    assert outputs(found) == outputs(run(make_engine(), requests()))
    assert [len(found[f"r{b}"][0].token_ids) for b in range(3)] == [4, 4, 1]
    assert [len(emission.token_ids) for emission in found["r2"]][1:5] == [4] * 4


def test_after_an_interrupted_round_the_proposer_prefills_in_chunks_again():
    runner = TableRunner()
    proposer, asked = oracle(runner), []

    def prefill(requests):
        asked.append([request.request_id for request in requests])
        return [True] * len(requests)

    proposer.prefill = prefill
    engine = make_engine(proposer, 3, runner=runner)
    engine.add(make_request("r", [3, 4, 5], max_tokens=23))
    engine.step()
    commit, runner.commit = runner.commit, lambda context, verdict: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    runner.commit = commit
    engine.step()
    assert asked == [["r"], ["r"]]


def test_an_aborted_request_leaves_no_state():
    released = []
    policy = FixedLength(2)
    policy.release = released.extend
    engine = make_engine(runner=TableRunner(), policy=policy)
    for request in requests():
        engine.add(request)
    engine.step()
    engine.abort("r1")
    assert released == ["r1"]
    assert "r1" not in engine.runner.cached


def test_aborting_a_waiting_request_leaves_the_running_batch_unchanged():
    engine = make_engine(runner=TableRunner(max_batch=1))
    for request in requests():
        engine.add(request)
    engine.step()
    sampler = engine.scheduler._sampler
    engine.abort("r1")
    assert sampler is not None and engine.scheduler._sampler is sampler
    assert [entry.request.request_id for entry in engine.scheduler.waiting] == ["r2"]
    engine.abort("r0")
    assert engine.scheduler._sampler is None and not engine.scheduler.running


def test_checking_a_request_makes_no_sampler():
    """A sampler has tensors of the vocabulary's size, and a server checks requests between two events."""
    engine = make_engine()
    engine._make_sampler = None
    engine.check(make_request("r", [3], allowed_token_ids=(3, 4), banned_token_ids=(4,), logit_bias={5: 1.0}, min_tokens=2))


def test_a_prompt_whose_copy_fails_does_not_affect_others(monkeypatch):
    runner = TableRunner()
    monkeypatch.setattr(runner, "fork", lambda *_: 1 / 0)
    engine = make_engine(runner=runner)
    for request in requests():
        engine.add(request)
    engine.step()
    engine.add(make_request("fork", PROMPTS[0], max_tokens=23), fork_of="r0")
    ended = {}
    while engine.has_work:
        for emission in engine.step():
            ended[emission.request_id] = emission.finish_reason
    assert ended == {"r0": "length", "r1": "length", "r2": "length", "fork": "error"}


# --- scheduling -------------------------------------------------------------------------------------------------------------


def order_of(asked):
    """Return the order in which requests (id, client, priority) are admitted, one at a time."""
    engine = make_engine(runner=TableRunner(max_batch=1))
    for request_id, client, priority in asked:
        engine.add(make_request(request_id, [1, 2, 3], max_tokens=2), None, client, priority)
    order = []
    while engine.has_work:
        for emission in engine.step():
            if emission.request_id not in order:
                order.append(emission.request_id)
    return order


def test_samples_waiting_for_their_prompt_do_not_delay_others():
    runner = TableRunner(max_batch=2)
    runner.chunk = 4
    engine = make_engine(runner=runner)
    long = list(range(1, 17)) * 2
    engine.add(make_request("long", long, max_tokens=9))
    engine.add(make_request("sample", long, max_tokens=3), fork_of="long")
    engine.add(make_request("short", [3], max_tokens=5))
    order = []
    while engine.has_work:
        order += [emission.request_id for emission in engine.step() if emission.request_id not in order]
    assert order == ["short", "long", "sample"]


def test_one_client_is_served_first_come_first_served():
    assert order_of([(name, "a", 0) for name in "123456"]) == list("123456")


def test_clients_take_turns_and_priorities_go_first():
    asked = [("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0), ("b2", "b", 0), ("c1", "c", 1)]
    assert order_of(asked) == ["c1", "a1", "b1", "a2", "b2", "a3"]


def test_a_long_prompt_waits_for_short_ones_of_other_clients():
    engine = make_engine()
    for client, length in (("a", 40), ("b", 3)):
        engine.add(make_request(client, [1] * length, max_tokens=2), None, client)
    assert [entry.client for entry in engine.scheduler.waiting] == ["b", "a"]


def num_running(*clients, max_batch=8):
    """Return how many requests of each client run after one step, if each client fills the batch."""
    engine = make_engine(runner=TableRunner(max_batch=max_batch))
    for client in clients:
        for number in range(max_batch):
            engine.add(make_request(f"{client}{number}", [1, 2, 3], max_tokens=99), None, client)
        engine.step()
    names = [entry.client for entry in engine.scheduler.running]
    return [names.count(client) for client in clients]


def test_one_client_leaves_places_for_other_clients():
    assert num_running("a") == [6]
    assert num_running("a", "b") == [6, 2]
    assert num_running("a", max_batch=1) == [1]
    assert num_running("a", max_batch=2) == [2]
    assert num_running("") == [8]  # requests without a client are not limited


def test_the_queue_forgets_clients_without_waiting_requests():
    waiting = FairQueue()
    waiting.push("always", "always", 0, cost=1000)
    for number in range(100):
        waiting.push(number, f"client {number}", 0, cost=1)
        waiting.serve(number)
        waiting.push(f"next {number}", "always", 0, cost=10)
        waiting.serve(next(iter(waiting)))
    assert len(waiting._ends) < 10


def test_a_cancelled_request_costs_its_client_no_turn():
    waiting = FairQueue()
    first, second, third = "a0", "a1", "a2"
    for item in (first, second, third):
        waiting.push(item, "a", 0, cost=100)
    waiting.push("b", "b", 0, cost=101)
    waiting.push("b later", "b", 0, cost=10)
    for _ in range(2):  # the second time nothing happens
        waiting.remove(first)
        assert list(waiting) == ["a1", "b", "b later", "a2"]
    waiting.remove(second)
    waiting.remove(third)
    waiting.push("a3", "a", 0, cost=100)
    assert list(waiting) == ["a3", "b", "b later"]


def test_a_request_waits_no_longer_after_an_earlier_one_was_cancelled():
    waiting = FairQueue()
    waiting.push("a0", "a", 0, cost=1)
    waiting.push("a1", "a", 0, cost=1)
    waiting.push("b", "b", 0, cost=10)
    waiting.serve("b")  # before its turn, as a request whose prompt others wait for
    waiting.remove("a0")
    waiting.push("c", "c", 0, cost=0.5)
    assert list(waiting) == ["a1", "c"]


def test_a_cancelled_request_moves_no_later_one_of_its_client_before_its_turn():
    waiting = FairQueue()
    waiting.push("a0", "a", 0, cost=100)
    waiting.push("urgent", "b", 1, cost=500)
    waiting.serve("urgent")
    waiting.push("a1", "a", 0, cost=10)
    waiting.remove("a0")
    waiting.push("a2", "a", 0, cost=10)
    waiting.push("b", "b", 0, cost=15)
    assert list(waiting) == ["a1", "b", "a2"]


def test_requests_may_be_cancelled_one_by_one_or_together():
    """Whether the queue is read after each of them changes no order, nor the turn of later ones."""
    luck = random.Random(0)
    pushed = [(number, luck.choice("abc"), luck.randrange(2), luck.randrange(1, 50)) for number in range(60)]
    served, gone = luck.sample(range(30), 5), luck.sample(range(30, 50), 12)
    orders = []
    for reads in (False, True):
        waiting = FairQueue()
        for each in pushed[:50]:
            waiting.push(*each)
        for number in served:
            waiting.serve(number)
        for number in gone:
            waiting.remove(number)
            assert not reads or number not in list(waiting)
        for each in pushed[50:]:
            waiting.push(*each)
        orders.append(list(waiting))
    assert orders[0] == orders[1] and len(orders[0]) == 60 - 17


def test_an_item_that_is_put_back_is_the_next_of_its_priority_and_costs_nothing():
    waiting = FairQueue()
    for item in ("a0", "a1"):
        waiting.push(item, "a", 0, cost=100)
    waiting.push("b", "b", 0, cost=150)
    waiting.push("cancelled", "c", 0, cost=1)
    waiting.serve("a0")
    waiting.remove("cancelled")
    waiting.put_back("a0", "a", 0)
    waiting.push("urgent", "c", 1, cost=500)
    assert list(waiting) == ["urgent", "a0", "b", "a1"]
    waiting.serve("a0")
    waiting.put_back("a0", "a", 0)
    waiting.remove("a0")
    waiting.push("a2", "a", 0, cost=60)
    waiting.push("b2", "b", 0, cost=100)
    assert list(waiting) == ["urgent", "b", "a1", "b2", "a2"]


def test_many_requests_are_cancelled_in_linear_time(monkeypatch):
    ranked, rank = [], queue._Place.rank
    monkeypatch.setattr(queue._Place, "rank", lambda place: ranked.append(1) or rank(place))
    engine = make_engine(runner=TableRunner(max_batch=1))
    names = [f"r{number}" for number in range(200)]
    for name in names:
        engine.add(make_request(name, [3, 4]))
    engine.step()
    ranked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(FairQueue, "__iter__", None)  # finding a request does not read the queue
        for name in names[1:-1]:
            engine.abort(name)
    assert len(engine.scheduler.waiting) == 1 and [entry.request.request_id for entry in engine.scheduler.waiting] == ["r199"]
    assert len(ranked) < 400
    engine.abort("r199")
    assert not engine.scheduler.waiting._waiting  # which would keep the requests


def test_a_large_request_of_a_new_client_waits_for_small_ones():
    waiting = FairQueue()
    waiting.push("a0", "a", 0, cost=10)
    waiting.serve("a0")
    waiting.push("large", "new", 0, cost=400)
    for number in range(30):
        waiting.push(f"a{number + 1}", "a", 0, cost=20)
    assert list(waiting).index("large") == 19  # 20 times 20 tokens, of which the last has the same end


def test_work_of_a_higher_priority_does_not_turn_back_the_clock():
    """Otherwise a client that arrives after it waits for as much work of the others."""
    waiting = FairQueue()
    waiting.push("low 0", "low", 0, cost=100)
    waiting.push("low 1", "low", 0, cost=100)
    for number in range(100):
        waiting.push(number, "high", 1, cost=4000)
        waiting.serve(number)
    waiting.push("late", "late", 0, cost=100)
    waiting.serve("low 0")
    served = []
    for number in range(2, 8):
        waiting.push(f"low {number}", "low", 0, cost=100)
        served.append(next(iter(waiting)))
        waiting.serve(served[-1])
    assert "late" in served


# --- with models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["plain", "draft", "early-exit"])
def test_chunked_prefill_and_cached_prefixes_do_not_change_the_output(method, tmp_path):
    target, draft = make_folder(tmp_path / "target"), make_folder(tmp_path / "draft", num_hidden_layers=1)
    options = {"draft": draft, "same_text": True, "compile": "never", "num_draft_tokens": 3}
    shared = "The ship left the harbour at dawn, and nobody on the quay waved. " * 2
    prompts = [shared + end for end in ("for i", "12 + 30", "naïve", "for i in range")] + ["def add(", shared[:70]]
    params = [SamplingParams(max_tokens=12, temperature=t, seed=1) for t in (0.0, 1.0) * 3]
    plain = outputs_of(LLM(target, method="plain", **options).generate(prompts, params))
    serving = LLM(target, method=method, prefill_chunk=16, prefix_cache=True, max_batch=3, **options)
    for _ in range(2):
        found = outputs_of(serving.generate(prompts, params))
        assert [completion.token_ids for completion in found] == [completion.token_ids for completion in plain]
    cache = serving.runner.cache
    assert cache.num_reused > cache.num_looked_up / 2
    if method == "draft":
        assert serving.proposer.draft.cache.num_reused > 0
    assert serving.engine.stats.faults == 0


# --- the cache --------------------------------------------------------------------------------------------------------------


def cache(rows=3, budget=None):
    return KVCache(CacheShape.uniform(1, 1, 2, 2), rows, 400, torch.float32, torch.device("cpu"), budget)


def write(kv, row, text):
    """Simulate a pass: the key of a token is its id."""
    kv.reserve(len(text))
    kv.stores[0][:, row, :, : len(text)] = torch.tensor(text, dtype=torch.float32)[:, None]
    kv.cached_lens[row] = len(text)


def ended(kv, name, text):
    write(kv, kv.row_with_prefix(name, text), text)
    kv.retire([name])
    kv.release([name])


def test_a_request_reuses_the_longest_cached_prefix():
    kv = cache()
    shared = list(range(MIN_SHARED_PREFIX))
    ended(kv, "a", [*shared, 90, 91, 92])
    ended(kv, "b", [*shared, 90, 77])
    row = kv.row_with_prefix("c", [*shared, 90, 91, 50])
    assert kv.cached_lens[row] == MIN_SHARED_PREFIX + 2
    assert kv.stores[0][0, row, 0, : MIN_SHARED_PREFIX + 2, 0].tolist() == [*shared, 90, 91]
    assert (kv.num_reused, kv.num_looked_up) == (2 * MIN_SHARED_PREFIX + 3, 3 * MIN_SHARED_PREFIX + 8)
    other = kv.row_with_prefix("d", [*shared, 90, 91, 92, 93])  # c's row was copied, not taken over
    assert kv.cached_lens[other] == MIN_SHARED_PREFIX + 3 and other != row


def test_a_running_request_shares_its_prefix():
    kv = cache()
    text = list(range(40))
    first = kv.row_with_prefix("a", text)
    write(kv, first, text)
    second = kv.row_with_prefix("b", [*range(30), 99, 98])
    assert second != first and kv.cached_lens[second] == 30 and kv.cached_lens[first] == 40


def test_what_a_running_request_has_not_processed_and_its_drafts_are_no_prefix():
    kv = cache()
    text = list(range(40))
    row = kv.row_with_prefix("a", text)
    write(kv, row, text[:20])  # the first chunk
    assert kv.longest_prefix("b", [*text, 50]) == (row, 20)
    # A draft model counts its drafts as cached until the round is committed.
    write(kv, row, [*text, 50, 51])
    assert kv.longest_prefix("b", [*text, 50, 51, 52]) == (row, 40)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_limit_of_the_prefix_is_used_in_full(lookahead):
    kv = cache()
    kv.lookahead = lookahead
    ended(kv, "a", list(range(40)))
    assert kv.longest_prefix("b", list(range(40)), limit=20)[1] == 20


def test_a_finished_request_is_continued_rather_than_a_running_one_copied():
    kv = cache()
    text = list(range(41))
    rows = [kv.row_with_prefix(name, text) for name in ("runs", "ends")]
    for row in rows:
        write(kv, row, text[:-1])  # the last token is not processed yet
    kv.retire(["ends"])
    assert kv.row_with_prefix("next", [*text, 50]) == rows[1]


def test_requests_of_different_owners_share_no_prefix():
    kv = cache()
    text = list(range(40))
    ended(kv, "ann/r0", text)
    write(kv, kv.row_with_prefix("ann/r1", [*text, 50]), [*text, 50])  # one row is kept, another runs
    assert kv.cached_lens[kv.row_with_prefix("bob/r2", [*text, 60])] == 0
    assert kv.longest_prefix("ann/r3", [*text, 60])[1] == 40 and kv.longest_prefix("cy/r4", [*text, 60]) == (None, 0)


def test_the_last_prompt_token_is_never_taken_from_the_prefix_cache():
    kv = cache()
    ended(kv, "a", list(range(40)))
    assert kv.cached_lens[kv.row_with_prefix("b", list(range(30)))] == 29


def test_the_least_recently_used_prefix_is_evicted_first():
    kv = cache(rows=2)
    for start in (0, 100):
        ended(kv, f"r{start}", list(range(start, start + 30)))
    again = [*range(30), 7, 7]
    write(kv, kv.row_with_prefix("again", again), again)
    kv.retire(["again"])
    kv.release(["again"])
    kv.row_with_prefix("new", list(range(200, 230)))
    assert kv.cached_lens[kv.row_with_prefix("other", list(range(30)))] == 29
    assert kv.num_reused == 30 + 29


def test_a_prefix_of_a_longer_text_is_copied_into_the_least_recently_used_row():
    kv = cache(rows=2)
    for name, start in (("shared", 0), ("other", 100)):
        ended(kv, name, list(range(start, start + 60)))
    row = kv.row_with_prefix("new", [*range(30), 99])
    assert kv.cached_lens[row] == 30 and kv.stores[0][0, row, 0, :30, 0].tolist() == [*range(30)]
    assert kv.longest_prefix("again", list(range(61)))[1] == 60


def test_a_prefix_of_a_hardly_longer_text_is_continued_in_its_row():
    kv = cache(rows=2)
    for name, start in (("mine", 0), ("other", 100)):
        ended(kv, name, list(range(start, start + 40)))
    kv.row_with_prefix("next", [*range(40 - MIN_SHARED_PREFIX + 1), 99])
    assert kv.longest_prefix("again", list(range(100, 141)))[1] == 40


def test_a_row_was_last_used_when_its_request_ended():
    kv, texts = cache(rows=2), {"first": list(range(40)), "second": list(range(100, 140))}
    for name, text in texts.items():
        write(kv, kv.row_with_prefix(name, text), text)
    for name in ("second", "first"):
        kv.retire([name])
    kv.row_with_prefix("new", list(range(200, 230)))
    assert kv.longest_prefix("next", [*texts["first"], 50])[1] == 40


def test_a_copied_prefix_does_not_roll_back_its_source():
    kv = cache()
    for name, length in (("source", 30), ("sample", 40)):
        write(kv, kv.row(name), list(range(length)))
    kv.copy_prefix("source", "sample", 29)
    assert kv.cached_len("sample") == 40
    kv.copy_prefix("source", "other", 29)
    assert kv.cached_len("other") == 29


def test_without_kept_prefixes_a_finished_row_is_free_and_empty():
    kv = cache()
    kv.keeps_prefixes = False
    text = list(range(40))
    row = kv.row_with_prefix("a", text)
    write(kv, row, text)
    kv.retire(["a"])
    assert kv.row_with_prefix("b", text) == row and kv.cached_lens[row] == 0


def test_a_text_too_short_to_be_shared_takes_no_row_from_a_prefix():
    kv = cache(rows=2)
    for name, length in (("long", 40), ("short", MIN_SHARED_PREFIX - 1)):
        ended(kv, name, list(range(length)))
    kv.row_with_prefix("new", list(range(100, 130)))
    assert kv.longest_prefix("next", list(range(41)))[1] == 40


def test_the_cache_of_a_failed_request_is_not_reused():
    kv = cache()
    row = kv.row_with_prefix("a", list(range(40)))
    write(kv, row, list(range(40)))
    kv.release(["a"])
    assert kv.cached_lens[kv.row_with_prefix("b", list(range(40)))] == 0


def test_memory_is_reserved_before_admission():
    kv = cache(rows=8, budget=2 * (100 + SLACK) * 16)  # 16 bytes per token
    assert kv.admit("a", 100) and kv.admit("b", 100) and not kv.admit("c", 10)
    kv.release(["a"])
    assert not kv.admit("c", 200) and kv.admit("c", 100)


def test_the_cache_never_exceeds_its_budget():
    budget = 3 * (100 + SLACK) * 16
    kv = cache(rows=8, budget=budget)
    generator, under_way = torch.Generator().manual_seed(0), {}
    for number in range(120):
        length = int(torch.randint(20, 300, (), generator=generator))
        while not kv.admit(f"r{number}", length):
            name = next(iter(under_way))
            kv.retire([name])
            kv.release([name])
            del under_way[name]
        text = [number % 7, *range(length - 1)]
        write(kv, kv.row_with_prefix(f"r{number}", text), text)
        under_way[f"r{number}"] = text
        assert sum(store.nbytes for store in kv.stores) <= budget
        for name, known in under_way.items():
            row = kv.row(name)
            assert kv.stores[0][0, row, 0, : len(known), 0].tolist() == known


@pytest.mark.parametrize("change", ["slots", "rows", "compaction"])
def test_a_cache_of_fixed_size_is_unchanged(change, monkeypatch):
    """With keys and values of different sizes, writes would exceed the smaller one."""
    kv = cache(rows=4, budget=8 * (100 + SLACK) * 16)
    write(kv, kv.row("a"), list(range(40)))
    write(kv, kv.row("b"), list(range(40)))
    empty, left, before = torch.empty, iter([True]), kv.stores
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options) if next(left, False) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        {"slots": lambda: kv.reserve(300), "rows": lambda: kv.row("c"), "compaction": lambda: kv._compact(100)}[change]()
    assert kv.stores is before and kv.cached_len("a") == 40


def test_a_cache_at_its_budget_is_not_reallocated_every_token():
    kv, sizes = cache(rows=4, budget=4 * (100 + SLACK) * 16), set()
    for name in "abcd":
        kv.row(name)
    for slots in range(1, 380):
        kv.reserve(slots)
        sizes.add(kv.capacity)
    assert max(sizes) >= 379 and len(sizes) <= 5


def test_max_len_is_limited_by_memory():
    assert cache(budget=(100 + SLACK) * 16).max_len == 100
    with pytest.raises(OutriderError, match="kv_memory"):
        cache(budget=SLACK * 16)


def test_a_failed_reservation_does_not_block_the_queue(monkeypatch, caplog):
    runner = TableRunner()

    def admit(request_id, num_tokens):
        if request_id == "r1":
            raise MemoryError("not enough")
        return True

    monkeypatch.setattr(runner, "admit", admit)
    assert outputs(run(make_engine(runner=runner), requests())) == outputs(run(make_engine(), requests()))
    assert "cannot reserve memory for request r1: not enough" in caplog.text


def test_requests_that_are_prefilled_again_keep_their_reservation(monkeypatch):
    runner, reserved = TableRunner(), {}
    monkeypatch.setattr(runner, "admit", lambda request_id, num_tokens: reserved.setdefault(request_id, num_tokens) > 0)
    monkeypatch.setattr(runner, "release", lambda ids, own=runner.release: (own(ids), [reserved.pop(name, 0) for name in ids]))
    engine = make_engine(runner=runner)
    for request in requests():
        engine.add(request)
    engine.step()
    monkeypatch.setattr(runner, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert len(engine.scheduler.running) == 3
    assert reserved == {request.request_id: request.num_prompt_tokens + 23 for request in requests()}


def test_requests_wait_until_there_is_memory(monkeypatch):
    runner = TableRunner()
    places: set[str] = set()

    def admit(request_id, num_tokens):
        if len(places) < 2:
            places.add(request_id)
        return request_id in places

    monkeypatch.setattr(runner, "admit", admit)
    monkeypatch.setattr(runner, "retire", lambda ids: places.difference_update(ids))
    engine = make_engine(runner=runner)
    for request in requests():
        engine.add(request)
    engine.step()
    assert [entry.request.request_id for entry in engine.scheduler.running] == ["r0", "r1"]
    assert [entry.request.request_id for entry in engine.scheduler.waiting] == ["r2"]
    while engine.has_work:
        engine.step()


def test_an_entry_that_depends_on_the_next_token_needs_it_in_common():
    """The cache of a head that joins each token's features with the next token."""
    kv = cache()
    kv.lookahead = 1
    text = list(range(40))
    row = kv.row_with_prefix("a", text)
    kv.reserve(39)
    kv.cached_lens[row] = 39
    kv.retire(["a"])
    kv.release(["a"])
    assert kv.cached_lens[kv.row_with_prefix("same", [*text, 50, 51])] == 39  # token 39 is the next of the last entry
    kv.retire(["same"])
    kv.release(["same"])
    assert kv.cached_lens[kv.row_with_prefix("parts", [*range(30), 99, 98])] == 29
