"""How the checks of this folder end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def told(result: Mapping[str, Any], out: Path | None) -> int:
    """Writes a result to its file and, as the last line, to standard output. The exit code: 0 where it ``holds``, else 1."""
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if result["holds"] else 1
