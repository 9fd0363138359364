"""``outrider bench compare`` and ``outrider bench report``: compare and plot existing results."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.app import EXIT_CHECK_FAILED, handled
from outrider.cli.console import say_error
from outrider.errors import OutriderError, check_installed, errors_as, without_path

LEAST_WIDTH = 60  # columns in which every number of a table fits; a narrower terminal breaks its lines


def compare(
    before: Annotated[Path, typer.Argument(help="A document that `outrider bench --out` wrote.")],
    after: Annotated[Path, typer.Argument(help="The document to compare with it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> int:
    """Report significant changes between two documents; exit code 3 if anything became worse or nothing could be tested."""
    from rich.console import Console

    from outrider.bench import compare, documents

    with checked(before, after):
        found = compare.compare(documents.read(before), documents.read(after))
        result, table = compare.document(found), compare.table(found)
    if as_json:
        print(json.dumps(result))
    else:
        out = Console(soft_wrap=False, highlight=False)
        out.width = max(out.width, LEAST_WIDTH)
        if found.changes:
            out.print(table)
        for line in [*compare.notes(found), found.verdict]:
            out.print(line, markup=False, soft_wrap=True)
    return EXIT_CHECK_FAILED if found.has_loss or not found.is_tested else 0


def report(
    document: Annotated[Path, typer.Argument(help="A document that `outrider bench --out` wrote.")],
    html: Annotated[Path, typer.Option(help="HTML file to write.")],
) -> None:
    """Write the HTML report of an existing document."""
    from outrider.bench import documents
    from outrider.bench import html as pages

    result = documents.read(document)
    check_outputs({"--html": html}, [document], report=html)
    with checked(document):
        page = pages.page(result)
    write_or_say(html, lambda: page)


@contextmanager
def keeping(finish: Callable[[], object]) -> Iterator[None]:
    """Context manager: call ``finish`` before an exception ends a measurement: Ctrl-C, or a failure of target or server."""
    try:
        yield
    except BaseException:
        with handled(signal.SIG_IGN):  # a second Ctrl-C must not lose the measurements so far
            finish()
        raise


@contextmanager
def checked(*files: Path) -> Iterator[None]:
    """Context manager: report missing and wrong values of these documents as one line."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = " or ".join(map(str, files))
        raise OutriderError(f"{names} is not a complete benchmark document of this version: measure again") from error


def write_or_say(path: Path | None, text: Callable[[], str], more: str = "") -> None:
    """Write a result to its file, if one is given. On failure, print an error with ``more`` appended and continue."""
    from outrider.files import write_whole

    if path is None:
        return
    try:
        write_whole(path, text())
    except OSError as error:
        say_error(f"cannot write {path}: {error.strerror}{more}")


def check_outputs(paths: Mapping[str, Path | None], inputs: Iterable[Path | None], report: Path | None = None) -> None:
    """Check output files (option -> file) before measuring: they can be written, and differ from each other and from inputs.

    Also checks that ``report`` can be made.
    """
    read = {path.resolve() for path in inputs if path is not None}
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is not None and path.resolve() in read:
            raise OutriderError(f"{option} {path} would replace an input of this command: give another file")
        check_writable(option, path)
        if path is not None and (other := seen.setdefault(path.resolve(), option)) != option:
            raise OutriderError(f"{other} and {option} are both {path}: give two different files")
    if report is not None:
        check_installed("matplotlib", "report", "an HTML report")


def check_inputs(paths: Iterable[Path | None]) -> None:
    """Raise ``OutriderError`` for a file that does not exist: it is read after seconds of imports."""
    for path in paths:
        if path is not None:
            with errors_as(f"cannot read {path}", OSError, detail=without_path):
                path.stat()


def check_writable(option: str, path: Path | None) -> None:
    """Raise ``OutriderError`` if a file cannot be written. Creates its folder."""
    if path is None or path.is_fifo():  # opening a pipe and closing it would end its reader's input
        return
    existed = path.exists()
    with errors_as(f"cannot write {option} {path}", OSError, detail=without_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.resolve().unlink()  # not the link to it


COMMANDS = {"compare": compare, "report": report}
