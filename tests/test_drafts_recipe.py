"""The recipe of a draft with a vocabulary of its own: its tokens are spelled by the target's."""

from __future__ import annotations

import torch
from tiny_folder import TEXT

from outrider.train.shrink import shrink
from recipes.drafts import foreign
from recipes.family import model, tokenizer
from recipes.family.config import PRESETS, Shape

TINY = PRESETS["tiny"]


def test_each_token_is_the_mean_of_those_that_spell_it():
    own, of_target = (tokenizer.train(iter([TEXT * 3 + " 東京"]), size) for size in (330, 290))
    table = foreign.pieces(own, of_target)
    assert torch.allclose(table.sum(1), torch.ones(len(own)))
    for index in range(len(own)):
        spelled = [piece for piece, share in enumerate(table[index].tolist()) if share]
        assert set(spelled) == set(of_target.encode(own.decode([index]))) or "\N{REPLACEMENT CHARACTER}" in own.decode([index])
    lone = own.convert_tokens_to_ids("æ")  # a byte that is no character
    assert table[lone, of_target.convert_tokens_to_ids("æ")] == 1


def test_a_draft_of_another_vocabulary_begins_with_the_targets_embeddings():
    target = model.build(Shape(64, 3, 1, 1, 96), TINY, 1)
    torch.nn.init.normal_(target.model.embed_tokens.weight)
    draft = model.build(Shape(48, 1, 1, 1, 64), TINY, 2)
    swapped = torch.eye(TINY.vocab).flip(0)
    shrink(target, draft, (0,))
    plain = draft.model.embed_tokens.weight.clone()
    shrink(target, draft, (0,), swapped)
    assert torch.allclose(draft.model.embed_tokens.weight, plain.flip(0))
