"""Compiled passes equal eager ones and are loaded from disk the second time; damaged packages only cost speed."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch
from test_early_exit import EVEN, Drafting
from torch import nn
from torch._inductor import codecache

from outrider import LLM, SamplingParams, disk_cache, native
from outrider.runner import ModelRunner, RunnerConfig, compiled, disk_keys
from outrider.runner.linear import PackedLinear
from outrider.types import Context

from .rounds import Rounds, make_model, make_request, make_text, proposal_of, untouched
from .test_architectures import small_config

pytestmark = [
    pytest.mark.skipif(not native.load(), reason="no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # torch's own warnings during compilation
]


def small(seed=0):
    return make_model(small_config("llama", max_position_embeddings=400, tie_word_embeddings=True, **EVEN), seed)


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """Return the cache folder of this module's packages."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(package, passes, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(passes))


def load(model, mode):
    return ModelRunner.load(untouched(model), RunnerConfig(compile=mode, prefill_chunk=16))


@pytest.fixture(scope="module")
def runner(model, passes):
    """Return a runner that is compiled once for the whole module."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OUTRIDER_CACHE", str(passes))
    patch.setattr(codecache, "_HEADER_DIR", str(passes / "headers"))
    made = load(model, "always")
    made.extend(["warm"], [[1, 2, 3]])
    made.release(["warm"])
    patch.undo()
    assert made.passes.is_compiled
    return made


@pytest.fixture(scope="module")
def package(runner, passes):
    """Return the package of the runner's whole pass, which is built first."""
    return next((passes / "passes").glob("*.pt2"))


def scored(runner, texts, chains, parents=None):
    requests = tuple(make_request(f"s{index}", text) for index, text in enumerate(texts))
    scores = runner.score(Context(requests, (9,) * len(texts), None), proposal_of(chains, parents))
    runner.release([request.request_id for request in requests])
    return scores.logits


@pytest.mark.parametrize(
    "lengths, chains, parents",
    [
        ((1,), [[]], None),
        ((17,), [[]], None),
        ((5,), [[1, 2, 3]], None),
        ((300,), [[1]], None),
        ((3, 20, 45), [[1, 2], [3], []], None),
        ((3, 20, 45), [[1, 2, 3], [3, 4], [5]], [[-1, -1, 1], [-1, 0], [-1]]),
        ((9,), [list(range(1, 31))], None),
    ],
)
def test_compiled_passes_equal_eager_ones(runner, model, lengths, chains, parents):
    texts = [make_text(length, length) for length in lengths]
    got, expected = scored(runner, texts, chains, parents), scored(load(model, "never"), texts, chains, parents)
    for b, chain in enumerate(chains):
        torch.testing.assert_close(got[b, : len(chain) + 1], expected[b, : len(chain) + 1], rtol=1e-4, atol=1e-4)


def test_compiled_rounds_equal_the_plain_forward(runner, model):
    rounds = Rounds(runner, model, [make_text(length, length) for length in (3, 20, 45)])
    rounds.step([[5, 6, 7], [8], [9]], [[0, 1, 2], [], [0]], [1, 2, 3])
    rounds.step([[5, 6, 7], [8], [9]], [[1], [0], []], [1, 2, 3], [[-1, -1, 0], [-1], [-1]])
    rounds.step([[], [], []], [[], [], []], [1, 2, 3])
    runner.release([request.request_id for request in rounds.requests])


def test_compiled_hidden_states_equal_eager_ones(runner, model):
    """Embedding, a middle layer and the final norm; a long prompt is prefilled in chunks. This is a second kind of pass."""
    texts = [make_text(length, length) for length in (3, 40)]

    def states(made, texts=texts):
        requests = tuple(make_request(f"h{index}", text) for index, text in enumerate(texts))
        scores = made.score(Context(requests, (9, 9), None), proposal_of([[1, 2], [3]]), (0, 1, 2))
        made.release([request.request_id for request in requests])
        return scores

    got, expected = states(runner), states(load(model, "never"))
    assert runner.passes.is_compiled
    states(runner, texts[::-1])  # another round does not overwrite these hidden states
    for layer in (0, 1, 2):
        for b, length in enumerate((2 + 1 + 2, 39 + 1 + 1)):
            assert got.hidden[layer][b].shape == (length, model.config.hidden_size)
            torch.testing.assert_close(got.hidden[layer][b], expected.hidden[layer][b], rtol=1e-4, atol=1e-4)


