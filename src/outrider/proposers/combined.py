"""Two methods combined: each request uses the first method's draft if it is long enough, otherwise the second's.

Written ``first+second``. The first is model-free: repetitions are copied, and new text is drafted by the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.errors import errors_as
from outrider.method_text import options_by_part
from outrider.options import CheckedOptions, option, whole
from outrider.proposers.base import Proposer, merged
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import Form, Portable
from outrider.types import Context, Finding, OutriderError, Proposal, Request, Verdict, joined

MAX_CHUNKS = 64  # of a request, each of which keeps the states of the whole batch; then they are copied


@dataclass(frozen=True)
class CombinedConfig(CheckedOptions):
    """The condition for using the first method's draft."""

    min_first: int = option(
        whole(1), 8, "Length from which the first method's draft is used; a shorter one only if the second has none."
    )


class CombinedProposer(Proposer):
    """Uses the drafts of one of two proposers for each request.

    The first is model-free and drafts point masses: if the choice depended on sampled drafts, the chosen drafts would not
    follow the distribution in ``probs``.
    """

    def __init__(self, first: Proposer, second: Proposer, config: CombinedConfig = CombinedConfig()) -> None:
        self._first, self._second, self._config = first, second, config
        self.name = f"{first.name}+{second.name}"
        self.needs_hidden = second.needs_hidden
        self.max_drafts = max(first.max_drafts, second.max_drafts)
        self.auto_drafts = max(first.auto_drafts, second.auto_drafts)
        self.is_model_free, self.drafts_ahead = second.is_model_free, first.drafts_ahead and second.drafts_ahead
        self._unread: dict[str, dict[int, list[Tensor]]] = {}  # request -> layer -> hidden states that the second has not read
        self._drafted: set[str] = set()  # requests for which the second drafted in this round

    @property
    def memory(self) -> tuple[object, object]:
        """What both proposers learned from finished requests."""
        return self._first.memory, self._second.memory

    @memory.setter
    def memory(self, known: tuple[object, object] | None) -> None:
        self._first.memory, self._second.memory = known or (None, None)

    def propose(self, context: Context, k: int) -> Proposal:
        """Raise ``OutriderError`` if the first one's drafts carry probabilities."""
        self._store_hidden(context)
        self._drafted = set()
        batch, enough = len(context.requests), min(self._config.min_first, self._first.max_drafts)
        # Asked for at least ``min_first`` drafts, to decide whether they are long enough.
        view = replace(context, limits=tuple([max(limit, enough) for limit in context.limits]))
        from_first = self._first.propose(view, min(max(k, enough), self._first.max_drafts))
        if from_first.probs is not None:
            raise OutriderError(f"{self._first.name!r} samples its drafts, which the first method must not do; name it second")
        lens = from_first.lens.tolist()
        asked = [b for b in range(batch) if lens[b] < enough]
        from_second = self._ask_second(context.take(asked), k) if asked else Proposal.empty(0)
        drafted = [i for i, length in enumerate(from_second.lens.tolist()) if length]
        second_rows = [asked[i] for i in drafted]
        self._drafted = {context.requests[b].request_id for b in second_rows}
        first_rows = [b for b in range(batch) if b not in second_rows]
        first_lens = [min(lens[b], k, context.limits[b]) for b in first_rows]
        parts = [(first_rows, from_first.take(first_rows).narrow(first_lens)), (second_rows, from_second.take(drafted))]
        return merged(parts, batch, context.sampler.vocab_size)

    def commit(self, context: Context, verdict: Verdict) -> None:
        rows = [b for b, request_id in enumerate(context.request_ids) if request_id in self._drafted]  # maybe a part of them
        if rows:
            self._second.commit(context.take(rows), verdict.take(rows))

    def start(self, request: Request) -> int:
        return self._second.start(request)

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        first, second = self._first.prefill(requests), self._second.prefill(requests)
        return [pair == (True, True) for pair in zip(first, second, strict=True)]

    def fork(self, source_id: str, request: Request) -> None:
        self._second.fork(source_id, request)

    def num_nodes(self, k: int) -> int:
        return max([each.num_nodes(min(k, each.max_drafts)) for each in (self._first, self._second)])

    def prepare(self) -> None:
        self._second.prepare()

    def release(self, request_ids: Sequence[str]) -> None:
        self._first.release(request_ids)
        self._second.release(request_ids)
        self._forget_hidden(request_ids)

    def retire(self, request_ids: Sequence[str]) -> None:
        self._first.retire(request_ids)
        self._second.retire(request_ids)
        self._forget_hidden(request_ids)

    def _ask_second(self, context: Context, k: int) -> Proposal:
        """Return the second method's drafts for these requests, with their hidden states since its last call."""
        hidden = {}
        for layer in self.needs_hidden:
            hidden[layer] = [joined(self._unread.get(request_id, {}).get(layer, ())) for request_id in context.request_ids]
        self._forget_hidden(context.request_ids)
        k = min(k, self._second.auto_drafts, self._second.max_drafts)
        return self._second.propose(replace(context, hidden=hidden), k)

    def _store_hidden(self, context: Context) -> None:
        """Store the hidden states of this round until the second method is called."""
        for layer in self.needs_hidden:
            for request_id, hidden in zip(context.request_ids, context.hidden[layer], strict=True):
                if hidden.numel():
                    unread = self._unread.setdefault(request_id, {}).setdefault(layer, [])
                    unread.append(hidden)
                    if len(unread) > MAX_CHUNKS:
                        unread[:] = [joined(unread)]

    def _forget_hidden(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._unread.pop(request_id, None)


class CombinedMethod(MethodSpec):
    """The combination of two methods; their options are written ``name.option``."""

    proposer = CombinedProposer
    options = CombinedConfig

    def __init__(self, first: MethodSpec, second: MethodSpec) -> None:
        """Raise ``OutriderError`` if the first method is not model-free."""
        if not first.is_model_free:
            order = f"; write {second.name}+{first.name}" if second.is_model_free else ""
            raise OutriderError(
                f"invalid order of methods '{first.name}+{second.name}': the first must draft without a model{order}"
            )
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
        return self._parts[1].is_model_free

    def build(self, setting: Setting) -> CombinedProposer:
        """Build both proposers. Raises ``OutriderError`` if one does not fit the target."""
        config = self._config(setting)
        first, second = [part.build(own) for part, own in self._settings(setting)]
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
        config = self._config(setting)
        for part, own in self._settings(setting):
            part.portable(own)
        return Portable(Form.TEXT if self.is_model_free else Form.PAIR, None, config)

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
