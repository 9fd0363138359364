"""Recurrent layers over Outrider's own cache: short convolutions, the gated delta rule, linear attention, selective scans.

No model code is forked. transformers' recurrent layers call a handful of functions by name, the same names in every
architecture. ``bind`` replaces these functions in each layer's ``forward`` with ones that store the state after every position
of a pass, for each of its requests. Rolling back to an accepted draft then moves no data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runner.kernels import define
from outrider.runner.state_cache import StateKey, StateShape

# ---------------------------------------------------------------------------------------------------------------------------
# The operators, in torch: the reference for the C++ ones
# ---------------------------------------------------------------------------------------------------------------------------


def _tokens(cache_rows: Tensor, bases: Tensor, ends: Tensor) -> Iterator[tuple[int, int, range]]:
    """Yield the cache row, first position and token indices of each request of a pass."""
    first = 0
    for row, base, end in zip(cache_rows.tolist(), bases.tolist(), ends.tolist(), strict=True):
        yield row, base, range(first, end)
        first = end


def _scan(
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]], out: Tensor, rings: Tensor, requests: tuple[Tensor, ...]
) -> Tensor:
    """Run ``step(token, state) -> (state, output)`` through each request; rings [R, S, ...] keep the last S states."""
    slots = rings.shape[1]
    for row, base, tokens in _tokens(*requests):
        state = rings[row, (base - 1) % slots].clone() if base else torch.zeros_like(rings[row, 0])
        for token in tokens:
            state, out[0, token] = step(token, state)
            if tokens.stop - token <= slots:
                rings[row, (base + token - tokens.start) % slots] = state
    return out


def reference_delta_scan(  # noqa: PLR0913 - an operator's signature, shared with C++
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    layer: int,
    cache_rows: Tensor,
    bases: Tensor,
    ends: Tensor,
    scale: float,
    normalize: bool,
) -> Tensor:
    """Gated delta rule (Yang et al. 2024, arXiv 2412.06464); without ``beta`` linear attention with decay (Mamba-2's form).

    float32: query, key [1, T, Hk, D], value [1, T, H, Dv], decay (its logarithm) [1, T, H, D or 1], beta [1, T, H]; states
    [L, R, S, H, D, Dv], changed in place; cache_rows, bases, ends [B] int64, as ``attend`` takes them -> [1, T, H, Dv].
    """
    if normalize:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    group = value.shape[2] // key.shape[2]
    query, key = (x[0].repeat_interleave(group, 1) for x in (query * scale, key))  # [T, H, D]

    def step(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * decay[0, token].exp()[..., None]
        write = value[0, token]
        if beta is not None:
            write = (write - (state * key[token][..., None]).sum(1)) * beta[0, token][:, None]
        state = state + key[token][..., None] * write[:, None]
        return state, (state * query[token][..., None]).sum(1)

    return _scan(step, torch.empty_like(value), states[layer], (cache_rows, bases, ends))


def reference_selective_scan(  # noqa: PLR0913 - an operator's signature, shared with C++
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    layer: int,
    cache_rows: Tensor,
    bases: Tensor,
    ends: Tensor,
) -> Tensor:
    """Selective scan of Mamba (Gu and Dao 2023, arXiv 2312.00752, algorithm 2).

    float32: x, dt [1, T, C], a [C, N], b, c [1, T, N]; states [L, R, S, C, N], changed in place -> [1, T, C].
    """

    def step(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        delta = dt[0, token][:, None]
        state = (delta * a).exp() * state + delta * x[0, token][:, None] * b[0, token]
        return state, (state * c[0, token]).sum(-1)

    return _scan(step, torch.empty_like(x), states[layer], (cache_rows, bases, ends))


def reference_short_conv(  # noqa: PLR0913 - an operator's signature, shared with C++
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    states: Tensor,
    layer: int,
    cache_rows: Tensor,
    bases: Tensor,
    ends: Tensor,
) -> Tensor:
    """Causal convolution of each channel, K taps that end at each token.

    float32: x [1, T, C], weight [C, K], bias [C]; states [L, R, S, C], the last inputs, S >= K, changed in place -> [1, T, C].
    """
    out, taps, slots = torch.empty_like(x), weight.shape[1], states.shape[2]
    for row, base, tokens in _tokens(cache_rows, bases, ends):
        ring = states[layer, row]
        earlier = [ring[p % slots] if p >= 0 else torch.zeros_like(ring[0]) for p in range(base - taps + 1, base)]
        inputs = torch.cat([*(each[None] for each in earlier), x[0, tokens.start : tokens.stop]])
        out[0, tokens.start : tokens.stop] = (inputs.unfold(0, taps, 1) * weight).sum(-1)
        for token in tokens[-slots:]:
            ring[(base + token - tokens.start) % slots] = x[0, token]
    out = out if bias is None else out + bias
    return functional.silu(out) if silu else out


_WHERE = "Tensor states, int layer, Tensor cache_rows, Tensor bases, Tensor ends"
_DELTA = "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta"
define(
    f"short_conv(Tensor x, Tensor weight, Tensor? bias, bool silu, {_WHERE})",
    lambda x, *_: torch.empty_like(x),
    reference_short_conv,
)
define(
    f"delta_scan({_DELTA}, {_WHERE}, float scale, bool normalize)",
    lambda query, key, value, *_: torch.empty_like(value),
    reference_delta_scan,
)
define(
    f"selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, {_WHERE})",
    lambda x, *_: torch.empty_like(x),
    reference_selective_scan,
)


# ---------------------------------------------------------------------------------------------------------------------------
# Replacements of transformers' functions
# ---------------------------------------------------------------------------------------------------------------------------


StateOf = Callable[[StateKey, StateShape], tuple[Tensor, int]]  # -> store [L, R, S, ...] of a recurrent state, index in it
Requests = tuple[Tensor, Tensor, Tensor]  # cache rows, bases and ends of a pass, [B] int64 each

# Of this thread: several ``LLM``s may run in threads of one process.
_active: ContextVar[tuple[StateOf, Requests] | None] = ContextVar("active", default=None)
# Layer and state of the next call: models query the cache for the layer just before it.
_layer = ContextVar("layer", default=(0, 0))


@contextmanager
def active_states(state_of: StateOf, requests: Requests) -> Iterator[None]:
    """Give recurrent layers the states and requests of a pass."""
    token = _active.set((state_of, requests))
    try:
        yield
    finally:
        _active.reset(token)


def set_next_state(layer: int, index: int) -> None:
    """Set the layer and state that the next function call uses; the cache calls this."""
    _layer.set((layer, index))


def _state_and_requests(shape: tuple[int, ...], taps: int = 0) -> tuple[Tensor, int, Tensor, Tensor, Tensor]:
    """Return arguments of an operator: the next state's store and index, and the pass's requests."""
    active = _active.get()
    assert active is not None
    state_of, requests = active
    return *state_of(StateKey(*_layer.get(), taps > 0), StateShape(shape, taps)), *requests


def _float(x: Tensor) -> Tensor:
    return x.float().contiguous()


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any) -> Tensor:
    """``causal_conv1d_fn``: x [1, C, T], weight [C, K] -> [1, C, T]."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"a short convolution with activation {activation}")
    bias = None if bias is None else _float(bias)
    where = _state_and_requests((weight.shape[0],), taps=weight.shape[1])
    out: Tensor = torch.ops.outrider.short_conv(_float(x.transpose(1, 2)), _float(weight), bias, activation is not None, *where)
    return out.transpose(1, 2).to(x.dtype)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """``chunk_gated_delta_rule`` and ``chunk_kda``: query, key [1, T, Hk, D], value [1, T, H, Dv], g [1, T, H(, D)]."""
    heads, values, keys = value.shape[2], value.shape[3], key.shape[3]
    decay = g if g.dim() == 4 else g[..., None]
    where = _state_and_requests((heads, keys, values))
    inputs = map(_float, (query, key, value, decay, beta))
    out = torch.ops.outrider.delta_scan(*inputs, *where, keys**-0.5, use_qk_l2norm_in_kernel)
    return out.to(query.dtype), out.new_empty(0)


def mamba2(  # noqa: PLR0913 - transformers' signature
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """``mamba_chunk_scan_combined``: hidden_states [1, T, H, P], dt [1, T, H], A [H], B, C [1, T, G, N] -> [1, T, H, P].

    Linear attention with decay (Dao and Gu 2024, arXiv 2405.21060): keys B, queries C, values dt x.
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    x, heads = hidden_states.float(), hidden_states.shape[2]
    where = _state_and_requests((heads, B.shape[3], x.shape[3]))
    inputs = map(_float, (C, B, x * dt[..., None], (dt * A)[..., None]))
    out = torch.ops.outrider.delta_scan(*inputs, None, *where, 1.0, False)
    out = out if D is None else out + x * D[:, None].float()
    return out, out.new_empty(0)


def mamba(  # noqa: PLR0913 - transformers' signature
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """``selective_scan_fn``: hidden_states, dt, z [1, C, T], A [C, N], B, C [1, N, T] -> [1, C, T]."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = functional.softplus(dt) if delta_softplus else dt
    x = hidden_states.float()
    where = _state_and_requests(tuple(A.shape))
    inputs = [_float(each) for each in (x.transpose(1, 2), dt.transpose(1, 2), A, B.transpose(1, 2), C.transpose(1, 2))]
    out = torch.ops.outrider.selective_scan(*inputs, *where).transpose(1, 2)
    out = out if D is None else out + x * D[:, None].float()
    out = out if z is None else out * functional.silu(z)
    return out.to(hidden_states.dtype), out.new_empty(0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": conv,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}


def bind(model: nn.Module) -> None:
    """Make a model's recurrent layers call Outrider's functions within passes, in place."""
    for module in model.modules():
        kind = _bound(type(module))  # type: ignore[arg-type]  # a class is hashable
        if kind is not None:
            module.__class__ = kind


@cache
def _bound(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class with ``forward`` bound; None if it calls none of ``FUNCTIONS`` or is bound already."""
    forward: Any = inspect.unwrap(kind.forward)
    used = FUNCTIONS.keys() & set(forward.__code__.co_names) & forward.__globals__.keys()  # names of attributes, too
    if not used or hasattr(kind, "outrider_bound"):
        return None
    names = forward.__globals__ | {name: _in_a_pass(FUNCTIONS[name], forward.__globals__[name]) for name in used}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": own, "outrider_bound": True, "__module__": kind.__module__})


def _in_a_pass(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: (original if _active.get() is None else own)(*args, **options)
