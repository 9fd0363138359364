"""Published figures come from results/*.json: pages are generated from them, and no other page contains a speed."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_documents import cell, document
from rich.console import Console

from outrider.audit.tables import certificates

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "make_results.py"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]  # docs/log is history
FIRST_WEIGHTS = "2026-11-25T03"  # date of the first weights of the embedded models of today's sizes


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_results"] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_ratio_follows_from_its_columns(make: ModuleType, path: Path) -> None:
    assert make.wrong_ratios(path.read_text()) == []


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "results.md"], ids=lambda path: path.name)
def test_no_speed_is_written_by_hand(make: ModuleType, path: Path) -> None:
    assert make.stray_figures(path.read_text()) == []


def test_every_result_names_its_commit_and_its_processor(make: ModuleType) -> None:
    found = make.documents(ROOT / "results")
    assert [name for name, result in found.items() if not result.get("commit")] == []
    assert [name for name, result in found.items() if make.processor(result) is None] == []


def test_no_published_speed_is_of_smaller_embedded_models(make: ModuleType) -> None:
    """They looped: published speedups would be too large."""
    found = make.documents(ROOT / "results")
    speeds = {name: result for name, result in found.items() if make.topic(result) != "Checks"}
    assert [name for name, result in speeds.items() if str(result.get("date") or "") < FIRST_WEIGHTS] == []


def test_every_result_is_cited(make: ModuleType) -> None:
    """By a page other than the generated one, or by a row of README."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "results.md"]
    text = "".join(page.read_text() for page in [ROOT / "README.md", *pages])
    cited = set(re.findall(r"\b([\w.-]+)\.json\b", text)) | {row.file for row in make.README_ROWS} | {make.SERVED}
    assert {path.stem for path in (ROOT / "results").glob("*.json")} <= cited


def test_the_audit_page_shows_the_certificates_of_the_file() -> None:
    found = json.loads((ROOT / "results" / "audit-family.json").read_text())
    out = StringIO()
    Console(file=out, width=120).print(certificates(found))
    rows = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    page = [line.split() for line in (ROOT / "docs" / "audit.md").read_text().splitlines()]
    assert len(rows) > len(found["methods"]) and [row for row in rows if row not in page] == []


def test_the_page_of_faults_shows_the_file() -> None:
    rows = json.loads((ROOT / "results" / "faults.json").read_text())["faults"]
    columns = ("fault", "promise", "verdict", "seen")
    lines = ["| " + " | ".join(row[name].replace("|", "/") for name in columns) + " |" for row in rows]
    assert (ROOT / "docs" / "faults.md").read_text().splitlines()[-len(rows) :] == lines


def test_rows_of_fewer_prompts_say_so(make: ModuleType) -> None:
    found = make.documents(ROOT / "results")
    rows = [row for row in make.README_ROWS if make.topic(found[row.file]) == "Methods"]
    prompts = {row.what: make.cell_of(found[row.file], row)["prompts"] for row in rows}
    few = {what: count for what, count in prompts.items() if count != 8}
    assert len(few) == 1 and all(what.endswith(f", {count} prompts") for what, count in few.items())


def test_a_wrong_ratio_is_found(make: ModuleType) -> None:
    head = "| what | plain tok/s | speculative tok/s | ratio | 95% interval |\n| --- | --- | --- | --- | --- |\n"
    right, wrong = "| a | 20 | 30 | 1.50 | 1.4 to 1.6 |", "| b | 20 | 30 | 1.60 | 1.4 to 1.7 |"
    assert make.wrong_ratios(head + right) == [] and make.wrong_ratios(f"{head}{right}\n{wrong}\n") == [wrong]
    assert make.wrong_ratios(f"{head}{right}\n\n| another | table |\n{wrong}") == []


