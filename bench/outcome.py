"""How the checks of this folder begin and end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cli.bench_documents import check_writable, write_or_say
from outrider.types import OutriderError


def check_out(out: Path | None) -> None:
    """Ends the script now where its result could not be written in the end."""
    try:
        check_writable("--out", out)
    except OutriderError as error:
        raise SystemExit(f"error: {error}") from None


def count(text: str) -> int:
    """An option's number, 1 or more: of nothing at all everything holds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def told(result: Mapping[str, Any], out: Path | None) -> int:
    """Writes a result to its file and, as the last line, to standard output. The exit code: 0 where it ``holds``, else 1."""
    write_or_say(out, lambda: json.dumps(result, indent=1) + "\n", "; the result follows")
    print(json.dumps(result))
    return 0 if result["holds"] else 1