def test_compiled_partial_passes_equal_the_compiled_whole_pass(model, package, passes):
    """For a target whose first layer drafts. Bits must be equal, because both passes write the same cache."""
    before = set((passes / "passes").iterdir())
    drafting = Drafting(model=model, depth=1, compile="always")
    drafting.proposer.prepare()
    assert drafting.runner.passes.is_compiled and len(set((passes / "passes").iterdir()) - before) == 3
    drafting.step([3, 3, 3], [3, 0, 1])
    drafting.step([2, 2, 2], [1, 0, 1])
    drafting.assert_cache_is_a_fresh_forwards(exact=True)


def test_a_requests_logits_are_the_same_bits_in_any_batch_and_with_any_drafts(runner):
    texts = [make_text(length, length) for length in (12, 20, 45)]
    together = scored(runner, texts, [[1, 2, 3], [4, 5], []])
    for b, chain in enumerate([[1, 2, 3], [4, 5], []]):
        for count in range(len(chain) + 1):
            alone = scored(runner, [texts[b]], [chain[:count]])
            assert torch.equal(alone[0], together[b, : count + 1])


def test_a_second_runner_loads_the_package_from_disk(runner, model, monkeypatch):
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("compiled again"))
    for mode in ("always", "auto"):
        second = load(model, mode)
        assert torch.equal(scored(second, [[1, 2, 3]], [[4]]), scored(runner, [[1, 2, 3]], [[4]]))
        assert second.passes.is_compiled


def test_another_model_of_the_same_shape_computes_with_its_own_weights(runner, monkeypatch):
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("compiled again"))
    other = small(seed=1)
    rounds = Rounds(load(other, "auto"), other, [make_text(20, 1)])
    rounds.step([[1, 2]], [[0]], [3])
    assert rounds.runner.passes.is_compiled


def test_numbers_that_are_compiled_in_are_part_of_the_key(model, monkeypatch):
    """Inductor writes single numbers and short vectors into the package: another checkpoint must not load it."""
    keys = []
    monkeypatch.setattr(compiled, "load", lambda module, build: keys.append(compiled._key(module)))
    for value in (torch.ones(1), torch.ones(1), torch.zeros(1), torch.ones(8), torch.zeros(8), torch.ones(9), torch.zeros(9)):
        changed = untouched(model)
        changed.model.layers[0].scalar = nn.Buffer(value)
        load(changed, "auto").extend(["a"], [[1, 2, 3]])
    first, again, other, short, changed, long, same = keys
    assert first == again != other and short != changed and long == same


