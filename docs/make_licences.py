"""Write docs/licences.md: the packages installed by ``make`` with their licences.

Licences are read from installed packages, so run this with the Python in which ``make test`` installed them.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences of what Outrider is installed with

Written by `docs/make_licences.py` from the packages' own metadata. Outrider itself is under the Apache License 2.0. PyTorch's
builds for CUDA also install `nvidia-*` packages, under NVIDIA's own licences, and `triton` (MIT).
"""
LOCKS = {"requirements.txt": "To run", "requirements-dev.txt": "For the extras and tests, in addition"}


def locked(name: str) -> list[str]:
    """Return the packages of a lock file."""
    found: dict[str, None] = {}
    for line in (ROOT / name).read_text().splitlines():
        if match := re.match(r"([a-z0-9][\w.-]*)==", line):
            found[match[1]] = None
    return list(found)


def licence_of(package: str) -> str | None:
    """Return the licence in an installed package's metadata, or None if the package is not installed."""
    try:
        about = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return None
    named = about.get("License-Expression")
    classified = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if text.startswith("License :: ")]
    first = (about.get("License") or "").strip().splitlines()
    return named or ", ".join(classified) or (first[0] if first else "not named")


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    listed: set[str] = set()
    for name, heading in LOCKS.items():
        packages = [package for package in locked(name) if package not in listed]
        listed.update(packages)
        if name == "requirements.txt":
            packages.append("torch")  # pinned by version only
        rows = [f"| {package} | {licence} |" for package in packages if (licence := licence_of(package))]
        parts.append(f"\n## {heading}\n\n| package | licence |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
