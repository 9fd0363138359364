"""The one interface of every drafting method, the empty proposer that *is* plain decoding, and a scripted one for tests.

A proposer knows the committed text and, if it declares ``needs_hidden``, features of the target; no verifier and no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from outrider.heads.checkpoint import MODEL, kind_of
from outrider.proposers.portable import NoDrafts, Portable
from outrider.registry import PROPOSERS
from outrider.types import Context, Finding, OutriderError, Proposal, Request, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.runner import ModelRunner

Config = TypeVar("Config")


@dataclass(frozen=True)
class NoOptions:
    """The configuration of a method that has nothing to choose."""


@dataclass(frozen=True)
class Setting:
    """What a proposer is built for: the target it drafts for and what the user gave beside it."""

    target: ModelRunner
    tokenizer: PreTrainedTokenizerBase | None = None
    draft: object = None  # a folder, a hub id or a loaded model, for methods that take a draft
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own, by name
    drafts: Mapping[str, object] = field(default_factory=dict)  # those that come with the target, by name

    @classmethod
    def without_target(cls, **given: Any) -> Setting:
        """For what is said or built from options and drafts alone: whoever looks at ``target`` finds None."""
        return cls(cast("ModelRunner", None), **given)

    def of(self, kind: type[Proposer]) -> Setting:
        """The setting as a method sees it: ``draft`` is the one that it drafts with, and no longer among the options.

        Raises ``OutriderError`` as ``chosen_draft`` does.
        """
        if not kind.takes_draft:
            return self
        options = {name: value for name, value in self.options.items() if name != "draft"}
        draft = chosen_draft(kind, self.options.get("draft"), self.draft, self.drafts)
        return replace(self, draft=draft, options=options)

    def config(self, kind: type[Config], **measured: Any) -> Config:
        """The options as the method's configuration; text is read as its type says.

        ``measured``: values that stand in the place of defaults, where they are not None. Raises ``OutriderError`` for an
        option that it does not know or refuses.
        """
        known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise OutriderError(f"the method has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
        hints = get_type_hints(kind)
        given = {name: value for name, value in measured.items() if value is not None} | dict(self.options)
        try:
            return kind(**{name: _read(value, hints[name]) for name, value in given.items()})
        except (TypeError, ValueError) as error:
            raise OutriderError(f"an option of the method has a value of the wrong type: {error}") from error


def _read(value: Any, hint: Any) -> Any:
    """Text as the number, truth value or tuple that the hint asks for, lists as tuples; anything else as it is.

    In a tuple commas part the values, in one of tuples slashes the rows: ``0.6,0.2/0.5,0.1``.
    """
    kinds = get_args(hint) if get_origin(hint) is not tuple and get_args(hint) else (hint,)
    inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), None)
    if inner is not None and isinstance(value, (list, tuple)):
        return tuple(_read(each, inner) for each in value)
    if not isinstance(value, str) or str in kinds:
        return value
    if type(None) in kinds and value.lower() in ("auto", "none"):
        return None
    if inner is not None:
        return tuple(_read(each, inner) for each in value.split("/" if get_origin(inner) is tuple else ","))
    if bool in kinds and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if int in kinds else float(value)


def chosen_draft(kind: type[Proposer], named: object, general: object, drafts: Mapping[str, object]) -> object:
    """What a method drafts with: the draft ``named`` for it, else the ``general`` one, else its own among ``drafts``.

    A name of ``drafts`` means that one. Raises ``OutriderError`` where there is none, or one of another kind than the method's.
    """
    name, what = kind.name, kind.drafts_with
    source = general if named is None else named
    if source is None:
        source = drafts.get(kind.own_draft or "")
    elif isinstance(source, str):
        source = drafts.get(source, source)
    if source is None:
        lack = f", and {kind.own_draft!r} is not among those that come with this target" if drafts else ""
        raise OutriderError(f"method {name!r} needs {what}{lack}: give {name}:draft=<folder or hub id>, or --draft")
    found = kind_of(Path(source)) if isinstance(source, (str, Path)) else None
    if found is not None and found != kind.drafts_with:
        known = (name for name in PROPOSERS if PROPOSERS.get(name).takes_draft and PROPOSERS.get(name).drafts_with == found)
        raise OutriderError(f"{source} holds {found}, and method {name!r} needs {what}: use method {next(known)!r} with it")
    return source


class Proposer(ABC):
    """Where drafts come from. One method = one subclass = one file."""

    name: str = "custom"
    needs_hidden: tuple[int, ...] = ()  # target hidden states it wants to see, counted as types.Scores says: data
    drafts_trees: bool = False  # whether its proposals may have parents: then the verifier must handle trees
    max_drafts: int = 64  # the longest path it can draft
    auto_drafts: int = 15  # the longest that is asked for where the length is chosen each round: passes of 16 rows
    takes_draft: bool = False  # whether it looks at the draft that the user names
    drafts_with: str = MODEL  # the kind of draft that it takes, as heads.checkpoint.kind_of names it
    own_draft: str | None = None  # the name under which a draft for it may come with the target
    memory: Any = None  # what requests that ended have taught it; set to None it has learned nothing yet
    reads_text_only: bool = False  # whether ``build`` and ``propose`` look at options and committed text alone: at no target

    @classmethod
    def build(cls, setting: Setting) -> Proposer:
        """Makes the proposer for a target. Raises ``OutriderError`` when it does not fit the target."""
        setting.config(NoOptions)
        return cls()

    @classmethod
    def drafts_in(cls, options: Mapping[str, Any], general: object, drafts: Mapping[str, object]) -> list[object]:
        """What it will draft with, before anything is loaded. Raises ``OutriderError`` as ``chosen_draft`` does."""
        return [chosen_draft(cls, options.get("draft"), general, drafts)] if cls.takes_draft else []

    @classmethod
    def portable(cls, setting: Setting) -> Portable:
        """What it is in words that other engines have too, before any model is there: ``setting.target`` is None.

        Raises ``OutriderError`` for options that it refuses, and where a draft is missing.
        """
        return Portable()

    @classmethod
    def examine(cls, setting: Setting) -> Iterator[Finding]:
        """What files and configs say of whether this method fits the target, before ``build`` loads anything."""
        yield from ()

    @classmethod
    def alternatives(cls, setting: Setting) -> list[str]:
        """Options, as text behind the method's name, that are easily mistaken for those given: the doctor tries them too."""
        return []

    @abstractmethod
    def propose(self, context: Context, k: int) -> Proposal:
        """Drafts at most k tokens on a path for each of the B requests, ``context.limits`` being of use at most.

        What it raises ends speculation for all of them for a while. The sampler's ``InvalidLogits``, let through once
        ``context.hidden`` has been read, does so for the requests that it names.
        """

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        """Prefill the next chunk of new requests; return for each whether it can be drafted for now.

        For proposers that run a model over the whole text: other requests should not wait for it.
        """
        return [True] * len(requests)

    def fork(self, source_id: str, request: Request) -> None:  # noqa: B027 - optional
        """A new request has the prompt of another: what is kept of that prompt may be copied instead of made again."""

    def commit(self, context: Context, verdict: Verdict) -> None:  # noqa: B027 - optional
        """Learns what was kept, before the scheduler appends it to the requests. Text-based proposers need nothing.

        Of requests that were drafted for this round; of one that fails meanwhile it is not told, and of each alone where the
        target had to score them so.
        """

    def release(self, request_ids: Sequence[str]) -> None:  # noqa: B027 - optional
        """Forgets requests that ended. Unknown ids are ignored."""

    def retire(self, request_ids: Sequence[str]) -> None:
        """Forgets requests that came to a good end; a cache of their text may be kept for others that begin with it."""
        self.release(request_ids)

    def num_nodes(self, k: int) -> int:
        """Drafts in a full proposal whose longest path is k: what the target's pass over it is priced by."""
        return k

    def warmup(self, k: int, batch: int) -> None:  # noqa: B027 - optional
        """Does now what would make the first rounds slow (compiling, measuring)."""