def test_the_code_of_a_users_model_is_part_of_the_key(model, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for number in (1, 2):
        (tmp_path / "own_model.py").write_text(f"from torch import nn\nclass Mine(nn.Module):\n    number = {number}\n")
        found.append(disk_keys.code_of(nn.Sequential(importlib.import_module("own_model").Mine())))
        sys.modules.pop("own_model")
    assert found[0] != found[1]
    assert disk_keys.code_of(model) == disk_keys.code_of(nn.Linear(2, 2))


def test_a_package_does_not_keep_its_weights_alive(model):
    runner = load(model, "auto")
    scored(runner, [[1, 2, 3]], [[4]])
    assert runner.passes.is_compiled
    packed = [each.packed.untyped_storage() for each in runner.model.modules() if isinstance(each, PackedLinear)]
    del runner
    gc.collect()
    assert packed and all(torch._C._storage_Use_Count(each._cdata) == 1 for each in packed)


def test_never_stays_eager(runner, model):
    eager = load(model, "never")
    scored(eager, [[1, 2, 3]], [[4]])
    eager.passes.compile_now()
    assert eager.passes._runs and not eager.passes._compiled


@pytest.fixture
def damaged(package, monkeypatch, tmp_path):
    """Return ``damaged(content)``: a cache whose package has other content; None: only its beginning."""

    def damaged(content):
        path = tmp_path / "passes" / package.name
        path.parent.mkdir(mode=0o700)
        path.write_bytes(package.read_bytes()[:3000] if content is None else content)
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
        return path

    return damaged


@pytest.mark.parametrize(
    "case",
    [(b"", "auto"), (b"not a package", "auto"), (None, "auto"), (b"not a package", "always")],
    ids=["empty", "other", "cut", "built again"],
)
def test_a_package_that_does_not_load_is_removed(runner, model, package, damaged, case, monkeypatch, caplog):
    """For example, torch was rebuilt with the same version."""
    content, mode = case
    broken = damaged(content)
    monkeypatch.setattr(compiled, "_build", lambda module, key: package)
    again = load(model, mode)
    expected = scored(runner, [[1, 2, 3]], [[4]])
    torch.testing.assert_close(scored(again, [[1, 2, 3]], [[4]]), expected, rtol=1e-4, atol=1e-4)
    assert not broken.exists() and "does not load" in caplog.text
    assert again.passes.is_compiled == (mode == "always")


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_package_for_which_memory_is_missing_is_kept(model, package, mode, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("cannot allocate memory in static TLS block")

    monkeypatch.setattr(compiled, "_load", fail)
    monkeypatch.setattr(compiled, "_build", lambda module, key: pytest.fail("it is built again"))
    monkeypatch.setattr(Path, "unlink", lambda path, **_: pytest.fail(f"{path} is deleted"))
    again = load(model, mode)
    scored(again, [[1, 2, 3]], [[4]])
    assert not again.passes.is_compiled and "passes stay eager" in caplog.text


def test_a_package_that_does_not_load_in_a_read_only_cache_is_no_error(runner, model, package, damaged, monkeypatch, caplog):
    damaged(b"not a package")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("read-only")))
    again = load(model, "auto")
    expected = scored(runner, [[1, 2, 3]], [[4]])
    torch.testing.assert_close(scored(again, [[1, 2, 3]], [[4]]), expected, rtol=1e-4, atol=1e-4)
    assert "does not load" in caplog.text


def test_a_corrupt_package_is_replaced_if_compilation_is_requested(runner, model, package, damaged, monkeypatch):
    damaged(b"not a package")
    monkeypatch.setattr(compiled, "_build", lambda module, key: disk_cache.store(package, "passes", key, ".pt2"))
    again = load(model, "always")
    assert torch.equal(scored(again, [[1, 2, 3]], [[4]]), scored(runner, [[1, 2, 3]], [[4]]))
    assert again.passes.is_compiled


