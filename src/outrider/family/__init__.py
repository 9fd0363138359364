"""Where the embedded models lie: two ordinary Hugging Face folders and nothing else."""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