class PlainProposer(Proposer):
    """Proposes nothing: plain decoding is speculation with K = 0."""

    name = "plain"
    max_drafts = 0

    @classmethod
    def portable(cls, setting: Setting) -> NoDrafts:
        return NoDrafts()

    def propose(self, context: Context, k: int) -> Proposal:
        return Proposal.empty(len(context.requests))


class ScriptedProposer(Proposer):
    """Calls a function of yours: the mock of this interface, public so that your tests can use it too.

    >>> proposer = ScriptedProposer(lambda context, k: Proposal.empty(len(context.requests)))
    """

    name = "scripted"

    def __init__(self, script: Callable[[Context, int], Proposal]) -> None:
        self._script = script

    def propose(self, context: Context, k: int) -> Proposal:
        return self._script(context, k)

    @classmethod
    def of_chains(cls, chains: Callable[[Context, int], Sequence[Sequence[int]]]) -> ScriptedProposer:
        """From a function that gives each request's drafts as a list of ids: point masses, ragged."""
        return cls(lambda context, k: chain_proposal(chains(context, k)))


def chain_proposal(chains: Sequence[Sequence[int]]) -> Proposal:
    """Ragged lists of draft ids -> a right-padded chain proposal of point masses."""
    lens = [len(chain) for chain in chains]
    width = max(lens, default=0)
    padded = [list(chain) + [0] * (width - len(chain)) for chain in chains]
    return Proposal(torch.tensor(padded, dtype=torch.long).view(len(chains), width), torch.tensor(lens, dtype=torch.long))


