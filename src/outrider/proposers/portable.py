"""What a method is in words that other engines have too: a proposer says it (``Proposer.portable``).

``outrider.export`` translates it into their terms; this knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Portable:
    """A way of drafting. Of a method that says nothing else: its own, which no other engine has."""

    what: ClassVar[str] = "a method of its own"  # in messages: "vLLM cannot draft with ..."
    usual_k: ClassVar[int] = 4  # drafts a round where the plan leaves them to be chosen each round


@dataclass(frozen=True)
class NoDrafts(Portable):
    """Plain decoding."""

    what: ClassVar[str] = "no drafts"
    usual_k: ClassVar[int] = 0


@dataclass(frozen=True)
class SmallModel(Portable):
    """A second model, in a folder or on the hub."""

    source: str
    other_tokenizer: bool = False

    what: ClassVar[str] = "a draft model"


@dataclass(frozen=True)
class Lookup(Portable):
    """What followed the same n tokens earlier in the text."""

    min_n: int
    max_n: int

    what: ClassVar[str] = "n-grams of the text"
    usual_k: ClassVar[int] = 5


@dataclass(frozen=True)
class TextDrafts(Portable):
    """Any other method that needs the text alone: an engine with room for proposers of others can run Outrider's."""

    what: ClassVar[str] = "repetitions of any length in the text"
    usual_k: ClassVar[int] = 16


@dataclass(frozen=True)
class Pair(Portable):
    """Two methods in turn, of which one needs a model."""

    what: ClassVar[str] = "two methods in turn"


@dataclass(frozen=True)
class ParallelHeads(Portable):
    """Heads that guess the next tokens all at once."""

    source: str

    what: ClassVar[str] = "parallel heads"


@dataclass(frozen=True)
class FeatureHead(Portable):
    """A head that goes on from the target's features, a token at a time."""

    source: str
    hidden_states: tuple[int, ...] | None = None  # of the target, in the place of those that the head names
    top_k: int = 1  # children of a node
    max_nodes: int | None = None  # drafts in a tree
    asks_for_tree: bool = False  # the user said so, and did not just leave it at the default

    what: ClassVar[str] = "a head on the target's features"


@dataclass(frozen=True)
class FirstLayers(Portable):
    """The target's own first layers."""

    layers: int | None

    what: ClassVar[str] = "the target's own first layers"


@dataclass(frozen=True)
class FewerBits(Portable):
    """The target's own weights in fewer bits, over its own cache."""

    bits: int

    what: ClassVar[str] = "the target's own weights in fewer bits"
