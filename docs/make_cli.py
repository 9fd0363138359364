"""Writes docs/cli.md from the commands' own help. Usage: python docs/make_cli.py [--print]"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.update(COLUMNS="100", TERMINAL_WIDTH="100", NO_COLOR="1", TERM="dumb")
HEAD = """# The command line

Made from the commands' own help by `python docs/make_cli.py`; a test compares the two.

Text goes to standard output, everything about it to standard error, so that a command can stand in a pipe. Exit codes: 0 done,
1 an error inside Outrider or of the machine, or nobody reads standard output any more, 2 a mistake in what was asked (one line
says which), 3 a check found something (`doctor` what does not fit, `bench compare` what became slower, `audit` no reason to
certify), 130 Ctrl-C or SIGTERM: what was made by then is kept.
"""


def help_of(*command: str) -> str:
    """The help text of one command, without trailing spaces."""
    from outrider.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*command, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def page() -> str:
    """The whole page."""
    from outrider.cli.app import COMMANDS

    parts = [HEAD, "## outrider\n", f"```\n{help_of()}\n```\n"]
    for command in COMMANDS:
        parts += [f"## outrider {command}\n", f"```\n{help_of(command)}\n```\n"]
        for kind in getattr(import_module(f"outrider.cli.{command}"), "COMMANDS", ()):
            parts += [f"## outrider {command} {kind}\n", f"```\n{help_of(command, kind)}\n```\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(page())
    else:
        (Path(__file__).parent / "cli.md").write_text(page())
