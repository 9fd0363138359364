"""The comparison with other engines: measurements, failures of an engine, and tables."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

PEERS = Path(__file__).parent.parent / "bench" / "peers"
FAKE = """
import sys
sys.path.insert(0, {peers!r})
from pathlib import Path
from protocol import Sample, serve

class Fake:
    def __init__(self, args):
        if args.dtype == "int4" and Path({broken!r}).exists():
            raise ValueError("no memory")
        self.args = args
    def prepare(self, request):
        if request.method == "draft" and Path({broken!r}).exists():
            import os
            os._exit(3)
    def generate(self, prompt, request):
        other = request.method == "draft" and self.args.dtype == "int8" and prompt[0] == 1
        ids = [prompt[0] + other] * request.max_tokens
        return Sample(ids, {seconds} * len(ids) / (1 + request.k), {seconds}, 1)
    def drop(self): ...
    def meta(self): return {{}}

serve(Fake)
"""


@pytest.fixture(scope="module")
def peers() -> Any:
    """Import the scripts' modules as they import each other."""
    sys.path.insert(0, str(PEERS))
    try:
        import bandwidth
        import client
        import compare
        import engines
        import prompts
        import protocol
        import report
        import rounds
        import worker_llamacpp
        import worker_outrider
    finally:
        sys.path.remove(str(PEERS))
    names = dict(bandwidth=bandwidth, client=client, compare=compare, engines=engines, prompts=prompts, protocol=protocol)
    names |= {"report": report, "rounds": rounds, "llamacpp": worker_llamacpp, "outrider": worker_outrider}
    return type("Peers", (), names)


def test_every_engine_declares_number_formats_that_its_worker_supports(peers: Any) -> None:
    for spec in peers.engines.ENGINES.values():
        assert {*spec.dtypes, *spec.by_bits.values()} <= set(peers.protocol.DTYPES)
        assert set(spec.by_bits) <= set(peers.engines.BITS)
    assert set(peers.engines.ENGINES["llamacpp"].by_bits) == set(peers.engines.ENGINES["openvino"].by_bits) == {16, 8, 4}


def test_rounds_take_the_next_prompts_cyclically(peers: Any) -> None:
    assert peers.rounds.deal(6, 6, 2) == [[0, 1, 2, 3, 4, 5]] * 2
    assert peers.rounds.deal(6, 4, 3) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def test_windows_have_the_requested_length_and_do_not_repeat(peers: Any) -> None:
    windows = peers.prompts.windows(list(range(10)), 7, 3)
    assert windows == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 0]]
    with pytest.raises(peers.prompts.BadInput):
        peers.prompts.windows([], 3, 1)


def test_numbers_of_options_are_checked(peers: Any) -> None:
    assert peers.compare._numbers("--k", "8, 4,8") == [8, 4]
    folder = Path("model")
    assert peers.compare._bits("16,4", folder, None) == [16, 4]
    for wrong in ("3", "0", "x", "16,-8"):
        with pytest.raises(peers.prompts.BadInput, match="--bits"):
            peers.compare._bits(wrong, folder, None)
    with pytest.raises(peers.prompts.BadInput, match="needs --bits"):
        peers.compare._groups(["plain"], [], [128])


