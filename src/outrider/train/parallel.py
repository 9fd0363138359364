"""Training of parallel drafts with mask tokens: K drafts from one pass (PARD: An et al. 2025, arXiv 2504.18583).

As in drafting, the masks of a chain continue a row after its anchor: each mask sees the row up to the anchor and the earlier
masks of its chain. One pass processes a row and the chains of many anchors. Deeper masks cost as much and improve the draft
less, so only a share of the chains reaches each depth (conditional drop-token, COD).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.errors import errors_as
from outrider.runner.loading import text_config
from outrider.runner.parallel_draft import MASK_KEYS, mask_token_of
from outrider.train.acceptance import ROWS, acceptance, summary
from outrider.train.decoder import TOLERANCE, evaluating
from outrider.train.options import Parallel
from outrider.train.plan import step_seed
from outrider.train.text import check_row_length
from outrider.types import OutriderError

SPARE_NAME = re.compile(r"[<\[]\|?(reserved|unused)[ _\w-]*\|?[>\]]")  # name of a reserved token


@dataclass(frozen=True)
class Entries:
    """The entries of a pass: S tokens of a row, then masks. [T] each."""

    anchors: Tensor  # the last token that an entry sees; a token's own index
    depths: Tensor  # number of an entry's mask in its chain; 0 for tokens

    @classmethod
    def of(cls, seq_len: int, by_depth: Sequence[Tensor]) -> Entries:
        """Return the entries of a row and its masks. ``by_depth``: anchors at depth 1, 2, ..., each a part of those before."""
        tokens = torch.arange(seq_len)
        counts = [seq_len, *map(len, by_depth)]
        depths = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return cls(torch.cat((tokens, *by_depth)), depths)

    @classmethod
    def drawn(cls, seq_len: int, options: Parallel, generator: torch.Generator) -> Entries:
        """Draw anchors. The number of entries depends on the row's length only, so that a compiled pass has one shape."""
        order = torch.randperm(seq_len - options.depths + 1, generator=generator)
        shares = [max(options.keep**depth, options.keep_least) for depth in range(1, options.depths)]
        return cls.of(seq_len, [order[: max(1, round(share * len(order)))] for share in shares])

    @property
    def positions(self) -> Tensor:
        """Return [T]: the index of the token after which each entry predicts."""
        return self.anchors + self.depths

    def visible(self) -> Tensor:
        """Return bool [T, T]: what each entry attends to."""
        anchors, depths = self.anchors, self.depths
        in_row = (depths == 0) & (anchors <= anchors[:, None])
        in_chain = (depths > 0) & (depths <= depths[:, None]) & (anchors == anchors[:, None])
        return in_row | in_chain