@pytest.mark.parametrize(
    "line",
    [
        "It is 2.3x faster.",
        "up to 5x",
        "109 tok/s at best",
        "some 20 tokens a second",
        "1.08 times as fast",
        "2 times as fast",
        "twice as fast",
        "1.27 times faster",
        "1.9 times plain",
        "2.15 times the tokens per second",
    ],
)
def test_a_speed_written_by_hand_is_found(make: ModuleType, line: str) -> None:
    assert make.stray_figures(f"before\n{line}\nafter") == [line]
    assert make.stray_figures(f"{make.BEGIN}\n{line}\n{make.END}") == []
    assert make.stray_figures(f"```\n{line}\n```") == []


def result(speeds: Sequence[float], **more: Any) -> dict[str, Any]:
    plain = [20.0] * len(speeds)
    decode = {"plain_decode_tok_s": 20.0, "decode_tok_s": sorted(speeds)[len(speeds) // 2]}
    cells = [cell("plain", 0, plain, plain), cell("draft", 4, list(speeds), plain)]
    return document([each | decode for each in cells], **more)


def test_a_page_depends_on_its_file(make: ModuleType, tmp_path: Path) -> None:
    def page(speed: float) -> str:
        (tmp_path / "x.json").write_text(json.dumps(result([speed] * 3)))
        return str(make.page(make.documents(tmp_path)))

    before, after = page(30.0), page(31.0)
    assert "| 20 | 30 | 1.50 |" in before and "| 20 | 31 | 1.55 |" in after
    assert "test; commit 0123456789ab" in before and "`outrider bench`" in before


def test_figures_before_loops_are_the_ones_published(make: ModuleType) -> None:
    looping = result([60.0] * 3)
    looping["cells"][1] |= {
        "loop_share": 0.4,
        "before_loops": {"plain_decode_tok_s": 20.0, "decode_tok_s": 40.0, "decode_speedup_interval": [1.9, 2.1]},
    }
    text = make.page({"x": looping})
    assert "| 20 | 40 | 2.00 | 1.90 to 2.10 |" in text and "40%" in text


def test_cells_without_drafts_do_not_count_in_the_mean_alpha(make: ModuleType) -> None:
    drafted = result([30.0] * 3)["cells"][1]
    idle = drafted | {"acceptance_rate": None, "mean_k": 0.0}
    earlier = idle | {"acceptance_rate": 0.0}
    assert "| 0.70 | 0% |" in make.bench_table(document([drafted, *[idle, earlier] * 20]))  # a large grid: workloads combined
    assert "|  | 0% |" in make.bench_table(document([idle, earlier]))


def test_measurements_with_busy_processes_are_rows_of_their_own(make: ModuleType) -> None:
    quiet, busy = result([40.0] * 3), result([30.0] * 3)
    for each in busy["cells"]:
        each["busy"] = 2
    text = make.page({"x": document([*quiet["cells"], *busy["cells"]])})
    assert "| draft k=4 | 20 | 40 | 2.00 |" in text and "| draft k=4 with 2 other busy processes | 20 | 30 | 1.50 |" in text


def test_the_readmes_table_has_existing_cells_of_one_machine(make: ModuleType) -> None:
    row = make.Row("it", "x", "draft", 4, workload="code")
    table = make.readme_table({"x": result([30.0] * 3)}, [row])
    assert "| it | 20 | 30 | 1.50 |" in table and "Processor: test." in table
    other = make.Row("that", "y", "draft", 4, workload="code")
    with pytest.raises(ValueError, match="several machines"):
        make.readme_table({"x": result([30.0] * 3), "y": result([30.0] * 3, device="cpu: other")}, [row, other])
    with pytest.raises(ValueError, match="has 0 cells"):
        make.readme_table({"x": result([30.0] * 3)}, [make.Row("it", "x", "magic", 4)])


def test_only_the_block_between_the_markers_is_replaced(make: ModuleType) -> None:
    text = f"a\n{make.BEGIN}\nold\n{make.END}\nb\n"
    assert make.with_block(text, "new") == f"a\n{make.BEGIN}\nnew\n{make.END}\nb\n"
    with pytest.raises(ValueError, match="once each"):
        make.with_block("a\nb\n", "new")


def test_intervals_of_servers_and_peers_are_of_ratios_within_a_round(make: ModuleType) -> None:
    assert make.paired_interval([10.0], [20.0]) is None
    low, high = make.paired_interval([10.0, 20.0, 40.0], [20.0, 40.0, 80.0])  # noise common to both
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)
    low, high = make.paired_interval([10.0, 10.0, 10.0], [19.0, 20.0, 21.0])
    assert low < 2 < high and high - low > 0.3
    assert make.paired_interval([10.0, 10.0, 10.0], [19.0, 0.0, 21.0]) is None


def peer(engine: str, method: str, bits: int | str, speed: float, **more: Any) -> dict[str, Any]:
    """Return a cell of `bench/peers/compare.py --bits`."""
    rounds = {"decode_tok_s": speed, "decode_tok_s_rounds": [speed, speed], "tok_s": speed, "tok_s_rounds": [speed, speed]}
    known = {"engine": engine, "method": method, "bits": bits, "prompt_tokens": None, "error": None, "meta": {"dtype": "x"}}
    return known | rounds | more


def test_peers_at_equal_bits_end_with_the_best_of_each(make: ModuleType) -> None:
    changed = {"changed_texts": 1, "compared_texts": 6}
    cells = [peer("outrider", "plain", 16, 20.0, copy_share=0.9), peer("llamacpp", "plain", 16, 10.0, copy_share=0.5)]
    cells += [peer("outrider", "draft", 4, 80.0, **changed), peer("llamacpp", "draft", 4, 40.0, **changed)]
    cells += [
        peer("outrider", "draft", 8, 90.0),
        peer("llamacpp", "draft", 8, 30.0, error="killed", decode_tok_s_rounds=[30.0]),
    ]
    bandwidth = [{"copy_gb_s": 50.0, "read_gb_s": 40.0}]
    document = {"best_by": "decode_tok_s", "cells": cells, "bandwidth": bandwidth}
    assert make.topic(document) == "Other engines"
    text = make.peers_table(document)
    lines = text.splitlines()
    assert lines[2].startswith("| 16 | plain | llamacpp x | 10 | 20 | 2.00 |")
    assert "| 4 | draft | llamacpp x | 40 | 80 | 2.00 |" in lines[3] and "1 of 6 / 1 of 6" in lines[3]
    best = [line for line in lines if line.startswith("| best")]
    assert "plain: plain 16 bits, ours plain 16 bits | llamacpp x | 10 | 20 | 2.00" in best[0]
    assert "any method: draft 4 bits, ours draft 8 bits | llamacpp x | 40 | 90 | 2.25" in best[1]
    assert "killed" not in text and " 8 | draft" not in text  # a failed cell has no figure
    assert lines[-1].endswith("this share of it: outrider 90%, llamacpp 50%.") and "50.0 GB/s" in lines[-1]
    assert make.wrong_ratios(text) == []
    document["cells"] = [peer("outrider", "draft", "Q4_K_M", 20.0), peer("llamacpp", "plain", "Q4_K_M", 10.0)]
    best = make.peers_table(document).splitlines()[-1]
    assert "any method: plain Q4_K_M, ours draft Q4_K_M | llamacpp x | 10 | 20 | 2.00" in best


def test_first_tokens_of_peers_are_compared_as_times(make: ModuleType) -> None:
    def times(engine: str, seconds: float) -> dict[str, Any]:
        known = {"engine": engine, "method": "plain", "bits": 8, "prompt_tokens": 128, "error": None, "meta": {"dtype": "x"}}
        return known | {"first_s": seconds, "first_s_rounds": [seconds, seconds]}

    document = {"cells": [times("outrider", 0.2), times("openvino", 0.3)]}
    assert make.topic(document) == "First tokens of other engines"
    assert make.first_token_table(document).splitlines()[2].startswith("| 8 | 128 | openvino x | 0.2 | 0.3 | 1.50 |")
