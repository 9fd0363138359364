"""Nothing here runs where the libraries of ``outrider[serve]``, or those that ask and check, are missing."""

from __future__ import annotations

from importlib.util import find_spec

MISSING = [
    name
    for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "openai", "schemathesis", "jsonschema")
    if find_spec(name) is None
]
if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    from .served import draft, load, plain, served, target  # noqa: F401 - fixtures


def pytest_report_header() -> str | None:
    """Says why tests of the server do not run."""
    return f"no tests of the server: {', '.join(MISSING)} not installed" if MISSING else None