@dataclass(frozen=True)
class ParallelDraftTraining:
    """A draft in training and its mask token."""

    draft: PreTrainedModel
    token: int
    options: Parallel

    @classmethod
    def prepare(
        cls, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, options: Parallel, seq_len: int
    ) -> Self:
        """Add a mask token to a draft that has none, and check that the draft supports masks in rows of ``seq_len`` tokens.

        Raises ``OutriderError`` for rows that are too short, and for a model with unsupported attention.
        """
        check_row_length(seq_len, options.depths + 2, f"{options.depths} parallel drafts")
        found = cls(draft, mask_token(draft, tokenizer), options)
        found.check(seq_len - 1)
        return found

    def logits(self, text: Tensor, entries: Entries) -> Tensor:
        """Read rows [B, S] and their masks in one pass: logits [B, T, V]."""
        masks = text.new_full((len(text), len(entries.anchors) - text.shape[1]), self.token)
        hidden = ~entries.visible().to(text.device)[None, None]
        added = torch.zeros(hidden.shape, dtype=self.draft.dtype, device=text.device)  # eager attention adds a mask
        out: Tensor = self.draft(
            input_ids=torch.cat((text, masks), 1),
            attention_mask=added.masked_fill(hidden, torch.finfo(added.dtype).min),
            position_ids=entries.positions.to(text.device)[None],
            use_cache=False,
        ).logits
        return out

    def drawn(self, text: Tensor, seed: int, pass_index: int) -> tuple[Tensor, Tensor]:
        """Return the logits [B, T, V] of a training pass, and the position in the row [T] after which each one predicts."""
        entries = Entries.drawn(text.shape[1], self.options, torch.Generator().manual_seed(step_seed(seed, pass_index)))
        return self.logits(text, entries), entries.positions.to(text.device)

    @torch.no_grad()
    def measure(self, target: PreTrainedModel, rows: Tensor) -> dict[str, Any]:
        """Return the acceptance of each depth on rows [R, S], in rounds that begin after every K-th token."""
        depths, seq_len = self.options.depths, rows.shape[1]
        anchors = torch.arange(0, seq_len - depths + 1, depths)
        entries = Entries.of(seq_len, [anchors] * (depths - 1))
        masks = seq_len + torch.arange((depths - 1) * len(anchors)).view(depths - 1, -1)
        places = torch.cat((anchors[None], masks)).T.to(target.device)  # [A, K]: of the entries of each round
        after = (anchors[:, None] + torch.arange(depths)).to(target.device)
        pairs = []
        with evaluating(self.draft):
            for ids in rows.to(target.device).split(ROWS):
                target_logits = target(input_ids=ids, use_cache=False).logits
                pairs.append(acceptance(target_logits[:, after], self.logits(ids, entries)[:, places]))  # [B, A, K] each
        return summary(pairs)

    @torch.no_grad()
    def check(self, seq_len: int) -> None:
        """Raise ``OutriderError`` unless chains in one pass give the same logits as each chain alone."""
        draft, kind, count = self.draft, type(self.draft).__name__, self.options.depths - 1
        text = torch.arange(seq_len, device=draft.device)[None] * 7 % int(text_config(draft).vocab_size)
        last = seq_len - 1 - count
        anchors = sorted({min(seq_len // 2, last), last})
        entries = Entries.of(seq_len, [torch.tensor(anchors)] * count)
        masks = text.new_full((1, count), self.token)
        problem = f"unsupported model for parallel drafts: {kind} does not support attention masks"
        # Model code can fail in any way.
        with errors_as(problem, RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            with evaluating(draft):
                together = self.logits(text, entries)[0, seq_len:].view(count, len(anchors), -1)
                texts = [torch.cat((text[:, : anchor + 1], masks), 1) for anchor in anchors]
                alone = torch.stack([draft(input_ids=each, use_cache=False).logits[0, -count:] for each in texts], 1)
            close = TOLERANCE * alone.abs().max().clamp(min=1.0)
            is_same = bool((together - alone).abs().max() <= close)
        if not is_same:
            raise OutriderError(
                f"unsupported model for parallel drafts: {kind} ignores parts of an attention mask over {seq_len} tokens,"
                " because of recurrent layers or an attention window"
            )


@torch.no_grad()
def mask_token(draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the mask token that a draft's config names, or choose one and name it there.

    A new one is a row of the embedding that no token uses, else an additional row; it begins as the mean of all rows.
    """
    config: Any = draft.config
    known = mask_token_of(config)
    if known is not None:
        return known
    size = int(text_config(draft).vocab_size)
    token = spare_token(tokenizer, size)
    if token == size:
        draft.resize_token_embeddings(size + 1, mean_resizing=False)
    rows: Any = draft.get_input_embeddings().weight
    rows[token] = rows[:size].mean(0)
    setattr(config, MASK_KEYS[0], token)
    config.spd_type = "pard"
    return token


def spare_token(tokenizer: PreTrainedTokenizerBase | None, size: int) -> int:
    """Return an unused token id; ``size``, the size of the embedding, if there is none.

    Prefer the first row after the tokenizer's tokens, then the last token named reserved or unused.
    """
    if tokenizer is None:
        return size
    ids = tokenizer.get_vocab()
    first = max(ids.values(), default=-1) + 1
    if first < size:
        return first
    template = str(tokenizer.chat_template or "")
    return max((token for name, token in ids.items() if SPARE_NAME.fullmatch(name) and name not in template), default=size)
