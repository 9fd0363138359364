"""Two methods combined: each request uses the first method's draft if it is long enough, otherwise the second's.

Intended for a text-based first method and a model-based second one: repetitions are copied, new text is drafted by the model.
Written ``first+second``; the first is not used in rounds in which it would sample its drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.errors import errors_as
from outrider.method_text import options_by_part
from outrider.options import option, whole
from outrider.proposers.base import Proposer, merged
from outrider.proposers.method import MethodConfig, MethodSpec, Setting
from outrider.proposers.portable import Pair, Portable, TextDrafts
from outrider.types import Context, Finding, OutriderError, Proposal, Request, RequestFault, Verdict, joined

logger = logging.getLogger(__name__)

MAX_CHUNKS = 64  # of a request, each of which keeps the states of the whole batch; then they are copied


@dataclass(frozen=True)
class CombinedConfig(MethodConfig):
    """The condition for using the first method's draft."""

    min_first: int = option(
        whole(1), 8, "Length from which the first method's draft is used; a shorter one only if the second has none."
    )


class _Part:
    """One of the two proposers, called with some requests of a round as its batch."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.rows: dict[int, int] = {}  # row of the batch for which it was called in this round -> row of its proposal
        self._point_masses: list[list[int]] = []  # its drafts by row of its proposal, if these are chains
        self._unseen: dict[str, dict[int, list[Tensor]]] = {}  # request -> layer -> hidden states since the last call

    def store_hidden(self, context: Context) -> None:
        """Store the hidden states of this round until the proposer is called."""
        for layer in self.proposer.needs_hidden:
            for request_id, hidden in zip(context.request_ids, context.hidden[layer], strict=True):
                if hidden.numel():
                    unseen = self._unseen.setdefault(request_id, {}).setdefault(layer, [])
                    unseen.append(hidden)
                    if len(unseen) > MAX_CHUNKS:
                        unseen[:] = [joined(unseen)]

    def propose(self, view: Context, rows: list[int], k: int) -> Proposal:
        """Draft for the requests of a view, which are ``rows`` of the batch."""
        hidden = {}
        for layer in self.proposer.needs_hidden:
            hidden[layer] = [joined(self._unseen.get(request_id, {}).get(layer, ())) for request_id in view.request_ids]
        self.forget_hidden(view.request_ids)
        proposal = self.proposer.propose(replace(view, hidden=hidden), min(k, self.proposer.max_drafts))
        self.rows, self._point_masses = {row: i for i, row in enumerate(rows)}, []
        if proposal.parents is None and proposal.probs is None:
            each = zip(proposal.token_ids.tolist(), proposal.lens.tolist(), strict=True)
            self._point_masses = [token_ids[:count] for token_ids, count in each]
        return proposal

    def num_emitted(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many of its drafts for a row of the batch begin these emitted tokens; 0 unless they are a chain of point
        masses.
        """
        own = self._point_masses[self.rows[row]] if self._point_masses else []
        pairs = enumerate(zip(own, tokens, strict=False))
        return next((at for at, (draft, token) in pairs if draft != token), min(len(own), len(tokens)))

    def forget_hidden(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._unseen.pop(request_id, None)


class CombinedProposer(Proposer):
    """Uses the drafts of one of two proposers for each request.

    The first must draft point masses: if the choice depended on sampled drafts, the chosen drafts would not follow the
    distribution in ``probs``. If it would sample its drafts in a round, the second drafts for all requests.
    """

    def __init__(self, first: Proposer, second: Proposer, config: CombinedConfig = CombinedConfig()) -> None:
        self._first, self._second, self._config = _Part(first), _Part(second), config
        self._parts = (self._first, self._second)
        self.name = f"{first.name}+{second.name}"
        self.needs_hidden = tuple(sorted({*first.needs_hidden, *second.needs_hidden}))
        self.drafts_trees = first.drafts_trees or second.drafts_trees
        self.max_drafts = max(first.max_drafts, second.max_drafts)
        self.auto_drafts = max(first.auto_drafts, second.auto_drafts)
        self.is_model_free = first.is_model_free and second.is_model_free
        self.drafts_ahead = first.drafts_ahead and second.drafts_ahead
        self._rows: dict[str, int] = {}  # row of each request in this round
        self._owners: list[_Part] = []  # source of each row's drafts
        self._proposal = Proposal.empty(0)

    @property
    def memory(self) -> tuple[object, object]:
        """What both proposers learned from finished requests."""
        return self._first.proposer.memory, self._second.proposer.memory

    @memory.setter
    def memory(self, known: tuple[object, object] | None) -> None:
        self._first.proposer.memory, self._second.proposer.memory = known or (None, None)

    def propose(self, context: Context, k: int) -> Proposal:
        """Raise ``OutriderError`` if the first one's drafts carry probabilities although it does not declare that."""
        self._rows = {request_id: b for b, request_id in enumerate(context.request_ids)}
        for part in self._parts:
            part.store_hidden(context)
            part.rows = {}
        batch, enough = len(context.requests), min(self._config.min_first, self._first.proposer.max_drafts)
        is_sampled = self._first.proposer.samples_drafts and not context.sampler.is_deterministic
        from_first = Proposal.empty(batch) if is_sampled else self._ask_first(context, k)
        lens = from_first.lens.tolist()
        rows = [b for b, limit in enumerate(context.limits) if limit > 0 and lens[b] < enough]
        from_second = Proposal.empty(0)
        if rows:
            try:
                from_second = self._second.propose(context.take(rows), rows, min(k, self._second.proposer.auto_drafts))
            except RequestFault:  # other requests continue, but no verdict follows on the first one's drafts: they must go
                first = self._first.proposer
                if self._first.rows and not first.is_model_free and not first.needs_hidden:  # its next propose fills the cache
                    first.release(context.request_ids)
                raise
        second_rows = {b: i for i, b in enumerate(rows) if from_second.lens[i] > 0}
        self._owners = [self._second if b in second_rows else self._first for b in range(batch)]
        if len(second_rows) == batch:
            self._proposal = from_second
            return from_second
        if from_first.parents is None:  # trees are not cut, as their nodes need not be in the order of depth
            lens = [min(n, k, limit) for n, limit in zip(lens, context.limits, strict=True)]
        from_first = from_first.narrow([0 if b in second_rows else n for b, n in enumerate(lens)])
        if not second_rows:
            self._proposal = from_first
            return from_first
        kept = [b for b in range(batch) if b not in second_rows]
        parts = [(kept, from_first.take(kept)), (list(second_rows), from_second.take(list(second_rows.values())))]
        self._proposal = merged(parts, batch, context.sampler.vocab_size)
        return self._proposal

    def commit(self, context: Context, verdict: Verdict) -> None:
        rows = [self._rows[request_id] for request_id in context.request_ids]  # maybe only a part of the batch
        for part in self._parts:
            index = [i for i, row in enumerate(rows) if row in part.rows]
            if index:
                own_verdict = self._verdict_for(part, index, [rows[i] for i in index], verdict)
                part.proposer.commit(context.take(index), own_verdict)

    def start(self, request: Request) -> int:
        return min([part.proposer.start(request) for part in self._parts])

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        first, second = (part.proposer.prefill(requests) for part in self._parts)
        return [pair == (True, True) for pair in zip(first, second, strict=True)]

    def fork(self, source_id: str, request: Request) -> None:
        for part in self._parts:
            part.proposer.fork(source_id, request)

    def num_nodes(self, k: int) -> int:
        return max([part.proposer.num_nodes(min(k, part.proposer.max_drafts)) for part in self._parts])

    def prepare(self) -> None:
        for part in self._parts:
            part.proposer.prepare()

    def release(self, request_ids: Sequence[str]) -> None:
        for part in self._parts:
            part.proposer.release(request_ids)
            part.forget_hidden(request_ids)

    def retire(self, request_ids: Sequence[str]) -> None:
        for part in self._parts:
            part.proposer.retire(request_ids)
            part.forget_hidden(request_ids)

    def _ask_first(self, context: Context, k: int) -> Proposal:
        """Return the first method's drafts, with a K of at least ``min_first``, to decide whether they are long enough."""
        rows, view = list(range(len(context.requests))), context
        if not self._first.proposer.drafts_trees:
            wanted = self._config.min_first
            k = max(k, wanted)
            view = replace(context, limits=tuple([max(limit, wanted) if limit > 0 else 0 for limit in context.limits]))
        proposal = self._first.propose(view, rows, k)
        if proposal.probs is not None:
            name = self._first.proposer.name
            raise OutriderError(
                f"invalid order of methods: {name!r} samples its drafts, which the first method must not do; name it second"
            )
        return proposal

    def _verdict_for(self, part: _Part, index: list[int], rows: list[int], verdict: Verdict) -> Verdict:
        """Return the verdict for one part: of its unused drafts, those that equal the emitted tokens count as accepted.

        ``index``: positions of the part's requests in the verdict; ``rows``: their rows in the batch.
        """
        own, drafts = verdict.take(index), self._proposal.token_ids.tolist()
        for i, row in enumerate(rows):
            if self._owners[row] is not part:
                emitted = [*(drafts[row][node] for node in own.paths[i]), own.next_tokens[i]]
                count = part.num_emitted(row, emitted[:-1])
                own.paths[i], own.next_tokens[i] = list(range(count)), emitted[count]
        return own


class CombinedMethod(MethodSpec):
    """The combination of two methods; their options are written ``name.option``."""

    proposer = CombinedProposer
    options = CombinedConfig

    def __init__(self, first: MethodSpec, second: MethodSpec) -> None:
        self._parts = (first, second)
        self.takes_draft = first.takes_draft or second.takes_draft

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self._parts)

    @property
    def max_drafts(self) -> int:
        return max(part.max_drafts for part in self._parts)

    @property
    def is_model_free(self) -> bool:
        return all(part.is_model_free for part in self._parts)

    def build(self, setting: Setting) -> CombinedProposer:
        """Build both proposers. Raises ``OutriderError`` if one does not fit the target."""
        config = self._config(setting)
        first, second = [part.build(own) for part, own in self._settings(setting)]
        if first.samples_drafts and not setting.same_text:
            logger.warning(
                "%s: sampled requests are drafted for by %s only, because %s samples their drafts (docs/methods.md)",
                self.name,
                second.name,
                first.name,
            )
        return CombinedProposer(first, second, config)

    def join(self, first: Proposer, second: Proposer) -> CombinedProposer:
        """Combine two existing proposers and share their caches. A request must not run in more than one of the three."""
        return CombinedProposer(first, second)

    def drafts_in(self, options: Mapping[str, Any], general: object, drafts: Mapping[str, object]) -> list[object]:
        """Return the drafts of both methods."""
        each = options_by_part(self.name, options)
        return [draft for part in self._parts for draft in part.drafts_in(each[part.name], general, drafts)]

    def check_options(self, options: Mapping[str, Any]) -> None:
        setting = Setting.without_target(options=options)
        self._config(setting)
        for part, own in self._settings(setting):
            with errors_as(part.name, OutriderError, detail=str):
                part.check_options(own.options)

    def portable(self, setting: Setting) -> Portable:
        """Describe the combination. Raises ``OutriderError`` for options that one of the methods rejects."""
        self._config(setting)
        for part, own in self._settings(setting):
            part.portable(own)
        return TextDrafts() if self.is_model_free else Pair()

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Check both methods."""
        for part, own in self._settings(setting):
            yield from part.examine(own)

    def alternatives(self, setting: Setting) -> list[str]:
        """Return the alternatives of both methods."""
        found = [(part.name, part.alternatives(own)) for part, own in self._settings(setting)]
        return [_prefixed(name, alternative) for name, alternatives in found for alternative in alternatives]

    def _settings(self, setting: Setting) -> list[tuple[MethodSpec, Setting]]:
        """Return each method and the setting with its own options."""
        options = options_by_part(self.name, setting.options)
        return [(part, replace(setting, options=options[part.name])) for part in self._parts]

    def _config(self, setting: Setting) -> CombinedConfig:
        """Return the options of the combination itself."""
        return replace(setting, options=options_by_part(self.name, setting.options)[""]).config(CombinedConfig)


def _prefixed(name: str, text: str) -> str:
    """Prefix each option in ``option=value:option=value`` with the method's name."""
    return ":".join([f"{name}.{option}" for option in text.split(":")])
