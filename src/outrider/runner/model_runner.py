"""Runs one model over its own KV cache: prefill, scoring of proposals, and commit of accepted drafts.

Target and draft models use the same class.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider import native
from outrider.runner import experts, linear, loading, packing
from outrider.runner.config import RunnerConfig, torch_device
from outrider.runner.cost_book import CostBook
from outrider.runner.footprint import fetch_fitting_weights
from outrider.runner.graphs import Run, wait_for
from outrider.runner.kv_cache import CacheShape, KVCache
from outrider.runner.layer_span import WHOLE, LayerSpan
from outrider.runner.layouts import MIN_PREFILL, Layouts, rows_from, shared_chunk
from outrider.runner.longrope import split_longrope, usual_window
from outrider.runner.packed_files import PackedFile
from outrider.runner.passes import PassRunner
from outrider.runner.round_hidden import RoundHidden
from outrider.runner.rounding import choose_reader, refuse_rounding
from outrider.runner.self_check import check_itself
from outrider.runner.survey import survey, survey_without_weights
from outrider.types import Context, OutriderError, PartialPass, Proposal, Scores, Verdict

Sequences = Sequence[Sequence[int]]  # token ids of each request
NextToken = Callable[[Tensor, int], Tensor | None]  # (logits [B, 1, V], step index) -> tokens [B, 1] int64; None: the last step
ReadLogits = Callable[[int, int, Tensor], None]  # (b, position of the first token, logits [T, V] after T tokens of request b)


class ModelRunner:
    """One model with its cache and passes."""

    drafts_ahead = True  # as a draft model it can read tokens that the target has not processed yet

    def __init__(
        self, model: PreTrainedModel, config: RunnerConfig, device: torch.device, name: str, shape: CacheShape
    ) -> None:
        """``model``: prepared by ``load``; ``shape``: the cache entries of its layers."""
        self.model, self.config, self.device, self.name = model, config, device, name
        text_config = loading.text_config(model)
        self.vocab_size = int(text_config.vocab_size)
        self.hidden_size = int(text_config.hidden_size)
        self.num_layers = loading.num_layers(text_config)
        window = loading.context_length(text_config) or 1 << 20
        self.max_len = min(window, config.max_len or usual_window(model, window))
        self.max_batch = config.max_batch
        self.dtype = linear.arithmetic(model)
        budget = None if config.kv_memory is None else int(config.kv_memory * 2**30)
        self.cache = KVCache(shape, config.max_batch, self.max_len, self.dtype, device, budget, config.max_drafts)
        self.max_drafts = config.max_drafts if shape.is_recurrent else None  # of a request in one pass; None: any number
        # Recurrent states and models' own masks allow one path only.
        self.supports_trees = not shape.is_recurrent and not shape.by_request
        self.max_len = self.cache.max_len  # lower if limited by memory
        self._long_rows = split_longrope(model, self.max_len, config.max_batch)
        self.cache.keeps_prefixes = config.prefix_cache and self._long_rows is None
        if self._long_rows is not None:
            self.cache.on_compact = self._long_rows.keep_rows
        self.layouts = Layouts(self.cache)
        self.costs = CostBook(self.layouts.is_padded)  # shared by all engines that it serves
        self.passes = PassRunner(model, self.cache, config.compile, self.costs.renew)
        # Lengths that a sequence must not cross within a round, because it is then prefilled again with other frequencies.
        self.borders: tuple[int, ...] = () if self._long_rows is None else (self._long_rows.window,)
        self._round_hidden = RoundHidden(copies=self.layouts.is_padded)
        self._scored: tuple[tuple[str, ...], list[int], bool] | None = None  # until commit: requests, slots of roots, is a tree
        self.file: PackedFile | None = None  # in which weights that the caller rounds can be stored

    @classmethod
    def load(
        cls, model: str | Path | PreTrainedModel, config: RunnerConfig | None = None, form: str | None = None
    ) -> ModelRunner:
        """Load a model, or use a loaded one. Raises ``OutriderError`` if it is not supported.

        ``form``: name of the caller's own rounding. Weights that the disk cache has in this form are loaded from it.
        """
        config = config or RunnerConfig()
        if isinstance(model, PreTrainedModel):
            return cls._from_object(model, config)
        if not isinstance(model, (str, Path)):
            raise OutriderError(
                f"invalid model of type {type(model).__name__}: expected a folder, a hub id or a transformers PreTrainedModel"
            )
        device = torch_device(config.device)
        model_config = loading.load_config(model, config.trust_remote_code)
        model_class = loading.model_class(model_config)
        reader = choose_reader(str(model), model_config, model_class, device)
        if config.weights is not None:
            refuse_rounding(config.weights, device, model_config, model_class, reader)
        loading.check_device(device)
        # The survey refuses a model before gigabytes are read.
        shape = None if model_class is None else survey_without_weights(model_config, model_class)
        rounding = (form or config.bits) if shape is not None and native.serves(device) else None
        if rounding is not None and shape is not None:
            file = PackedFile.of(model, rounding, config.dtype)
            packed = None if file is None else file.load(model_config, model_class, shape.by_request)
            if packed is not None:
                return cls(packed, config, device, str(model), shape)._checked("eager", model)
        if device.type == "cpu":
            fetch_fitting_weights(model, model_config, model_class, reader, config)
        loaded = loading.load_model(model, model_config, config.dtype, device, config.trust_remote_code, reader)
        loading.check_weights(loaded, str(model))
        linear.fuse_on_gpu(loaded)
        runner = cls._from_loaded(loaded, config, device, shape, model)
        if rounding is not None:
            runner.file = PackedFile.of(model, rounding, config.dtype)  # also for a hub id, whose files are downloaded by now
            if config.weights is not None and runner.file is not None:
                runner.file.save(loaded)
        return runner

    @classmethod
    def _from_object(cls, model: PreTrainedModel, config: RunnerConfig) -> ModelRunner:
        loading.refuse_encoders(model.config)
        loading.refuse_conversion(model, config.dtype, config.device)
        loading.check_device(model.device)
        if config.weights is not None:
            refuse_rounding(config.weights, model.device, model.config, type(model))
        shape = survey_without_weights(model.config, type(model))
        return cls._from_loaded(linear.structural_copy(model), config, model.device, shape)

    @classmethod
    def _from_loaded(
        cls,
        model: PreTrainedModel,
        config: RunnerConfig,
        device: torch.device,
        shape: CacheShape | None,
        source: str | Path | None = None,
    ) -> ModelRunner:
        """Return a runner that takes ownership of the model. ``shape``: None if it must be surveyed on the loaded model."""
        own_attention = loading.text_config(model)._attn_implementation
        shape = shape or survey(model)
        loading.prepare_for_passes(model, shape.by_request)
        if linear.is_plain(model) and native.serves(device):
            packing.pack_model(model, config.bits)
        elif config.weights is not None:
            raise OutriderError(f"weights={config.weights} needs plain 16- or 32-bit weights: load the model unquantised")
        name = str(source or getattr(model, "name_or_path", "") or type(model).__name__)
        return cls(model, config, device, name, shape)._checked(own_attention, source)

    def _checked(self, own_attention: str | None, source: str | Path | None) -> ModelRunner:
        """Return this runner after the self-check. ``own_attention``: the attention that its model was loaded with."""
        if self.config.self_check:
            own = None if self.cache.shape.by_request else own_attention
            check_itself(self.model, self.cache, self.layouts, own, source)
        return self

    @property
    def is_row_invariant(self) -> bool:
        """Whether a row of a pass has the same bits whatever the other rows are (docs/lossless.md)."""
        shape, is_eager = self.cache.shape, self.config.compile != "always"
        has_gates = shape.is_recurrent or experts.has_sigmoids(self.model)  # computed by torch's kernels in eager passes
        return linear.has_row_invariant_layers(self.model) and not (shape.by_request or (has_gates and is_eager))

    # -- a round ------------------------------------------------------------------------------------------------------------

    def score(self, context: Context, proposal: Proposal, hidden: tuple[int, ...] = ()) -> Scores:
        """Run one target pass over the uncached committed tokens and the drafts: logits [B, N + 1, V], row 0 after the root.

        ``hidden``: the hidden states to report, counted as ``types.Scores`` says; none if no request takes drafts.
        """
        sequences = [request.token_ids for request in context.requests]
        rows, pending = self.catch_up(context.request_ids, sequences, draft_slots=proposal.num_nodes, hidden=hidden)
        bases = [self.cache.cached_lens[row] for row in rows]
        drafts = [nodes[:n] for nodes, n in zip(proposal.token_ids.tolist(), proposal.lens.tolist(), strict=True)]
        tokens = [committed + drafted for committed, drafted in zip(pending, drafts, strict=True)]
        resumed, span = None, WHOLE
        if proposal.partial_pass is not None and not proposal.is_tree:
            resumed, span = self._after_partial_pass(proposal.partial_pass, context.request_ids, tokens, hidden)
        pending_lens = list(map(len, pending))
        inputs, logits_at, counts = self.layouts.score_input(tokens, pending_lens, proposal, rows, bases)
        pass_input = inputs.ids if resumed is None else inputs.join(resumed)
        logits, states = self.passes.run(pass_input, inputs.layout, hidden, logits_at, span)
        roots = [base + length - 1 for base, length in zip(bases, pending_lens, strict=True)]
        self._scored = context.request_ids, roots, proposal.is_tree
        lens = list(map(len, tokens))
        reported = self._round_hidden.of_round(states, context.requests, inputs.starts, lens) if states else {}
        logits = rows_from(logits, [0, *accumulate(counts)][:-1], counts, 1 + proposal.num_nodes).float()
        return Scores(logits, reported, first_layer=span.start)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Keep the accepted path of the last score; rejected drafts are overwritten by the next pass."""
        if self._scored is None or self._scored[0] != context.request_ids:
            raise RuntimeError("commit without the score of the same round")
        request_ids, roots, is_tree = self._scored
        for request_id, root, path in zip(request_ids, roots, verdict.paths, strict=True):
            row = self.cache.row(request_id)
            if is_tree:
                self.cache.gather_path(row, root + 1, path)
            self.cache.cached_lens[row] = root + 1 + len(path)
        self._round_hidden.forget(request_ids)
        self._scored = None

    def prepare(self, hidden: tuple[int, ...] = ()) -> None:
        """Compile, or load, the whole pass that reports these hidden states, and the other passes in use."""
        self.passes.run_of(hidden)
        self.passes.compile_now()

    def release(self, request_ids: Sequence[str]) -> None:
        """Free the rows and hidden states of requests."""
        self._round_hidden.forget(request_ids)
        self.cache.release(request_ids)

    def retire(self, request_ids: Sequence[str]) -> None:
        """Forget requests that finished. With ``prefix_cache`` their tokens stay cached for requests with the same prefix."""
        self._round_hidden.forget(request_ids)
        self.cache.retire(request_ids)

    def admit(self, request_id: str, num_tokens: int) -> bool:
        """Reserve memory for a sequence of that length; return False if it does not fit."""
        return self.cache.admit(request_id, num_tokens)

    def start(self, request_id: str, sequence: Sequence[int], limit: int | None = None) -> int:
        """Start a new request from the longest cached prefix, ``limit`` tokens at most. Return its length."""
        return self.cache.cached_lens[self.cache.row_with_prefix(request_id, sequence, limit)]

    def num_cached(self, request_id: str, sequence: Sequence[int]) -> int:
        """Return the length of the longest cached prefix that a new request could start from."""
        return self.cache.longest_prefix(request_id, sequence)[1]

    @torch.inference_mode()
    def prefill(self, request_ids: Sequence[str], sequences: Sequences, hidden: tuple[int, ...] = ()) -> list[bool]:
        """Prefill the next chunk of long sequences, ``prefill_chunk`` tokens of all together (see ``shared_chunk``).

        Return for each whether the scoring pass can take the rest. Without padding a last chunk is left to the scoring pass,
        which saves a pass before the first token. ``hidden``: the hidden states that the score of these tokens will report.
        """
        rows = self._rows_to_extend(request_ids, sequences, bool(hidden))
        uncached = self._num_uncached(sequences, rows)
        counts = shared_chunk([count if count >= MIN_PREFILL else 0 for count in uncached], self.config.prefill_chunk)
        left = [most - count for most, count in zip(uncached, counts, strict=True)]
        if not self.layouts.is_padded:
            counts = [count if rest else 0 for count, rest in zip(counts, left, strict=True)]
        self._prefill_pass(request_ids, sequences, rows, counts, hidden)
        return [rest < MIN_PREFILL for rest in left]

    @torch.inference_mode()
    def prefill_with_logits(
        self, request_ids: Sequence[str], sequences: Sequences, read: ReadLogits, hidden: tuple[int, ...] = ()
    ) -> None:
        """Prefill the next chunk of sequences, up to the last token of each, and pass the logits after its tokens to ``read``.

        A sequence that was not started begins at token 0. If ``read`` raises, no token of the chunk counts as cached.
        """
        rows = self._rows_to_extend(request_ids, sequences, from_start=True)
        counts = shared_chunk(self._num_uncached(sequences, rows), self.config.prefill_chunk)
        self._prefill_pass(request_ids, sequences, rows, counts, hidden, read)

    def is_prefilled(self, request_ids: Sequence[str], sequences: Sequences) -> list[bool]:
        """Return for each sequence whether at most a few of its tokens are uncached."""
        pairs = zip(request_ids, sequences, strict=True)
        return [len(sequence) - 1 - self.cache.cached_len(request_id) < MIN_PREFILL for request_id, sequence in pairs]

    def fork(self, source_id: str, new_id: str, num_tokens: int) -> bool:
        """Copy another request's cached prefix to a new request, so that n samples share one prefill.

        Return False if the source does not hold the prefix (a recurrent state moves on): the new request must read it.
        """
        if not self.cache.copy_prefix(source_id, new_id, num_tokens):
            return False
        if self._long_rows is not None:
            self._long_rows.copy(self.cache.row(source_id), self.cache.row(new_id))
        return True

    # -- without a proposal: draft models -------------------------------------------------------------------------------------

    def extend(self, request_ids: Sequence[str], sequences: Sequences) -> Tensor:
        """Feed the uncached tokens of each sequence and return the logits after its last token: [B, V] float32.

        All fed tokens count as cached; ``rollback`` rolls back.
        """
        rows, pending = self.catch_up(request_ids, sequences, draft_slots=0)
        logits, _ = self.feed(self.passes, pending, rows, [self.cache.cached_lens[row] for row in rows])
        for row, sequence in zip(rows, sequences, strict=True):
            self.cache.cached_lens[row] = len(sequence)
        return logits

    def rollout(
        self, request_ids: Sequence[str], sequences: Sequences, steps: int, next_token: NextToken
    ) -> PartialPass | None:
        """Generate token by token after each sequence: ``next_token(logits [B, 1, V], step)`` chooses the tokens [B, 1].

        The last step's tokens are chosen but not fed. None from ``next_token`` ends the rollout with this step.
        """
        logits = self.extend(request_ids, sequences)
        rows = [self.cache.row(request_id) for request_id in request_ids]
        bases = [self.cache.cached_lens[row] for row in rows]
        num_fed = sum(1 for _ in self.decode_steps(self.passes.run_of(), rows, bases, logits, steps, next_token))
        for row in rows:
            self.cache.cached_lens[row] += num_fed
        return None  # a separate model runs no part of the target's pass

    def catch_up(
        self,
        request_ids: Sequence[str],
        sequences: Sequences,
        draft_slots: int,
        hidden: tuple[int, ...] = (),
        to_last: bool = False,
    ) -> tuple[list[int], list[list[int]]]:
        """Prefill in chunks what the following pass cannot take, with ``to_last`` all except for the last token of each.

        Return the cache rows and the remaining tokens, at least the last one.
        """
        longest = max(map(len, sequences))
        if longest > self.max_len:
            raise OutriderError(f"a sequence of {longest} tokens exceeds the context of {self.max_len}")
        rows, lens = self._rows_to_extend(request_ids, sequences, bool(hidden)), self.cache.cached_lens
        self.cache.reserve(longest + draft_slots + 1)
        most = 0 if self.layouts.is_padded else self.config.prefill_chunk
        uncached = self._num_uncached(sequences, rows)
        while sum([count for count in uncached if count >= MIN_PREFILL]) > most:
            counts = [min(count, self.config.prefill_chunk) for count in uncached]
            self._prefill_pass(request_ids, sequences, rows, counts, hidden)
            uncached = self._num_uncached(sequences, rows)
        if to_last:
            self._prefill_pass(request_ids, sequences, rows, self._num_uncached(sequences, rows), hidden)
        return rows, [list(sequence[lens[row] :]) for sequence, row in zip(sequences, rows, strict=True)]

    def feed(
        self,
        passes: PassRunner,
        pending: Sequence[list[int]],
        rows: list[int],
        slots: list[int],
        hidden: tuple[int, ...] = (),
        span: LayerSpan = WHOLE,
    ) -> tuple[Tensor, dict[int, list[Tensor]]]:
        """Run one pass from ``slots``: logits after each last token [B, V] float32, and {hidden state: [n_b, H] each}.

        Cached lengths do not change. Without the head the logits are empty.
        """
        inputs = self.layouts.chain(pending, rows, slots)
        last = [start + len(tokens) - 1 for start, tokens in zip(inputs.starts, pending, strict=True)]
        logits, found = passes.run(inputs.ids, inputs.layout, hidden, self.layouts.row_indices(last, [1] * len(last)), span)
        by_request = {
            index: [states[start : start + len(tokens)] for start, tokens in zip(inputs.starts, pending, strict=True)]
            for index, states in found.items()
        }
        return logits.float(), by_request

    def decode_steps(
        self, run: Run, rows: list[int], bases: list[int], logits: Tensor, steps: int, next_token: NextToken
    ) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """Run steps of one token per request from slots ``bases``; cached lengths do not change.

        Yields the fed tokens [B, 1], in memory reused by the next step, and the hidden states [B, H] of ``run``. The last
        step's tokens are chosen but not fed.
        """
        self.cache.reserve(max(bases) + steps)
        self.cache.states.record_write(rows, bases, [base + steps - 1 for base in bases])
        batch = len(rows)
        # One set of inputs for all steps, updated in place: creating them per step takes half as long as a pass.
        token_ids = torch.empty(1, batch, dtype=torch.long, device=self.device)
        row_ids, slots = torch.tensor([rows, bases], device=self.device)
        every, mask = self.layouts.arange(0, batch), self.layouts.causal(batch, 1)
        inputs = [token_ids, every, slots[None], row_ids, slots, every + 1, mask, *self.cache.tensors]
        logits, fed = logits.unsqueeze(1), token_ids.view(batch, 1)
        for step in range(steps - 1):
            chosen = next_token(logits, step)
            if chosen is None:
                return
            fed.copy_(chosen)
            out = run(inputs)
            logits = out[0].float().transpose(0, 1)
            yield fed, [states[0] for states in out[1:]]
            slots.add_(1)  # also the positions
        next_token(logits, steps - 1)

    def rollback(self, request_id: str, num_tokens: int) -> None:
        """Roll a request back to its first ``num_tokens`` tokens; one that was never fed keeps having no row."""
        if self.cache.cached_len(request_id) > num_tokens:
            self.cache.rollback(self.cache.row(request_id), num_tokens)

    def _after_partial_pass(
        self, partial: PartialPass, request_ids: Sequence[str], tokens: Sequence[list[int]], wanted: tuple[int, ...]
    ) -> tuple[list[Tensor] | None, LayerSpan]:
        """Return each request's hidden states [n_b, H] of ``tokens`` after the partial pass, and the layers that remain.

        Tokens that drafting did not process go through the first layers now. Returns None and the whole span if drafting
        processed none, or if a hidden state before the remaining layers is ``wanted``.
        """
        lens = [self.cache.cached_len(request_id) for request_id in request_ids]
        known = [partial.num_known(*each) for each in zip(request_ids, lens, tokens, strict=True)]
        if not any(known) or any(index < partial.depth for index in wanted):
            return None, WHOLE
        found = [
            [partial.hidden[request_id][:count]] if count else [] for request_id, count in zip(request_ids, known, strict=True)
        ]
        short = [b for b, own in enumerate(tokens) if known[b] < len(own)]
        if short:
            parts, slots = [tokens[b][known[b] :] for b in short], [lens[b] + known[b] for b in short]
            rows = [self.cache.row(request_ids[b]) for b in short]
            span = LayerSpan(0, partial.depth, head=False)
            _, hidden = self.feed(self.passes, parts, rows, slots, (partial.depth,), span)
            for b, states in zip(short, hidden[partial.depth], strict=True):
                found[b].append(states)
        return [torch.cat(states) for states in found], LayerSpan(partial.depth)

    def _prefill_pass(
        self,
        request_ids: Sequence[str],
        sequences: Sequences,
        rows: Sequence[int],
        counts: Sequence[int],
        hidden: tuple[int, ...],
        read: ReadLogits | None = None,
    ) -> None:
        """Prefill the next ``counts[b]`` uncached tokens of each sequence in one pass."""
        lens = self.cache.cached_lens
        some = [b for b, count in enumerate(counts) if count > 0]
        if not some:
            return
        chunk_lens = [counts[b] for b in some]
        chunks = [list(sequences[b][lens[rows[b]] : lens[rows[b]] + counts[b]]) for b in some]
        inputs = self.layouts.chain(chunks, [rows[b] for b in some], [lens[rows[b]] for b in some])
        # at least one row of logits is required, also if none is read
        logits_at = self.layouts.arange(0, 1) if read is None else self.layouts.row_indices(inputs.starts, chunk_lens)
        logits, found = self.passes.run(inputs.ids, inputs.layout, hidden, logits_at)
        if read is not None:
            for b, own in zip(some, logits.split(chunk_lens), strict=True):
                read(b, lens[rows[b]], own)
        self._round_hidden.add(found, [request_ids[b] for b in some], inputs.starts, chunk_lens)
        for b in some:
            lens[rows[b]] += counts[b]

    def _num_uncached(self, sequences: Sequences, rows: Sequence[int]) -> list[int]:
        """Return the number of uncached tokens before the last one of each sequence."""
        lens = self.cache.cached_lens
        return [len(sequence) - 1 - lens[row] for sequence, row in zip(sequences, rows, strict=True)]

    def _rows_to_extend(self, request_ids: Sequence[str], sequences: Sequences, from_start: bool) -> list[int]:
        """Return the requests' rows, rolled back so that at least the last token of each sequence is uncached.

        A new request starts from the longest cached prefix, with ``from_start`` at token 0. A row is emptied if a failed pass
        overwrote its recurrent state, or if its sequence needs other rotary frequencies now.
        """
        limit = 0 if from_start else None
        pairs = zip(request_ids, sequences, strict=True)
        rows = [self.cache.row_with_prefix(request_id, sequence, limit) for request_id, sequence in pairs]
        for row, sequence in zip(rows, sequences, strict=True):
            self.cache.rollback(row, len(sequence) - 1)
        if self._long_rows is not None:
            self._long_rows.update(rows, sequences, self.cache.cached_lens)
        return rows

    def measure_pass(
        self,
        width: int,
        batch: int,
        cache_len: int,
        repeat: int = 3,
        hidden: tuple[int, ...] = (),
        span: LayerSpan = WHOLE,
        passes: PassRunner | None = None,
    ) -> float:
        """Return the seconds of a pass of ``width`` tokens per request over ``cache_len`` cached ones.

        That is the minimum of ``repeat`` runs after one warm-up. ``hidden``: the hidden states to report; ``span`` must begin
        at the first layer; ``passes``: instead of the runner's. Raises ``OutriderError`` if fewer than ``batch`` rows are free.

        Tokens are random and new in each run: equal tokens would be routed to the same experts of a mixture, so a wide pass
        would read no more weights than a pass of one token.
        """
        probe = random.Random(0)
        slots = max(0, min(cache_len, self.max_len - width))
        times = []
        with self.cache.temporary_rows(batch) as rows:
            self.cache.reserve(slots + width)
            for row in rows:  # unwritten memory may contain denormal numbers, which are slow
                for store in self.cache.stores:
                    store[:, row].normal_()
            for _ in range(repeat + 1):
                tokens = [[probe.randrange(self.vocab_size) for _ in range(width)] for _ in range(batch)]
                inputs, every = self.layouts.chain(tokens, rows, [slots] * batch), width * batch
                wait_for(self.device)
                start = time.perf_counter()
                (passes or self.passes).run(inputs.ids, inputs.layout, hidden, self.layouts.arange(0, every), span)
                wait_for(self.device)
                times.append(time.perf_counter() - start)
        return min(times[1:])
