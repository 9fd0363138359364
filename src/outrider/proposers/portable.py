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

    @classmethod
    def of(cls, draft: object, config: CheckedOptions, given: Mapping[str, Any]) -> Self:
        """Describe a method with this draft and these options, of which the user gave ``given``.

        Fields have the names of options; ``source`` is the draft.
        """
        known = {"source": None if draft is None else str(draft), "given": frozenset(given), **vars(config)}
        return cls(**{each.name: known[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class NoDrafts(Portable):
    """Plain decoding."""

    what: ClassVar[str] = "no drafts"
    usual_k: ClassVar[int] = 0


@dataclass(frozen=True)
class SmallModel(Portable):
    """A draft model, in a folder or on the hub."""

    source: str
    other_tokenizer: bool = False

    what: ClassVar[str] = "a draft model"


@dataclass(frozen=True)
class ParallelModel(SmallModel):
    """A draft model that makes all drafts of a round in one pass over mask tokens, which its config names."""

    what: ClassVar[str] = "a draft model that reads mask tokens"
    usual_k: ClassVar[int] = 8


@dataclass(frozen=True)
class Lookup(Portable):
    """Prompt lookup: continuations of earlier n-grams."""

    min_n: int
    max_n: int

    what: ClassVar[str] = "n-grams of the text"
    usual_k: ClassVar[int] = 5


@dataclass(frozen=True)
class TextDrafts(Portable):
    """Another text-only method: engines with custom proposers can run Outrider's."""

    what: ClassVar[str] = "repetitions of any length in the text"
    usual_k: ClassVar[int] = 16


@dataclass(frozen=True)
class Pair(Portable):
    """A combination of two methods, at least one of which needs a model."""

    what: ClassVar[str] = "two methods in turn"


@dataclass(frozen=True)
class ParallelHeads(Portable):
    """Heads that predict the next tokens all at once."""

    source: str

    what: ClassVar[str] = "parallel heads"


@dataclass(frozen=True, kw_only=True)
class TreeHead(Portable):
    """A head that continues from the target's features, token by token, and may draft trees."""

    top_k: int = 1  # children per node
    max_nodes: int | None = None  # maximum drafts in a tree
    given: frozenset[str] = frozenset()  # names of the options that the user set

    @property
    def asks_for_tree(self) -> bool:
        """Return whether the user set the shape of the tree."""
        return self.top_k > 1 and not self.given.isdisjoint(("top_k", "max_nodes"))


@dataclass(frozen=True)
class FeatureHead(TreeHead):
    """A head trained on the target, in a folder or on the hub."""

    source: str
    hidden_states: tuple[int, ...] | None = None  # target hidden states, instead of those in the head's config

    what: ClassVar[str] = "a head on the target's features"


@dataclass(frozen=True)
class OwnHead(TreeHead):
    """An MTP head, which has the same kind of layer as the target."""

    source: str | None  # None: in the target's checkpoint

    what: ClassVar[str] = "an MTP head"


@dataclass(frozen=True)
class BlockDrafter(Portable):
    """A head trained on the target that drafts a block in one pass, in a folder or on the hub."""

    source: str

    what: ClassVar[str] = "a block drafter"
    usual_k: ClassVar[int] = 7


@dataclass(frozen=True)
class FirstLayers(Portable):
    """The target's own first layers."""

    layers: int | None

    what: ClassVar[str] = "the target's own first layers"


@dataclass(frozen=True)
class FewerBits(Portable):
    """The target's own weights in fewer bits, over its own cache."""

    what: ClassVar[str] = "the target's own weights in fewer bits"
