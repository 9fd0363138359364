"""Do two tokenizers give the same ids to the same text? A draft whose ids mean other tokens would corrupt every proposal."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from outrider.types import OutriderError


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raises ``OutriderError`` saying what differs, unless every id means the same token to both."""
    if target is draft:
        return
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if target_vocab != draft_vocab:
        raise OutriderError(
            f"draft and target have different vocabularies ({_difference(target_vocab, draft_vocab)});"
            " choose a draft made for this target's tokenizer"
        )
    for name in ("eos_token_id", "bos_token_id"):
        of_target, of_draft = getattr(target, name, None), getattr(draft, name, None)
        if of_target is not None and of_draft is not None and of_target != of_draft:
            raise OutriderError(f"draft and target disagree on {name}: {of_target} in the target, {of_draft} in the draft")


def _difference(target: dict[str, int], draft: dict[str, int]) -> str:
    if len(target) != len(draft):
        counts = f"{len(target):,} tokens in the target, {len(draft):,} in the draft"
    else:
        counts = f"{len(target):,} tokens each"
    only = sorted(set(target) - set(draft), key=target.__getitem__)
    if only:
        return f"{counts}; {len(only):,} of the target's are unknown to the draft, the first {only[0]!r}"
    extra = sorted(set(draft) - set(target), key=draft.__getitem__)
    if extra:
        return f"{counts}; {len(extra):,} of the draft's are unknown to the target, the first {extra[0]!r}"
    token = min((t for t in target if target[t] != draft[t]), key=target.__getitem__)
    return f"{counts}; {token!r} is {target[token]} in the target and {draft[token]} in the draft"
