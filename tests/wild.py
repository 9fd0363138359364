"""Values of all types that a user may pass by mistake, for property-based tests."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

HUGE = [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 10**5000]
INTEGERS = st.one_of(st.integers(-5, 400), st.integers(), st.sampled_from([*HUGE, *(-n for n in HUGE)]))
FLOATS = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324]))
TEXT = st.one_of(
    st.text(max_size=6), st.sampled_from(["", " ", "END", "auto", "5", "false", "\ud800", "a\nb", "ngram:min_n", "+"])
)
NUMPY = st.one_of(
    st.integers(0, 300).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
    st.lists(st.integers(-2, 400), max_size=4).map(np.array),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.sampled_from(
        [np.array(3), np.array([[1, 2], [3, 4]]), np.array(["a", "b"]), np.zeros((1, 1, 1), int), np.array([True])]
    ),
)
TORCH = st.one_of(
    st.integers(0, 300).map(torch.tensor),
    st.lists(st.integers(-2, 400), max_size=4).map(lambda ids: torch.tensor(ids, dtype=torch.long)),
    st.sampled_from(
        [
            torch.tensor(0.5),
            torch.tensor(True),
            torch.tensor([1.5, 2.0]),
            torch.tensor([[1, 2], [3, 4]]),
            torch.tensor([3], dtype=torch.int8),
            torch.empty(2, dtype=torch.long, device="meta"),
            torch.tensor(math.nan),
        ]
    ),
)
ODD = st.sampled_from(
    [
        None,
        ...,
        object(),
        int,
        LookupError(),
        Path("nowhere"),
        1j,
        range(3),
        iter([1]),
        memoryview(b"ab"),
        bytearray(b"ab"),
        print,
    ]
)
SCALARS = st.one_of(
    ODD, st.booleans(), INTEGERS, FLOATS, TEXT, st.binary(max_size=3), st.decimals(), st.fractions(), NUMPY, TORCH
)
HASHABLE = st.one_of(st.booleans(), st.integers(-2, 400), FLOATS, TEXT, st.none())
WILD = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(st.integers(-2, 400), max_size=5),
    st.lists(TEXT, max_size=3),
    st.tuples(SCALARS, SCALARS),
    st.frozensets(HASHABLE, max_size=3),
    st.dictionaries(HASHABLE, SCALARS, max_size=3),
    st.lists(st.lists(st.integers(-2, 400), max_size=3), max_size=3),
)