def test_compilation_uses_only_private_folders_and_leaves_only_packages(runner, passes):
    """Inductor's default is /tmp/torchinductor_<user>, which another user can create and fill first."""
    assert [folder.name for folder in passes.iterdir()] == ["passes"]
    assert not (passes / "passes").stat().st_mode & 0o077
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ or "outrider-" not in os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_threads_that_compile_do_not_exchange_their_folders(monkeypatch, tmp_path):
    name, seen = "TORCHINDUCTOR_CACHE_DIR", []
    monkeypatch.delenv(name, raising=False)

    def second():
        with compiled._inductor_in(tmp_path / "second"):
            seen.append(os.environ.pop(name))

    with compiled._inductor_in(tmp_path / "first"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and os.environ[name] == str(tmp_path / "first")
    thread.join()
    assert seen == [str(tmp_path / "second")] and name not in os.environ


@pytest.mark.parametrize(
    ("command", "option"),
    [("env g++ -pipe", {"cpp.cxx": "g++"}), ("env clang -stdlib=libc++", {}), ("g++", {})],
)
def test_inductor_gets_only_the_program_of_a_command_with_arguments(command, option, monkeypatch):
    monkeypatch.setattr(compiled, "find_compiler", command.split)
    assert compiled._compiler_option() == option


def test_a_model_that_does_not_compile_stays_eager_with_a_warning(runner, model, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise NotImplementedError("no such operator\nsecond line")

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_build", fail)
    eager = load(model, "always")
    torch.testing.assert_close(scored(eager, [[1, 2]], [[3]]), scored(runner, [[1, 2]], [[3]]), rtol=1e-4, atol=1e-4)
    assert "compilation failed" in caplog.text
    assert "second line" not in caplog.text


def test_a_run_that_started_eager_stays_eager(runner, model, tmp_path, monkeypatch, package):
    """Another process may have added compiled passes to the cache, whose bits differ from those of the output so far."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("built"))
    late = load(model, "auto")
    before = scored(late, [[1, 2, 3]], [[4]])
    assert late.passes.could_compile
    monkeypatch.setenv("OUTRIDER_CACHE", str(package.parents[1]))
    assert torch.equal(scored(late, [[1, 2, 3]], [[4]]), before)
    requests = (make_request("h", [1, 2, 3]),)
    late.score(Context(requests, (9,), None), proposal_of([[4]]), (0, 1, 2))  # another kind of pass
    assert not late.passes.is_compiled and late.passes.could_compile


def test_a_run_that_started_compiled_stays_compiled(model, passes, package, monkeypatch):
    built = []
    monkeypatch.setattr(compiled, "_build", lambda module, key: built.append(key) or package)
    early = load(model, "auto")
    scored(early, [[1, 2, 3]], [[4]])
    assert early.passes.is_compiled and not built
    early.passes.run_of((0,))  # not on disk: it is compiled, because two kinds of pass must agree
    assert early.passes.is_compiled and len(built) == 1


def test_if_one_kind_of_pass_does_not_compile_all_stay_eager(model, tmp_path, monkeypatch):
    """Compiled and eager passes round differently."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    late = load(model, "auto")
    run, _ = late.passes.run_of(), late.passes.run_of((0,))
    monkeypatch.setattr(compiled, "load", lambda module, build: None if module.hidden else lambda inputs: run(inputs))
    late.passes.compile_now()
    assert late.passes.run_of() is run and late.passes.could_compile
    monkeypatch.setattr(compiled, "load", lambda module, build: run)
    late.passes.compile_now()
    assert late.passes.is_compiled


def test_after_a_pass_that_does_not_compile_others_are_eager(model, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "load", lambda module, build: run if module.hidden else None)
    eager = load(model, "always")
    run = eager.passes.run_of()
    assert eager.passes.run_of((0,)) is not run


@pytest.mark.parametrize(
    ("num_tokens", "compile", "compiles"),
    [(40, "auto", True), (39, "auto", False), (40, "never", False), (None, "auto", False)],  # None: the context has 41
)
def test_passes_are_compiled_before_a_long_run_and_never_after_the_first_output(
    num_tokens, compile, compiles, model, monkeypatch
):
    monkeypatch.setattr("outrider.engine.llm.LONG_RUN", 20)
    llm, warm = LLM(model, compile=compile, max_batch=2, method="ngram", max_len=256 if num_tokens else 41), []
    monkeypatch.setattr(llm, "warmup", lambda: warm.append(llm.stats.num_tokens))
    for _ in range(2):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=num_tokens))
    assert warm == ([0] if compiles else [])


def test_other_threads_run_while_a_compiled_pass_does(runner):
    stamps, ended = [], threading.Event()

    def look():
        while not ended.is_set():
            stamps.append(perf_counter())
            sleep(0.0005)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # otherwise the pass would use all cores of a machine with two
    other = threading.Thread(target=look)
    other.start()
    try:
        shares = []
        for _ in range(3):  # another process may use the core for a while
            stamps.clear()
            seconds = runner.measure_pass(350, 8, 0, repeat=1)
            stamps.append(perf_counter())
            shares.append(max(later - earlier for earlier, later in pairwise(list(stamps))) / seconds)
        assert seconds > 0.01 and min(shares) < 0.5  # if Python's lock were held, the share would be the whole pass
    finally:
        ended.set()
        other.join()
        torch.set_num_threads(threads)
