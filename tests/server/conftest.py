"""Tests of the server are skipped if the libraries of ``outrider[serve]`` or the test clients are missing."""

from __future__ import annotations

from importlib.util import find_spec

MISSING = [
    name
    for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx", "openai", "schemathesis", "jsonschema")
    if find_spec(name) is None
]
if MISSING:
    collect_ignore_glob = ["test_*.py", "demo/*"]
else:
    from .served import draft, load, plain, served, target  # noqa: F401 - fixtures


def pytest_report_header() -> str | None:
    """Report why tests of the server are skipped."""
    return f"no tests of the server: {', '.join(MISSING)} not installed" if MISSING else None
