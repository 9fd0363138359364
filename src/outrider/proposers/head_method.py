"""Base class of methods that draft with a head. They differ in the head's format, its checks and the proposer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from outrider.heads.checkpoint import find_folder, kind_of
from outrider.options import CheckedOptions, int_choice, option
from outrider.proposers.method import MethodSpec, Recognised, Setting, TargetFiles
from outrider.proposers.sample_text import TEXT
from outrider.runner import ModelRunner
from outrider.types import Finding, OutriderError


class Loaded(NamedTuple):
    """A head that fits its target."""

    head: Any
    what: str  # description in messages, such as "EAGLE-3 head"
    measured: dict[str, Any]  # defaults of the method's options; None if training did not measure them


@dataclass(frozen=True)
class HeadConfig(CheckedOptions):
    """Precision of the head."""

    bits: int | None = option(
        int_choice(8, 16),
        None,
        "Bits per weight of the head, with 8 also per input; 16 keeps its weights "
        "(default: 8 above 64 MB on Outrider's CPU kernels, else 16).",
    )


class HeadMethod(MethodSpec, ABC):
    """A method whose draft is a head, in a folder or as an object."""

    options: type[HeadConfig] = HeadConfig
    takes_draft = True
    heads: type[nn.Module] | tuple[type[nn.Module], ...]  # classes of its heads

    @abstractmethod
    def load(self, folder: Path, target: ModelRunner | TargetFiles) -> Loaded:
        """Read a head, in float32. Raises ``OutriderError`` for a head that is broken or does not fit the target."""

    @abstractmethod
    def check_files(self, folder: Path, target: ModelRunner, sample: Sequence[int]) -> Iterator[Finding]:
        """Check a head's files. ``sample``: token ids of a text, empty without a tokenizer."""

    def build(self, setting: Setting) -> Any:
        """Load the head and create the proposer. Raises ``OutriderError`` if there is no head or it does not fit the target."""
        setting, proposer = setting.with_draft_of(self), cast("Any", self.proposer)
        head, measured = setting.draft, dict[str, Any]()
        if not isinstance(head, self.heads):
            head, _, measured = self.load(folder_of(setting), setting.target)
        return proposer(head, setting.target, setting.config(self.options, **measured))

    def recognise(self, folder: Path, target: TargetFiles) -> Recognised | None:
        if kind_of(folder) is not self.drafts_with:
            return None
        with torch.device("meta"):  # headers only
            return Recognised(self.load(folder, target).what)

    def examine(self, setting: Setting) -> Iterator[Finding]:
        setting = setting.with_draft_of(self)
        if not isinstance(setting.draft, self.heads):
            sample = setting.tokenizer.encode(TEXT) if setting.tokenizer is not None else []
            yield from self.check_files(folder_of(setting), setting.target, sample)


def folder_of(setting: Setting) -> Path:
    """Return the folder of the draft, or of the target if it contains its head."""
    source, target = setting.draft, setting.target
    if source is None:
        if target.name == type(target.model).__name__:
            lack = "the target is a loaded model, which has no folder with a head"
            raise OutriderError(f"{lack}: give draft=<folder or hub id>, or --draft")
        source = target.name
    if not isinstance(source, (str, Path)):
        raise OutriderError(
            f"invalid heads of type {type(source).__name__}: expected a folder, a hub id or a module of outrider.heads"
        )
    return find_folder(source)
