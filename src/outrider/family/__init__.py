"""Where the embedded models lie: a target and what drafts for it, ordinary folders and nothing else."""

from pathlib import Path

FOLDER = Path(__file__).parent
TARGET = FOLDER / "target"
DRAFT = FOLDER / "draft"


def drafts() -> dict[str, Path]:
    """All that drafts for the target, by the names of the folders: a small model, and heads."""
    folders = sorted(config.parent for config in FOLDER.glob("*/config.json"))
    return {folder.name: folder for folder in folders if folder != TARGET}
