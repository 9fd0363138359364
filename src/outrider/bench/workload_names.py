"""Names of the built-in workloads. Does not import torch, so that commands can check names before it is imported."""

from __future__ import annotations

from outrider.errors import OutriderError

WORKLOADS = {
    "code": "complete a Python function from its signature",
    "edit": "rewrite a text with a small change: repeats its prompt",
    "json": "continue records of one format: repeats its prompt",
    "summary": "summarise a paragraph",
    "math": "solve an arithmetic word problem",
    "chat": "answer a question",
    "story": "continue a story",
}


def known_workload(name: str) -> str:
    """Return the name. Raises ``OutriderError`` if it is not that of a built-in workload."""
    if name not in WORKLOADS:
        raise OutriderError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    return name
