"""`outrider bench compare` and `outrider bench report` on documents with known numbers."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_documents import cell, document, grid
from rich.console import Console

from outrider.bench.tables import tables
from outrider.cli import console
from outrider.cli.bench import read_workloads
from outrider.cli.bench_documents import check_writable
from outrider.cli.console import say_error, waiting
from outrider.progress import shown

Run = Callable[..., "tuple[int, str, str]"]


def measured(speed: float) -> dict[str, object]:
    plain = [99.0, 100.0, 101.0, 100.0, 100.0]
    ours = [speed * each / 100 for each in plain]
    return document([cell("plain", 0, plain, plain), cell("draft", 4, ours, plain)])


def test_the_command_prints_the_table_and_sets_its_exit_code(outrider: Run, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("old.json", "new.json")]
    for file, speed in zip(files, (150.0, 120.0), strict=True):
        file.write_text(json.dumps(measured(speed)))
    code, out, _ = outrider("bench", "compare", *files)
    assert code == 3 and "1 for the worse" in out and "slower" in out
    code, out, _ = outrider("bench", "compare", files[0], files[0])
    assert code == 0 and "0 changed significantly" in out
    code, out, _ = outrider("bench", "compare", *files, "--json")
    found = json.loads(out)
    assert code == 3 and found["has_loss"] and len(found["cells"]) == 2


def test_a_narrow_terminal_shows_every_number_and_verdict(
    outrider: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("old.json", "new.json")]
    for file, speed in zip(files, (150.0, 120.0), strict=True):
        file.write_text(json.dumps(measured(speed)))
    for width in (100, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = outrider("bench", "compare", *files)
        words = " ".join(out.split())
        assert "150 > 120" in words and "1.50 > 1.20" in words and "-20% ±" in words and "significant" in words
        assert "\u2026" not in out and max(map(len, out.splitlines()[:-1])) <= width


def test_captions_have_no_line_break_of_their_own() -> None:
    wide = Console(file=StringIO(), width=200)
    for table in tables(looping()):
        assert "\n" not in str(table.title)
        wide.print(table)


def test_brackets_in_names_of_files_and_workloads_are_not_markup(outrider: Run, tmp_path: Path) -> None:
    result = measured(150.0) | {"target": "./my[/model]"}
    for each in result["cells"]:  # type: ignore[attr-defined]
        each["workload"] = "mine[/b]\x1b[2J"
    file = tmp_path / "x.json"
    file.write_text(json.dumps(result))
    code, out, err = outrider("bench", "compare", file, file)
    assert code == 0 and r"mine[/b]\x1b[2J" in out and "\x1b" not in out, err
    view = Console(file=StringIO(), width=200)
    for table in tables(result):
        view.print(table)
    shown = view.file.getvalue()  # type: ignore[attr-defined]
    assert r"mine[/b]\x1b[2J" in shown and "\x1b" not in shown and "./my[/model]" in shown


def test_brackets_in_progress_and_error_messages_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("loading ./my[/model]"):
        pass
    say_error("cannot write a[/b]")
    with shown() as report:
        report(1, 2, "mine[/b]\x1b[2J, draft")
    err = capsys.readouterr().err
    assert "./my[/model]" in err and "error: cannot write a[/b]" in err
    assert r"mine[/b]\x1b[2J, draft" in err and "\x1b" not in err


def test_brackets_in_a_spinners_text_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, doctor used to end with a markup error for such a name of a draft."""
    monkeypatch.setattr(console, "err", Console(file=StringIO(), force_terminal=True, width=80))
    with waiting("looking") as tell:
        tell("trying draft:draft=./my[/model]")
        assert "./my[/model]" in str(console._screen.spinner.renderable.text)


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not valid JSON"), ("[]", "is not a benchmark document"), ('{"cells": []}', "contains no measurements")],
)
def test_other_files_are_refused(outrider: Run, tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    code, _, err = outrider("bench", "compare", file, tmp_path / "nothing.json")
    assert code == 2 and why in err and len(err.splitlines()) == 1


def looping() -> dict[str, object]:
    """Return a document whose outputs loop, with twice the speedup over whole outputs as before the loops."""
    result = measured(300.0)
    for each in result["cells"]:  # type: ignore[attr-defined]
        before = {name: each[name] for name in ("tok_s", "plain_tok_s", "mean_acceptance_length", "ms", "difference")}
        slower = {name: each[name] if each["k"] == 0 else each[name] / 2 for name in ("speedup", "decode_speedup")}
        before |= slower | {"acceptance_rate": 0.35, "speedup_interval": [1.4, 1.6], "decode_speedup_interval": [1.4, 1.6]}
        each |= {"loop_share": 0.4, "tokens_before_loops": 38, "before_loops": before}
    return result


def test_results_before_loops_are_shown_first() -> None:
    view = Console(file=StringIO(), width=80)
    found = tables(looping())
    assert len(found) == 3 and len(tables(measured(300.0))) == 2
    for table in found:
        view.print(table)
    speeds, _, whole = view.file.getvalue().split("workload")[1:]  # type: ignore[attr-defined]
    row = next(line for line in speeds.splitlines() if "draft k=4" in line)
    assert "1.50 1.40-1.60" in row and "0.35" in row
    row = next(line for line in whole.splitlines() if "draft k=4" in line)
    assert row.split()[2:4] == ["40%", "38"] and "3.00" in row and "0.70" in row
    assert max(map(len, view.file.getvalue().splitlines())) <= 80  # type: ignore[attr-defined]


def test_tables_without_loops_say_so() -> None:
    assert "no tokens in loops" in str(tables(measured(300.0))[0].title)
    result: dict[str, Any] = looping()
    for each in result["cells"]:  # from the first token of every output
        each |= {"tokens_before_loops": 0, "before_loops": None}
    assert "no tokens" not in str(tables(result)[0].title) and len(tables(result)) == 3


def test_several_workloads_get_a_table_by_workload_and_method() -> None:
    pytest.importorskip("matplotlib")
    from outrider.bench.html import page

    result: dict[str, Any] = measured(300.0)
    speedups = {"one": 1.0, "two": 2.0, "three": 4.0}
    result["cells"] = [
        {**cell, "workload": name, "speedup": value, "mean_acceptance_length": 1 + value}
        for name, value in speedups.items()
        for cell in result["cells"]
    ]
    view = Console(file=StringIO(), width=80)
    view.print(tables(result)[2])
    rows = [line.split() for line in view.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["three", "5.00", "4.00x"] in rows and ["all", "3.33", "2.00x"] in rows
    assert "<td>three</td><td>5.00 4.00x</td>" in page(result) and "Workloads by methods" in page(result)
    result["cells"] = [cell for cell in result["cells"] if cell["workload"] != "one"]
    assert len(tables(result)) == 2
    assert "Workloads by methods" not in page(result)


def test_the_report_shows_results_before_loops_and_warns() -> None:
    pytest.importorskip("matplotlib")
    from outrider.bench.html import page

    text = page(looping())
    assert "40% of plain decoding&#39;s tokens are in loops" in text and "<td>38</td>" in text
    assert "Loops" in text and "40%" in text and "in loops, which are easy to draft" not in page(measured(300.0))


def test_a_report_is_made_from_a_document(outrider: Run, tmp_path: Path) -> None:
    file, page = tmp_path / "x.json", tmp_path / "pages" / "x.html"
    file.write_text(json.dumps(grid()))
    code, _, err = outrider("bench", "report", file, "--html", page)
    assert code == 0, err
    assert page.read_text().startswith("<!doctype html>")
    old = grid()
    del old["cells"][0]["difference"]
    file.write_text(json.dumps(old))
    code, _, err = outrider("bench", "report", file, "--html", page)
    assert code == 2 and "is not a complete benchmark document" in err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cells": [{"method": "draft", "k": 4, "temperature": "hot"}]}, "is not a complete benchmark document"),
        ({"kind": "serve"}, "bench serve"),
    ],
)
def test_documents_of_another_kind_or_with_wrong_types_are_refused(
    outrider: Run, tmp_path: Path, change: dict[str, object], why: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(grid() | change))
    code, _, err = outrider("bench", "compare", file, file)
    assert code == 2 and why in err and len(err.splitlines()) == 1
    wrong = grid()
    wrong["cells"][0]["tok_s"] = "fast"
    file.write_text(json.dumps(wrong))
    code, _, err = outrider("bench", "report", file, "--html", tmp_path / "x.html")
    assert code == 2 and "is not a complete benchmark document" in err