def test_groups_are_bits_by_methods_or_by_lengths(peers: Any) -> None:
    group = peers.rounds.Group
    assert peers.compare._groups(["plain", "draft"], [], []) == [group("plain"), group("draft")]
    assert peers.compare._groups(["plain", "draft"], [8], []) == [group("plain", 8), group("draft", 8)]
    assert peers.compare._groups(["draft"], [8, 4], [128]) == [group("plain", 8, 128), group("plain", 4, 128)]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """Return a GGUF file whose header states the type Q4_K_M."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    import gguf_files

    def add_type(writer: Any) -> None:
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)

    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), lambda _: gguf.GGMLQuantizationType.F16, add_type)
    return tmp_path / "model.gguf"


def test_a_gguf_file_is_compared_by_its_type(peers: Any, gguf_file: Path) -> None:
    assert peers.compare._bits("", gguf_file, gguf_file) == ["Q4_K_M"]
    with pytest.raises(peers.prompts.BadInput, match="--bits needs model folders"):
        peers.compare._bits("4", gguf_file, None)
    for pair in ((gguf_file, gguf_file.parent), (gguf_file.parent, gguf_file)):
        with pytest.raises(peers.prompts.BadInput, match="both --target and --draft"):
            peers.compare._bits("", *pair)
    gguf = pytest.importorskip("gguf")
    import gguf_files

    gguf_files.write(gguf_file, gguf_files.make_model("llama"), lambda _: gguf.GGMLQuantizationType.F16)
    assert peers.compare._bits("", gguf_file, None) == ["GGUF"]


def test_sizes_context_and_prompts_are_read_from_a_gguf_file(peers: Any, gguf_file: Path) -> None:
    from tiny_folder import make_tokenizer

    from outrider.runner.loading import load_config

    config = load_config(gguf_file)
    described = peers.compare._describe(gguf_file)
    assert (described["name"], described["model_type"]) == ("model.gguf", "llama")
    assert (described["hidden_size"], described["vocab_size"]) == (config.hidden_size, config.vocab_size)
    assert peers.compare._context(gguf_file, None, ["plain"]) == config.max_position_embeddings
    plan = peers.compare.Plan(["outrider"], [], [2], {}, {}, 1, 1, 1, "tok_s")
    job = peers.client.Job(gguf_file, gguf_file, gguf_file.parent, gguf_file.parent, 1, 64, 8, 0.0, 0, 60.0)
    document = peers.compare._document(plan, job)
    assert document["target"] == document["draft"] == described and document["parameters_read"] is None
    texts = ["def add(a, b):", "return a"]
    with gzip.open(gguf_file.parent / "prompts.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"prompt": text}) + "\n" for text in texts)
    read = peers.prompts.read_prompts(gguf_file.parent / "prompts.jsonl.gz", gguf_file, 2, 100)
    assert read == [make_tokenizer().encode(text) for text in texts]


def test_engines_that_read_gguf_load_the_file_itself(peers: Any, gguf_file: Path) -> None:
    engines = peers.engines.ENGINES
    assert {name for name, spec in engines.items() if spec.formats("Q4_K_M")} == {"outrider", "llamacpp", "openvino"}
    assert engines["outrider"].formats("Q4_K_M") == ("auto",) and engines["vllm"].formats(4) == ()
    assert engines["llamacpp"].formats(4) == ("q4_k_m",) and engines["llamacpp"].formats(None) == engines["llamacpp"].dtypes
    assert peers.llamacpp.model_file(str(gguf_file), "auto", str(gguf_file.parent / "cache")) == gguf_file.resolve()
    with pytest.raises(ValueError, match="does not support dtype int4"):
        peers.llamacpp.model_file(str(gguf_file.parent), "int4", str(gguf_file.parent / "cache"))


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_per_token_exclude_an_untied_input_embedding(peers: Any, tmp_path: Path, tied: bool) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(5, 4), "model.layers.0.q.weight": torch.zeros(4, 4)}
    if not tied:
        tensors["lm_head.weight"] = torch.zeros(5, 4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    assert peers.bandwidth.weights_read(tmp_path) == 5 * 4 + 4 * 4


def test_parameters_per_token_exclude_unused_experts(peers: Any, tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.down_proj": torch.zeros(8, 4, 4),
        "model.layers.0.mlp.gate.weight": torch.zeros(8, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"num_local_experts": 8, "num_experts_per_tok": 2}')
    assert peers.bandwidth.weights_read(tmp_path) == 2 * 4 * 4 + 8 * 4


def test_the_bandwidth_is_positive_and_shares_are_of_its_median(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.bandwidth, "MEGABYTES", 1)
    assert all(value > 0 for value in peers.bandwidth.bandwidth(2).values())
    cells = [{"method": "plain", "bits": bits, "decode_tok_s": 10.0} for bits in (16, 8)]
    measured = [{"copy_gb_s": value, "read_gb_s": 2 * value} for value in (10.0, 40.0, 90.0)]
    peers.bandwidth.add_shares(cells, 10**9, measured)
    assert cells[0]["copy_share"] == pytest.approx(20 / 40) and cells[0]["read_share"] == pytest.approx(20 / 80)
    assert "copy_share" not in cells[1]


def test_llamacpp_times_are_the_servers_and_a_cached_prompt_is_rejected(peers: Any) -> None:
    answer = {"tokens": [4, 5, 6], "timings": {"prompt_n": 7, "prompt_ms": 250.0, "predicted_ms": 500.0}}
    sample = peers.llamacpp.sample_of(answer, 7)
    assert (sample.token_ids, sample.seconds, sample.first_seconds, sample.first_tokens) == ([4, 5, 6], 0.75, 0.25, 1)
    with pytest.raises(RuntimeError, match="processed 7 of 9 prompt tokens"):
        peers.llamacpp.sample_of(answer, 9)
    assert peers.llamacpp.draft_dtype("q4_k_m") == "bfloat16" and peers.llamacpp.draft_dtype("float32") == "float32"


def test_a_converted_model_is_named_by_its_content(peers: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = peers.protocol.content_key(tmp_path)
    assert peers.protocol.content_key(tmp_path) == before
    (tmp_path / "config.json").write_text("{ }")
    assert peers.protocol.content_key(tmp_path) != before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_time_and_memory_count_the_servers_that_a_worker_started(peers: Any) -> None:
    alone = peers.protocol.peak_mb()
    code = "x = bytearray(1 << 26)\nprint(sum(range(10**6)), flush=True)\ninput()"
    before = peers.protocol.cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert peers.protocol.peak_mb() - alone > 60
        running = peers.protocol.cpu_seconds()
        assert running > before
        child.communicate(b"\n")
    assert peers.protocol.cpu_seconds() >= running - 0.02  # an ended server still counts; its time is in clock ticks


def test_a_thread_that_ends_while_children_are_counted_is_no_error(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/proc/self/task/0/children")])
    assert peers.protocol._children() == [] and peers.protocol.cpu_seconds() > 0


def test_drafts_that_change_the_text_are_counted(peers: Any) -> None:
    def entry(method: str, bits: int, texts: dict[str, str], dtype: str = "int8") -> dict[str, Any]:
        known = {"engine": "x", "method": method, "bits": bits, "prompt_tokens": None}
        return known | {"texts": texts, "meta": {"dtype": dtype}}

    cells = [
        entry("plain", 8, {"0": "a", "1": "b", "2": "c"}),
        entry("draft", 8, {"0": "a", "1": "z", "3": "d"}),
        entry("plain", 4, {"0": "a"}),
        entry("draft", 4, {"0": "b"}, dtype="other"),
    ]
    peers.rounds.compare_texts(cells)
    assert (cells[1]["changed_texts"], cells[1]["compared_texts"]) == (1, 2)
    assert "changed_texts" not in cells[0] and "changed_texts" not in cells[3]
    assert "same_text" not in cells[0]  # Outrider's output is missing
    cells.append(entry("plain", 8, {"0": "a", "1": "x"}) | {"engine": "outrider"})
    peers.rounds.compare_texts(cells)
    assert cells[0]["same_text"] == 0.5 and cells[4]["same_text"] == 1.0 and "same_text" not in cells[1]


@pytest.fixture
def race(peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``race(groups, before)``, which runs fake engines `outrider` and `slow`; `slow` fails while ``broken`` exists."""
    for name, seconds in (("outrider", 0.01), ("slow", 0.02)):
        broken = tmp_path / ("broken" if name == "slow" else "never")
        code = FAKE.format(peers=str(PEERS), broken=str(broken), seconds=seconds)
        (tmp_path / f"worker_{name}.py").write_text(code)

    class FakeSpec(peers.engines.EngineSpec):  # type: ignore[misc]
        def python(self, venvs: Path) -> Path:
            return Path(sys.executable)

        def script(self) -> Path:
            return tmp_path / f"worker_{self.name}.py"

    bits = {16: "bfloat16", 8: "int8", 4: "int4"}
    ours, slow = (
        FakeSpec("outrider", ("auto",), schedules=(("auto", 0),), by_bits=bits),
        FakeSpec("slow", ("auto",), by_bits=bits),
    )
    monkeypatch.setattr(peers.compare, "ENGINES", {"outrider": ours, "slow": slow})
    monkeypatch.setattr(peers.rounds, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(peers.compare, "bandwidth", lambda threads: {"copy_gb_s": 10.0, "read_gb_s": 10.0})

    def run(
        prompts: dict[int | None, list[list[int]]], groups: list[Any], cells: list[dict[str, Any]], busy: int = 0
    ) -> dict[str, Any]:
        plan = peers.compare.Plan(["outrider", "slow"], groups, [2, 4], {}, prompts, 2, 1, 2, "decode_tok_s", busy)
        job = peers.client.Job(
            tmp_path, None, tmp_path, tmp_path / "cache", 1, 64, 1 if None not in prompts else 8, 0.0, 0, 60.0
        )
        document = {"parameters_read": 10**6, "bandwidth": [], "cells": copy.deepcopy(cells), "best_by": plan.rate}
        peers.compare._run(plan, job, document, tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text())["cells"] == document["cells"]
        return document

    return run


def outcome(document: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {(cell["engine"], cell["method"], cell["bits"]): cell for cell in document["cells"]}


def test_a_failing_engine_loses_only_its_own_cells_and_resuming_measures_their_groups_again(
    peers: Any, race: Any, tmp_path: Path
) -> None:
    group = peers.rounds.Group
    groups = [group(method, bits) for bits in (8, 4) for method in ("plain", "draft")]
    prompts: dict[int | None, list[list[int]]] = {None: [[1, 2], [3, 4], [5, 6]]}
    (tmp_path / "broken").touch()
    first = outcome(race(prompts, groups, []))
    assert len(first) == 8
    errors = {key: cell["error"] for key, cell in first.items() if cell["error"]}
    assert errors.keys() == {("slow", "draft", 8), ("slow", "plain", 4), ("slow", "draft", 4)}
    assert "ended with code 3" in errors["slow", "draft", 8] and "no memory" in errors["slow", "plain", 4]

    (tmp_path / "broken").unlink()
    conditions = dict.fromkeys(peers.compare.SAME_ON_RESUME, 1)
    before = conditions | {"cells": list(first.values()), "bandwidth": []}
    kept = peers.compare.kept_cells(before, conditions)
    assert len(kept) == 5
    with pytest.raises(peers.prompts.BadInput, match="cannot resume: threads was 1 and is now 2"):
        peers.compare.kept_cells(before, conditions | {"threads": 2})
    with pytest.raises(peers.prompts.BadInput, match="not a result of this script"):
        peers.compare.kept_cells([1], conditions)
    document = race(prompts, groups, [each | {"is_old": True} for each in kept])
    second = outcome(document)
    assert len(document["cells"]) == 8 and not any(cell["error"] for cell in second.values())
    assert {key for key, cell in second.items() if "is_old" in cell} == {("outrider", "plain", 8), ("slow", "plain", 8)}
    assert second["slow", "draft", 8]["decode_ratio"] > 0
    assert len(document["bandwidth"]) == 3


def test_busy_processes_compute_beside_all_engines(peers: Any, race: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    alternate = peers.compare.alternate

    def watched(*args: Any) -> None:
        seen.append(len([child for child in Path("/proc/self/task").glob("*/children") for _ in child.read_text().split()]))
        alternate(*args)

    monkeypatch.setattr(peers.compare, "alternate", watched)
    for busy in (0, 2):
        document = race({None: [[1, 2], [3, 4]]}, [peers.rounds.Group("plain", 8)], [], busy)
        title = str(peers.report.tables(document | {"busy": busy})[0].title)
        assert title.endswith(", with 2 other busy processes") == (busy == 2)
    assert seen[1] - seen[0] == 2


def test_engines_run_in_another_order_each_round(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.rounds, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(peers.rounds, "_measure", lambda *_: None)
    setting, said = peers.engines.Setting("plain", "auto"), list[str]()
    running = [peers.rounds.Contestant(SimpleNamespace(name=name), setting) for name in "ABC"]
    peers.rounds.alternate(running, SimpleNamespace(job=SimpleNamespace(seed=0)), [[1]], [[0]] * 12, said.append)
    order = "".join(line[0] for line in said if "round" in line)
    rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert len(rounds) == 12 and all(sorted(each) == ["A", "B", "C"] for each in rounds)
    assert {each[:2] for each in rounds} == {"AB", "AC", "BA", "BC", "CA", "CB"}
    peers.rounds.alternate([], SimpleNamespace(job=SimpleNamespace(seed=0)), [[1]], [[0]], said.append)


def test_cells_describe_the_measurement(peers: Any, race: Any) -> None:
    group = peers.rounds.Group
    document = race({None: [[1, 2], [3, 4], [5, 6]]}, [group("plain", 8), group("draft", 8)], [])
    cells = outcome(document)
    plain, drafted = cells["slow", "plain", 8], cells["slow", "draft", 8]
    assert plain["ratio"] == pytest.approx(2.0) and plain["first_ratio"] == pytest.approx(2.0) and plain["same_text"] == 1.0
    assert drafted["k"] == 4 and [row["k"] for row in drafted["screening"]] == [2, 4]  # the faster one
    assert cells["outrider", "draft", 8]["schedule"] == "auto" and cells["outrider", "draft", 8]["screening"] == []
    assert (drafted["changed_texts"], drafted["compared_texts"], drafted["unstable"]) == (1, 3, 0)
    assert plain["texts"].keys() == {"0", "1", "2"}  # two rounds of two of three prompts
    titles = [str(view.title) for view in peers.report.tables(document)]
    assert [title.split(",")[0] for title in titles[:2]] == ["Tokens per second", "At equal bits"]


@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_outrider_adapts_k_to_a_gguf_file(peers: Any, method: str) -> None:
    screen = peers.rounds.Screen(None, [[1]], [2, 4], {"outrider": "float32"}, "tok_s")
    found = screen.best(peers.engines.ENGINES["outrider"], peers.rounds.Group(method, "Q4_K_M"), print)
    assert found.setting == peers.engines.Setting(method, "auto", 0, "auto") and found.screening == []
    assert peers.rounds.Group(method, "Q4_K_M").label == f"{method} Q4_K_M"
    assert peers.rounds.Group(method, 8).label == f"{method} 8 bits"


def test_first_token_times_have_a_separate_table(peers: Any, race: Any) -> None:
    group = peers.rounds.Group
    prompts = {length: peers.prompts.windows([7, 8, 9], length, 2) for length in (5, 2000)}
    document = race(prompts, [group("plain", 8, 5), group("plain", 8, 2000)], [])
    assert [(len(cell["first_s_rounds"]), cell["prompt_tokens"]) for cell in document["cells"]] == [
        (2, 5),
        (2, 5),
        (1, 2000),
        (1, 2000),
    ]
    assert document["cells"][1]["first_ratio"] == pytest.approx(2.0) and "tok_s" not in document["cells"][1]
    view = peers.report.tables(document)[0]
    assert (
        view.row_count == 2
        and list(view.columns[2].cells) == ["10", "10"]
        and list(view.columns[4].cells) == ["2.00x", "2.00x"]
    )


def test_brackets_in_an_error_are_not_markup(peers: Any, tmp_path: Path) -> None:
    from rich.console import Console

    cell = {"engine": "slow", "method": "plain", "bits": 8, "prompt_tokens": None, "error": "cannot read [/tmp/x]"}
    document = {"cells": [cell, cell | {"prompt_tokens": 128}], "bandwidth": [], "best_by": "tok_s"}
    with (tmp_path / "screen").open("w+") as file:
        for view in peers.report.tables(document):
            Console(file=file, width=300).print(view)
        file.seek(0)
        assert file.read().count("cannot read [/tmp/x]") == 2


def test_the_best_of_each_engine_is_its_fastest_cell(peers: Any) -> None:
    cells = [{"engine": name, "tok_s": rate} for name, rate in (("a", 1.0), ("a", 3.0), ("b", 2.0), ("a", 2.0))]
    assert {name: cell["tok_s"] for name, cell in peers.report.best_of_each(cells, "tok_s").items()} == {"a": 3.0, "b": 2.0}


def test_a_rate_that_was_not_measured_in_each_round_is_left_out(peers: Any) -> None:
    setting = peers.engines.Setting("plain", "auto")
    worker = object.__new__(peers.client.Worker)
    worker.spec, worker.job = peers.engines.ENGINES["llamacpp"], SimpleNamespace(max_tokens=1, temperature=0.0)
    answer = {"tokens": 1, "first_tokens": 1, "seconds": 2.0, "first_seconds": 2.0, "token_ids": [[7]]}
    worker._ask = lambda request: answer | {"meta": {"dtype": "auto", "peak_rss_mb": 1}}
    single = worker.measure(setting, [[1]], 0)  # all tokens were in the first chunk
    found = [peers.rounds.Contestant(peers.engines.ENGINES[name], setting) for name in ("outrider", "llamacpp")]
    for each, second in zip(found, (replace(single, decode_tok_s=5.0), single), strict=True):
        each.record(replace(single, decode_tok_s=4.0), [0])
        each.record(second, [0])
    cells = [peers.rounds.cell(each, found[0], peers.rounds.Group("plain", 8)) for each in found]
    assert cells[0]["decode_tok_s"] == 4.5 and "decode_tok_s" not in cells[1] and "decode_ratio" not in cells[1]
    assert cells[1]["ratio"] == 1.0 and json.dumps(cells, allow_nan=False)
    assert peers.report.tables({"cells": cells, "bandwidth": [], "best_by": "decode_tok_s"})


def test_engines_do_not_inherit_how_outrider_lets_openmp_wait(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    environment = peers.engines.ENGINES["llamacpp"].environment(tmp_path)
    assert "OMP_WAIT_POLICY" not in environment and environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("dtype, expected", [("bfloat16", {"bits": 16}), ("int4", {"bits": 16}), ("auto", None)])
def test_at_equal_bits_outrider_s_draft_keeps_16_bits(
    dtype: str, expected: dict[str, int] | None, peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(peers.outrider, "LLM", lambda _, **options: made.append(options) or SimpleNamespace(warmup=print))
    args = peers.protocol.WorkerArgs("target", "draft", dtype, torch.get_num_threads(), 64, "", "draft", 4)
    peers.outrider.OutriderEngine(args).prepare(peers.protocol.Request("draft", 4))
    assert [options.get("method_options") for options in made] == [expected]
