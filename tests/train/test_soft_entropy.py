"""The loss of heads compared with PyTorch's, value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from outrider.train import soft_entropy as soft_entropy_module
from outrider.train.soft_entropy import in_blocks, soft_entropy, teacher_of, with_gradient

PLACES = (2, 5)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("draft_ids", [None, torch.tensor([0, 3, 4, 9])])
def test_loss_and_gradient_equal_plain_cross_entropy(draft_ids):
    target, size = 3 * drawn(*PLACES, 12), 12 if draft_ids is None else len(draft_ids)
    logits = drawn(*PLACES, size).requires_grad_()
    entropy, _ = soft_entropy(logits, teacher_of(target, draft_ids))
    (3.0 * entropy).backward()
    plain = logits.detach().requires_grad_()
    wanted = (target if draft_ids is None else target[..., draft_ids]).softmax(-1)
    expected = cross_entropy(plain.flatten(0, 1), wanted.flatten(0, 1))
    (3.0 * expected).backward()
    assert torch.allclose(entropy, expected, atol=1e-5)
    assert torch.allclose(logits.grad, plain.grad, atol=1e-6)


def test_blocks_of_positions_give_the_same_values(monkeypatch):
    monkeypatch.setattr(soft_entropy_module, "BLOCK", 2 * 12 + 1)
    target, logits = 3 * drawn(*PLACES, 12), drawn(*PLACES, 12)
    teacher = teacher_of(target)
    sizes = []
    monkeypatch.setattr(
        soft_entropy_module, "with_gradient", lambda some, *rest: sizes.append(len(some)) or with_gradient(some, *rest)
    )
    found = in_blocks(logits, teacher.probs, teacher.best)
    assert sizes == [2, 2, 1] * 2
    for value, wanted in zip(found, with_gradient(logits, teacher.probs, teacher.best), strict=True):
        torch.testing.assert_close(value, wanted)


def test_hits_are_positions_with_the_same_most_likely_token():
    target, logits = drawn(*PLACES, 12), drawn(*PLACES, 13)[..., :12].clone()
    logits[0] = 2 * target[0]
    _, hits = soft_entropy(logits, teacher_of(target))
    assert float(hits) == pytest.approx(float((logits.argmax(-1) == target.argmax(-1)).float().mean()))
    assert 0.5 <= float(hits) < 1


def test_a_most_likely_token_outside_the_draft_vocabulary_is_never_hit():
    target = torch.tensor([[[5.0, 1.0, 2.0]], [[0.0, 1.0, 2.0]]])
    logits = torch.tensor([[[0.0, 9.0]], [[0.0, 9.0]]])  # of tokens 1 and 2
    _, hits = soft_entropy(logits, teacher_of(target, torch.tensor([1, 2])))
    assert float(hits) == 0.5


def test_all_inputs_are_cut_to_the_same_positions():
    said = teacher_of(drawn(2, 6, 12))
    there = said.at(slice(1, 4))
    assert there.probs.shape == (2, 3, 12) and there.best.shape == (2, 3, 1)
    assert torch.equal(there.probs, said.probs[:, 1:4]) and torch.equal(there.best, said.best[:, 1:4])
