"""Engine-independent descriptions of drafting methods, returned by ``MethodSpec.portable``.

``outrider.export`` translates them for other engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

TREE = ("top_k", "max_nodes", "max_depth")


class Form(Enum):
    """What a method drafts with."""

    CUSTOM = ("a custom method",)  # no other engine supports it
    NO_DRAFTS = "no drafts", 0
    SMALL_MODEL = ("a draft model",)
    FOREIGN_MODEL = ("a draft model with another tokenizer",)
    PARALLEL_MODEL = "a draft model that reads mask tokens", 8
    FOREIGN_PARALLEL_MODEL = "a draft model with another tokenizer that reads mask tokens", 8
    LOOKUP = "n-grams of the text", 5, ("min_n", "max_n")
    TEXT = "repetitions of any length in the text", 16  # engines with custom proposers can run Outrider's
    PAIR = ("two methods in turn",)  # at least one of which needs a model
    PARALLEL_HEADS = ("parallel heads",)
    FEATURE_HEAD = "a head on the target's features", 4, (*TREE, "hidden_states")
    OWN_HEAD = "an MTP head", 4, TREE  # without a source: in the target's checkpoint
    BLOCK_DRAFTER = "a block drafter", 7
    FIRST_LAYERS = "the target's own first layers", 4, ("layers",)
    FEWER_BITS = ("the target's own weights in fewer bits",)

    def __init__(self, what: str, usual_k: int = 4, carried: tuple[str, ...] = ()) -> None:
        self.what = what  # in messages: "vLLM cannot draft with ..."
        self.usual_k = usual_k  # drafts per round for plans with K = auto
        self.carried = carried  # options that other engines have, too


@dataclass(frozen=True)
class Portable:
    """A drafting method with its draft and options."""

    form: Form
    source: Any  # folder or hub id of its draft, a str; None without one
    config: Any  # its options, of the method's class

    @property
    def drafts_trees(self) -> bool:
        """Return whether its options include the shape of a tree."""
        return "top_k" in self.form.carried