@pytest.mark.parametrize("key", ["workload", "same_text", "acceptance_histogram", "ms", "loop_share"])
def test_a_wrong_value_of_a_document_is_one_line(outrider: Run, tmp_path: Path, key: str) -> None:
    good, wrong = tmp_path / "good.json", tmp_path / "wrong.json"
    good.write_text(json.dumps(grid()))
    for value in ("x", [[]]):
        document = grid()
        document["cells"][1][key] = value
        wrong.write_text(json.dumps(document))
        for command in (["compare", good, wrong], ["report", wrong, "--html", tmp_path / "x.html"]):
            code, _, err = outrider("bench", *command)
            words = f"{wrong} is not a complete benchmark document of this version"
            assert code in (0, 3) or (code == 2 and err.count("\n") == 1 and words in err), (command, err)


def test_links_and_devices_are_not_replaced(tmp_path: Path) -> None:
    from outrider.files import write_whole

    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    for path, text in ((file, "one"), (link, "two")):
        write_whole(path, text)
    assert link.is_symlink() and file.read_text() == "two"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "three")
        assert pipe.is_fifo() and os.read(reader, 10) == b"three"
    finally:
        os.close(reader)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_processes_that_write_the_same_file_at_once_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import ones

    from outrider.files import replaced
    from outrider.heads.checkpoint import save_tensors

    file = tmp_path / "model.safetensors"
    with replaced(file) as unfinished:
        unfinished.write_text("complete")
        monkeypatch.setattr(os, "getpid", lambda: 0)
        save_tensors(file, {"a": ones(2)})
    assert file.read_text() == "complete" and list(tmp_path.iterdir()) == [file]


