"""Engine-independent descriptions of drafting methods, returned by ``MethodSpec.portable``.

``outrider.export`` translates them for other engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from outrider.options import CheckedOptions


@dataclass(frozen=True)
class Portable:
    """A drafting method. The base class describes a method that no other engine supports."""

    what: ClassVar[str] = "a custom method"  # in messages: "vLLM cannot draft with ..."
    usual_k: ClassVar[int] = 4  # drafts per round for plans with K = auto

    def __init_subclass__(cls, what: str | None = None, usual_k: int | None = None) -> None:
        cls.what, cls.usual_k = what or cls.what, cls.usual_k if usual_k is None else usual_k

    @classmethod
    def of(cls, draft: object, config: CheckedOptions, given: Mapping[str, Any]) -> Self:
        """Describe a method with this draft and these options, of which the user gave ``given``.

        Fields have the names of options; ``source`` is the draft.
        """
        known = {"source": None if draft is None else str(draft), "given": frozenset(given), **vars(config)}
        return cls(**{each.name: known[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class NoDrafts(Portable, what="no drafts", usual_k=0):
    """Plain decoding."""


@dataclass(frozen=True)
class SmallModel(Portable, what="a draft model"):
    """A draft model, in a folder or on the hub."""

    source: str
    other_tokenizer: bool = False


@dataclass(frozen=True)
class ParallelModel(SmallModel, what="a draft model that reads mask tokens", usual_k=8):
    """A draft model that makes all drafts of a round in one pass over mask tokens, which its config names."""


@dataclass(frozen=True)
class Lookup(Portable, what="n-grams of the text", usual_k=5):
    """Prompt lookup: continuations of earlier n-grams."""

    min_n: int
    max_n: int


@dataclass(frozen=True)
class TextDrafts(Portable, what="repetitions of any length in the text", usual_k=16):
    """Another text-only method: engines with custom proposers can run Outrider's."""


@dataclass(frozen=True)
class Pair(Portable, what="two methods in turn"):
    """A combination of two methods, at least one of which needs a model."""


@dataclass(frozen=True)
class ParallelHeads(Portable, what="parallel heads"):
    """Heads that predict the next tokens all at once."""

    source: str


@dataclass(frozen=True, kw_only=True)
class TreeHead(Portable):
    """A head that continues from the target's features, token by token, and may draft trees."""

    top_k: int = 1  # children per node
    max_nodes: int | None = None  # maximum drafts in a tree
    max_depth: int | None = None  # maximum length of a path
    given: frozenset[str] = frozenset()  # names of the options that the user set

    @property
    def asks_for_tree(self) -> bool:
        """Return whether the user set the shape of the tree."""
        return self.top_k > 1 and not self.given.isdisjoint(("top_k", "max_nodes"))


@dataclass(frozen=True)
class FeatureHead(TreeHead, what="a head on the target's features"):
    """A head trained on the target, in a folder or on the hub."""

    source: str
    hidden_states: tuple[int, ...] | None = None  # target hidden states, instead of those in the head's config


@dataclass(frozen=True)
class OwnHead(TreeHead, what="an MTP head"):
    """An MTP head, which has the same kind of layer as the target."""

    source: str | None  # None: in the target's checkpoint


@dataclass(frozen=True)
class BlockDrafter(Portable, what="a block drafter", usual_k=7):
    """A head trained on the target that drafts a block in one pass, in a folder or on the hub."""

    source: str


@dataclass(frozen=True)
class FirstLayers(Portable, what="the target's own first layers"):
    """The target's own first layers."""

    layers: int | None


@dataclass(frozen=True)
class FewerBits(Portable, what="the target's own weights in fewer bits"):
    """The target's own weights in fewer bits, over its own cache."""
