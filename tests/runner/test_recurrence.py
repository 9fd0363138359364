"""Recurrent layers: operators compared with each other and with transformers, and rollback of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hybrids import PROMPTS, hybrid
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from outrider import native
from outrider.runner import ModelRunner, RunnerConfig, recurrence
from outrider.runner.state_cache import StateCache, StateKey, StateShape, StateShapes, grouped

REFERENCES = {
    "short_conv": recurrence.reference_short_conv,
    "delta_scan": recurrence.reference_delta_scan,
    "selective_scan": recurrence.reference_selective_scan,
}
LENS, BASES, SLOTS = (5, 1, 30), (7, 0, 3), 6
TOKENS = sum(LENS)


def requests() -> tuple[Tensor, Tensor, Tensor]:
    """Return three requests of a pass, in rows 2, 1 and 0 of the cache."""
    return torch.tensor([2, 1, 0]), torch.tensor(BASES), torch.tensor(LENS).cumsum(0)


def inputs(name: str) -> tuple[tuple[Any, ...], Tensor, tuple[Any, ...]]:
    """Return an operator's arguments before the states, the states, and the arguments after the requests."""
    torch.manual_seed(0)
    if name == "short_conv":
        return (torch.randn(1, TOKENS, 70), torch.randn(70, 4), torch.randn(70), True), torch.randn(2, 3, SLOTS + 4, 70), ()
    if name == "selective_scan":
        rows = (torch.randn(1, TOKENS, 70), torch.rand(1, TOKENS, 70), -torch.rand(70, 8), *torch.randn(2, 1, TOKENS, 8))
        return rows, torch.randn(2, 3, SLOTS, 70, 8), ()
    query, key = torch.randn(2, 1, TOKENS, 2, 8)
    rows = (query, key, torch.randn(1, TOKENS, 4, 70), -torch.rand(1, TOKENS, 4, 8), torch.rand(1, TOKENS, 4))
    return rows, torch.randn(2, 3, SLOTS, 4, 8, 70), (8**-0.5, True)


@pytest.mark.parametrize("name", REFERENCES)
def test_the_kernel_equals_the_reference(name: str) -> None:
    if not native.load():
        pytest.skip("no C++ compiler")
    rows, states, rest = inputs(name)
    own, others = states.clone(), states.clone()
    expected = REFERENCES[name](*rows, own, 1, *requests(), *rest)
    found = getattr(torch.ops.outrider, name)(*rows, others, 1, *requests(), *rest)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(others, own, atol=1e-5)
    assert torch.equal(others[0], states[0])  # another layer's states


@pytest.mark.parametrize("name", REFERENCES)
def test_a_token_gives_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    """Also after a rollback: one pass over all tokens, then the last three again from the ring, then one by one."""
    rows, states, rest = inputs(name)
    run = getattr(torch.ops.outrider, name)
    row, tokens = torch.tensor([1]), 9

    def of(start: int, stop: int) -> list[Any]:
        return [x[:, start:stop].contiguous() if isinstance(x, Tensor) and x.shape[:2] == (1, TOKENS) else x for x in rows]

    def passed(start: int, stop: int) -> Tensor:
        out: Tensor = run(*of(start, stop), states, 0, row, torch.tensor([start]), torch.tensor([stop - start]), *rest)
        return out

    whole = passed(0, tokens)
    assert torch.equal(passed(tokens - 3, tokens), whole[:, tokens - 3 :])
    for token in range(tokens - 3, tokens):
        assert torch.equal(passed(token, token + 1), whole[:, token : token + 1])


def test_the_delta_rule_equals_transformers() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 40, 2, 16)
    value, g, beta = torch.randn(1, 40, 4, 16), -torch.rand(1, 40, 4), torch.rand(1, 40, 4)
    every = [x.repeat_interleave(2, 2) for x in (query, key)]  # releases before 5.23 require as many key heads as value heads
    expected, _ = qwen.torch_chunk_gated_delta_rule(*every, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    states = torch.zeros(1, 1, 4, 4, 16, 16)
    zero = torch.zeros(1, dtype=torch.long)
    decay = g[..., None]
    found = recurrence.reference_delta_scan(
        query, key, value, decay, beta, states, 0, zero, zero, torch.tensor([40]), 0.25, True
    )
    assert torch.allclose(found, expected, atol=1e-5)


def test_states_older_than_the_ring_are_not_usable() -> None:
    shapes = StateShapes(*grouped({StateKey(0, 0, False): StateShape((2,)), StateKey(0, 0, True): StateShape((3,), 4)}))
    cache = StateCache(shapes, max_drafts=4, device=torch.device("cpu"))  # 6 states
    cache.keep_rows([None, None])
    assert [store.shape for store in cache.stores] == [(1, 2, 6, 2), (1, 2, 10, 3)]
    cache.record_write([0], [12], [20])
    assert [cache.num_usable(0, length) for length in (20, 15, 14, 3)] == [20, 15, 0, 0]
    cache.copy(0, 1)
    assert cache.num_usable(1, 14) == 0
    cache.record_write([1], [0], [14])  # another request
    assert cache.num_usable(1, 14) == 14


def test_the_next_turn_continues_from_stored_states() -> None:
    runner = ModelRunner.load(hybrid("qwen3_5_text"), RunnerConfig(compile="never", prefix_cache=True, max_drafts=8))
    text = PROMPTS[1]
    with torch.inference_mode():
        fresh = runner.extend(["a"], [text])
        runner.retire(["a"])
        again = runner.extend(["b"], [[*text[:-3], 1, 2, 3, 4]])  # three tokens back: within the ring
        assert runner.cache.num_reused == len(text) - 3
        runner.release(["b"])
        back = runner.extend(["c"], [[*text[:20], 1, 2]])  # too far back: prefilled from the start
        assert runner.cache.num_reused == len(text) - 3
        runner.release(["c"])
        assert torch.equal(runner.extend(["d"], [text]), fresh)
    assert not torch.equal(again, fresh)
    assert not torch.equal(back, fresh)


def test_an_attribute_with_the_name_of_a_replaced_function_is_left_alone() -> None:
    """Code of a model repository may store the function in its layers."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.causal_conv1d_fn(x)

    model = torch.nn.Sequential(Layer())
    model[0].causal_conv1d_fn = torch.neg
    recurrence.bind(model)
    assert torch.equal(model(torch.ones(1)), -torch.ones(1))