def test_unfinished_files_are_new_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider import files

    file, victim = tmp_path / "model.safetensors", tmp_path / "victim"
    with files.replaced(file) as first, files.replaced(file) as second:  # of two threads, or two containers
        assert first != second and first.match("*.safetensors.*.part")
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first"
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / f"{file.name}.guessed.part").symlink_to(victim)
    with pytest.raises(FileExistsError), files.replaced(file) as unfinished:
        unfinished.write_text("to a stranger")
    assert not victim.exists()


def test_scripts_have_unix_line_ends_on_every_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.files import write_whole

    def as_on_windows(path: Path, text: str, encoding: str, newline: str | None = None) -> None:
        path.write_bytes((text if newline == "\n" else text.replace("\n", "\r\n")).encode(encoding))

    monkeypatch.setattr(Path, "write_text", as_on_windows)
    write_whole(tmp_path / "run.sh", "#!/bin/sh\n")
    assert (tmp_path / "run.sh").read_bytes() == b"#!/bin/sh\n"


def test_the_reader_of_a_pipe_waits_for_the_result(tmp_path: Path) -> None:
    pipe, poll = tmp_path / "pipe", select.poll()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    poll.register(reader)
    try:
        check_writable("--out", pipe)
        assert not poll.poll(0)  # the end of its input would be reported here
    finally:
        os.close(reader)


@pytest.mark.parametrize("command", ["bench", "audit"])
def test_two_results_in_one_file_are_refused(outrider: Run, command: str, target: Path, tmp_path: Path) -> None:
    code, _, err = outrider(command, "--target", target, "--out", tmp_path / "x", "--html", tmp_path / "." / "x")
    assert code == 2 and "--out and --html are both" in err and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--prompts", "in", "--out", "in"],
        ["bench", "--prompts", "in", "--html", "./in"],
        ["bench", "report", "in", "--html", "link"],
        ["bench", "serve", "in", "--out", "in"],
        ["bench", "serve", "--prompts", "in", "--out", "in"],
        ["audit", "--prompts", "in", "--out", "in"],
        ["tune", "--traffic", "in", "--out", "in"],
        ["tune", "--traffic", "in", "--out", "plan.toml", "--json", "in"],
        ["serve", "in", "--record", "in"],
    ],
)
def test_an_input_is_not_replaced_by_a_result(
    outrider: Run, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(
        json.dumps(grid()) if command[1] == "report" else "" if "serve" in command else '{"prompt": "hi"}\n' * 2
    )
    Path("link").symlink_to("in")
    before = Path("in").read_text()
    code, _, err = outrider(*command)
    assert code == 2 and err.endswith(
        f"{command[-2]} {Path(command[-1])} would replace an input of this command: give another file\n"
    )
    assert Path("in").read_text() == before


def test_documents_with_one_repeat_do_not_pass_a_check(outrider: Run, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document([cell("plain", 0, [100.0], [100.0])])))
    code, out, _ = outrider("bench", "compare", file, file)
    assert code == 3 and "1 cell compared, but too few repeats to test anything" in out


def test_documents_without_a_common_cell_do_not_pass_a_check(outrider: Run, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("old.json", "new.json")]
    renamed = measured(150.0)
    for each in renamed["cells"]:  # type: ignore[attr-defined]
        each["workload"] = "renamed"
    for file, content in zip(files, (measured(150.0), renamed), strict=True):
        file.write_text(json.dumps(content))
    code, out, _ = outrider("bench", "compare", *files)
    assert code == 3 and "no common cell" in out


def test_checking_a_file_keeps_the_link_to_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "results" / "file")
    (tmp_path / "results").mkdir()
    check_writable("--out", link)
    assert link.is_symlink() and not link.exists()


def test_prompts_that_do_not_fill_a_batch_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = SimpleNamespace(prompts=None, num_prompts=5)
    assert len(read_workloads(options, ["code"], (1, 4))["code"]) == 5
    assert capsys.readouterr().err.splitlines() == [
        "batch 4: the last 1 of 5 prompts of 'code' are left out: they do not fill a batch"
    ]
