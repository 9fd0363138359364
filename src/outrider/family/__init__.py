"""Folders of the embedded models: a target and its drafts."""

from pathlib import Path

FOLDER = Path(__file__).parent
TARGET = FOLDER / "target"
DRAFT = FOLDER / "draft"


def drafts() -> dict[str, Path]:
    """Return the target's drafts by folder name: a small model, and heads."""
    folders = sorted(config.parent for config in FOLDER.glob("*/config.json"))
    return {folder.name: folder for folder in folders if folder != TARGET}
