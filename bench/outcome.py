"""Common start and end of the checks in this folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cli.bench_documents import check_writable, write_or_say
from outrider.types import OutriderError


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the script's docstring as help, and the option ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the result to this JSON file")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. Exits now if the result could not be written at the end."""
    args = parser.parse_args()
    try:
        check_writable("--out", args.out)
    except OutriderError as error:
        raise SystemExit(f"error: {error}") from None
    return args


def count(text: str) -> int:
    """Parse an option's positive integer. 0 is rejected because a check of nothing always passes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number {text!r}: expected an integer of at least 1")
    return int(text)


def finish(result: Mapping[str, Any], out: Path | None) -> int:
    """Write a result to its file and, as the last line, to standard output.

    Returns the exit code: 0 if it ``holds``, else 1.
    """
    write_or_say(out, lambda: json.dumps(result, indent=1) + "\n", "; the result follows")
    print(json.dumps(result))
    return 0 if result["holds"] else 1
