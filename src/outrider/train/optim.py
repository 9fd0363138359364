"""Muon for the hidden matrices, AdamW for embeddings and norms, and the learning-rate schedule."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.train.plan import TrainingPlan

IN_LAYER = re.compile(r"\b(layers|h|blocks)\.\d+\.")  # names of a layer's weights; h is GPT-2's, blocks MPT's
NEWTON_SCHULZ, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
MOMENTUM = 0.95


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices: [N, A, B] -> [N, A, B].

    In float32 only the smaller X X^T is iterated, because the iterates of X are polynomials of it times X: a third less
    arithmetic for a matrix three times as wide as high. X X^T has the squared singular values, whose range exceeds 16 bits
    (measured: singular values of 4 to 8 instead of about 1), so there X itself is iterated.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    wide = (matrices.mT if tall else matrices).to(dtype)
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    wide = _by_gram(wide) if dtype == torch.float32 else _by_itself(wide)
    return (wide.mT if tall else wide).to(matrices.dtype)


def _by_itself(wide: Tensor) -> Tensor:
    first, second, third = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        poly = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)  # second G + third G^2
        wide = torch.baddbmm(wide, poly, wide, beta=first)
    return wide


def _by_gram(wide: Tensor) -> Tensor:
    first, second, third = NEWTON_SCHULZ
    gram = wide @ wide.mT
    product = torch.eye(gram.shape[1], dtype=wide.dtype, device=gram.device).expand_as(gram)
    for step in range(ITERATIONS):
        poly = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
        product = torch.baddbmm(product, poly, product, beta=first) if step else poly + first * product
        if step < ITERATIONS - 1:
            half = torch.baddbmm(gram, poly, gram, beta=first)  # (first + poly) G
            gram = torch.baddbmm(half, poly, half, beta=first)
    return product @ wide


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) over stacks of equal shapes.

    `torch.optim.Muon` (torch 2.13) works matrix by matrix and always in bfloat16, which costs a quarter of a step on a
    CPU without bfloat16 instructions (float32 costs as much on one that has them); the arithmetic is the same, with its
    "original" scaling.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, dtype: torch.dtype, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype  # of the products

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not supported
        """Run one update; parameters without a gradient (skipped layers) are unchanged."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    shape = tuple(param.shape)
                    by_shape[min(shape, shape[::-1])].append(param)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = []
        for param in params:
            assert param.grad is not None  # see step
            state = self.state[param]
            if not state:
                state["momentum"] = torch.zeros_like(param)
            state["momentum"].lerp_(param.grad, 1 - MOMENTUM)
            look_ahead = param.grad.lerp(state["momentum"], MOMENTUM)  # Nesterov
            grads.append(look_ahead.mT if param.shape[0] > param.shape[1] else look_ahead)
        updates = orthogonalise(torch.stack(grads), self.dtype)
        for param, update in zip(params, updates, strict=True):
            rows, columns = param.shape
            update = update.mT if rows > columns else update
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def build(model: nn.Module, plan: TrainingPlan, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Return the optimizers of one model, each with parameters; the schedule scales `base_lr` of each group.

    ``dtype``: of Muon's products.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            (matrices if param.ndim == 2 and IN_LAYER.search(name) else others).append(param)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, plan.muon_lr, dtype, weight_decay=0.01))
    if others:
        optimizers.append(
            torch.optim.AdamW(others, lr=plan.adam_lr, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def lr_factor(progress: float, plan: TrainingPlan) -> float:
    """Return the learning-rate factor: warm-up, constant, then linear decay over the last `decay`, at least `end`."""
    rising = progress / plan.warmup if plan.warmup else 1.0
    falling = (1.0 - progress) / plan.decay if plan.decay else 1.0
    return min(1.0, max(0.01, rising), max(plan.end, falling))


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Scale every group's base learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
