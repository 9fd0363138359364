"""Trees are as large as worthwhile: for given costs, and for costs learned by a real runner."""

from __future__ import annotations

import pytest
from heads.writers import HIDDEN, write_eagle3, write_medusa
from tiny_folder import make_folder

from outrider import LLM, SamplingParams
from outrider.proposers.tree_sizes import REFRESH, TreeCosts, TreeSizes
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.cost_book import CostBook
from outrider.types import Context, Request

ACCEPTANCE = [(0.6, 0.2, 0.1)] * 3


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("priced")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4}
    make_folder(folder / "target", **sizes)
    write_medusa(folder / "medusa", 320, 3)
    write_eagle3(folder / "eagle3", 320, 100)
    return folder


@pytest.fixture
def runner(home):
    return ModelRunner.load(home / "target", RunnerConfig(compile="never", device="cpu"))


def context(batch=1):
    requests = tuple(Request(str(b), [1] * 9, 9, SamplingParams(), 0) for b in range(batch))
    return Context(requests, (9,) * batch, None)  # type: ignore[arg-type]


def test_the_best_size_has_the_most_tokens_per_second():
    passes = [1.0, 1.2, 1.4, 1.6, 1.8]
    # 1/1, 1.5/1.2, 1.8/1.4, 1.9/1.6, 1.95/1.8 tokens per second
    assert TreeCosts(1, 0.0, passes).best_size([0.5, 0.3, 0.1, 0.05]) == (2, pytest.approx(1.8 / 1.4))
    # the cost of drafting does not depend on the size, so scoring more of it is worthwhile
    assert TreeCosts(1, 4.0, passes).best_size([0.5, 0.3, 0.1, 0.05])[0] == 3
    assert TreeCosts(1, 0.0, [1.0, 5.0]).best_size([0.1])[0] == 1  # the policy decides whether to draft at all


def test_a_level_is_added_if_its_gain_exceeds_the_tokens_lost_to_its_time():
    costs = TreeCosts(1, 0.0, [1.0, 1.1, 1.2, 1.3])
    worths = [0.6, 0.3]
    speed = 1.9 / 1.2
    assert costs.level_pays(speed * (0.2 + 0.1) + 1e-6, 0.2, worths)
    assert not costs.level_pays(speed * (0.2 + 0.1) - 1e-6, 0.2, worths)


def priced(runner, row):
    costs = runner.costs
    for _ in range(3):
        for width in range(1, 18):
            costs.record_pass(width, 1, 0, 1.0 + row * (width - 1))
    return costs


def test_free_rows_give_full_trees_and_costly_rows_chains(runner):
    priced(runner, 0.0)
    assert len(TreeSizes(runner, None).shape(ACCEPTANCE, context(), is_levelwise=False).parents) == 15


@pytest.mark.parametrize(("row", "nodes"), [(0.05, 6), (0.2, 2), (3.0, 1)])
def test_nodes_are_added_while_they_raise_the_speed(runner, row, nodes):
    priced(runner, row)
    shape = TreeSizes(runner, None).shape(ACCEPTANCE, context(), is_levelwise=False)
    worths = sorted((0.6**a * 0.2**b * 0.1**c for a, b, c in exponents()), reverse=True)
    speeds = [(1 + sum(worths[:n])) / (1 + row * n) for n in range(1, 16)]
    assert len(shape.parents) == 1 + max(range(15), key=speeds.__getitem__) == nodes


def exponents():
    """Return how often each rank occurs on the paths of up to three nodes."""
    import itertools

    for depth in (1, 2, 3):
        for path in itertools.product(range(3), repeat=depth):
            yield tuple(path.count(rank) for rank in range(3))


def test_costly_drafting_steps_make_trees_shallower(runner):
    priced(runner, 0.01)
    sizes = TreeSizes(runner, None)
    deep = max(sizes.shape(ACCEPTANCE, context(), is_levelwise=True).depths)
    sizes._step = 2.0  # seconds, twice a pass
    assert max(sizes.shape(ACCEPTANCE, context(), is_levelwise=True).depths) < deep == 3


def test_costs_of_an_unmeasured_batch_are_predicted_from_its_rows(runner):
    priced(runner, 0.2)
    costs = TreeSizes(runner, None).costs(context(batch=2))
    assert costs.passes[3] == pytest.approx(1.0 + 0.2 * 7)


def test_costs_are_read_again_after_some_rounds(runner):
    priced(runner, 0.0)
    sizes = TreeSizes(runner, None)
    before = sizes.costs(context())
    priced(runner, 0.5)
    found = [sizes.costs(context()) for _ in range(REFRESH)]
    assert all(each is before for each in found[:-1]) and found[-1].passes[3] > before.passes[3]


def test_a_tree_of_the_same_size_follows_new_rates(runner):
    sizes = TreeSizes(runner, 3)
    for rates, depths in (((0.9, 0.1), (1, 2, 3)), ((0.4, 0.3, 0.2), (1, 1, 1))):
        assert sizes.shape([rates] * 3, context(), is_levelwise=True).depths == depths


def test_a_fixed_size_measures_no_costs(runner):
    sizes = TreeSizes(runner, 5)
    assert sizes.costs(context()) is None and runner.costs.plain_round(1, 0) is None
    assert len(sizes.shape(ACCEPTANCE, context(), is_levelwise=True).parents) == 5


@pytest.mark.parametrize("method", ["eagle", "medusa"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_costly_rows_reduce_the_drafts_of_each_method(home, method, temperature, monkeypatch):
    monkeypatch.setattr(CostBook, "pass_seconds", lambda costs, width, *more: 1.0 + 100.0 * (width - 1))
    folder = home / ("eagle3" if method == "eagle" else method)
    options = {"compile": "never", "device": "cpu", "num_draft_tokens": 3}
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=1, ignore_eos=True)
    llm = LLM(home / "target", method=f"{method}:draft={folder}", **options)
    text = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    assert 0 < llm.stats.num_drafts <= llm.stats.num_rounds and llm.stats.faults == 0
    if temperature == 0:
        plain = LLM(home / "target", method="plain", **options)
        assert text == plain.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