def merged(parts: Sequence[tuple[Sequence[int], Proposal]], batch: int, vocab_size: int) -> Proposal:
    """Proposals for some rows of a batch each, no row in two of them, as one for all; the other rows are without drafts.

    Where one of them has probabilities the point masses of the others become one-hots, and where one is a tree the chains of
    the others become trees: to a verifier they are the same.
    """
    parts = [(rows, part) for rows, part in parts if part.num_nodes]
    if not parts:
        return Proposal.empty(batch)
    if len(parts) == 1 and len(parts[0][0]) == batch:
        return parts[0][1]
    device = next((part.probs.device for _, part in parts if part.probs is not None), parts[0][1].token_ids.device)
    width = max(part.num_nodes for _, part in parts)
    token_ids, lens = torch.zeros(batch, width, dtype=torch.long, device=device), torch.zeros(batch, dtype=torch.long)
    probs = parents = None
    drawn = [part.probs for _, part in parts if part.probs is not None]
    if drawn:
        probs = torch.zeros(batch, width, vocab_size, dtype=drawn[0].dtype, device=device)
    if any(part.parents is not None for _, part in parts):
        parents = torch.arange(-1, width - 1, device=device).repeat(batch, 1)
    for rows, part in parts:
        index, nodes = torch.tensor(rows, device=device), slice(part.num_nodes)
        token_ids[index, nodes] = part.token_ids.to(device)
        lens[torch.tensor(rows)] = part.lens
        if probs is not None and part.probs is not None:
            probs[index, nodes] = part.probs.to(device)
        elif probs is not None:
            probs[index[:, None], torch.arange(part.num_nodes, device=device), part.token_ids.to(device)] = 1.0
        if parents is not None and part.parents is not None:
            parents[index, nodes] = part.parents.to(device)
    partial = next((part.partial_pass for _, part in parts if part.partial_pass is not None), None)
    return Proposal(token_ids, lens, probs, parents, partial)


def spread(values: Tensor, rows: Sequence[int], batch: int) -> Tensor:
    """[A, ...] of the requests ``rows`` -> [B, ...], all that the sampler knows: the others' rows are zero and lead nowhere."""
    if len(rows) == batch:
        return values
    index = torch.tensor(rows, device=values.device)
    return values.new_zeros(batch, *values.shape[1:]).index_copy_(0, index, values)
