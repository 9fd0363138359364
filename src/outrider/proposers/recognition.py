"""Types with which a method recognises a draft for a target from their files, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig

from outrider.heads.checkpoint import MODEL, find_folder, kind_of, loose_files
from outrider.heads.gguf_heads import is_head as is_gguf_head
from outrider.runner.loading import load_config, num_layers, text_config

__all__ = ["MODEL", "Recognised", "TargetFiles", "find_folder", "is_gguf_head", "kind_of", "loose_files"]


class Recognised(NamedTuple):
    """A draft that fits a target."""

    what: str  # description in messages, such as "draft model"
    share: float | None = None  # number of weights / the target's; None for heads


@dataclass(frozen=True)
class TargetFiles:
    """A target whose files are on this machine, loaded or not."""

    name: str  # a folder, a hub id or a GGUF file
    folder: Path  # or the GGUF file
    config: PreTrainedConfig  # of its language model
    trusts_code: bool = False  # the option ``trust_remote_code``

    @classmethod
    def read(cls, name: str, folder: Path, trusts_code: bool = False) -> TargetFiles:
        """Read the config of a folder or GGUF file. Raises ``OutriderError`` if it has no readable one."""
        return cls(name, folder, text_config(load_config(folder)), trusts_code)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return num_layers(self.config)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)
