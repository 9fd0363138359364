"""Statistical evidence against the target's distribution: G-tests, calibration, and a likelihood ratio towards the draft.

All three condition on the preceding tokens, so they are valid for any sampled prefixes. A token at a fixed position follows
the target's conditional distribution whatever happened to the drafts before it; an *accepted* token does not, so nothing here
is selected by a token's origin.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.audit.statistics import chi_square_tail, smallest_tv

MIN_EXPECTED = 10.0  # minimum expected tokens per cell; rarer cells are pooled
MIN_VARIANCE = 5.0  # minimum variance of a sum of cells, in tokens, for the normal approximation
EDGES = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.25, 0.5)  # borders of the calibration cells, in target probability
NUM_CELLS = len(EDGES) + 1
LEAKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # mixture weights of the draft's distribution in the likelihood ratio
Prefix = tuple[int, ...]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Sample:
    """The first ``length`` tokens of one continuation."""

    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    draft_probs: dict[int, float] = field(default_factory=dict)
    # position -> draft probability of the token there, for positions at which a round with drafts began


@dataclass(frozen=True)
class Test:
    """One test of the family."""

    name: str  # "G", "calibration" or "likelihood ratio"
    token: int | None  # position in the continuation, from 1; None: all
    statistic: float
    degrees_of_freedom: int | None  # None for the likelihood ratio
    p_value: float
    tokens: int  # number of tested tokens
    effect: float  # sqrt(excess of the statistic over its mean / tokens); likelihood ratio: the mixture weight that fits best

    def smallest_tv(self, alpha: float, power: float) -> float | None:
        """Return ``statistics.smallest_tv`` of this test; None for the likelihood ratio, which has no such bound."""
        freedom = self.degrees_of_freedom
        return None if freedom is None else smallest_tv(freedom, self.tokens, alpha, power)


class PrefixCounts:
    """Samples of one prompt, grouped by prefix."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.counts: dict[Prefix, Counter[int]] = {}
        for sample in samples:
            for place, token in enumerate(sample.token_ids):
                self.counts.setdefault(sample.token_ids[:place], Counter())[token] += 1
        self.probs: dict[tuple[Prefix, int], float] = {}  # target probability of each sampled token
        self._seen: set[Prefix] = set()

    @property
    def texts(self) -> list[Prefix]:
        """Return token sequences that contain every sampled prefix."""
        return sorted({sample.token_ids[:-1]: sample.token_ids for sample in self.samples}.values())

    def fresh(self, prefixes: Sequence[Prefix]) -> list[int]:
        """Return indices of new prefixes, each once."""
        found = []
        for index, prefix in enumerate(prefixes):
            if prefix in self.counts and prefix not in self._seen:
                self._seen.add(prefix)
                found.append(index)
        return found


class Evidence:
    """Sums over all prompts, the input of the tests."""

    def __init__(self, length: int, has_rounding: bool = False) -> None:
        """``length``: tested positions; ``has_rounding``: passes of different widths round differently, see ``at_borders``."""
        self.length, self.has_rounding = length, has_rounding
        self.num_samples = 0
        self.origins: Counter[str] = Counter()
        self.impossible = 0  # sampled tokens with target probability 0
        self.num_rounds = 0  # rounds in the likelihood ratio
        self._log_ratios = np.zeros(len(LEAKS))
        self._g, self._g_freedom, self._g_tokens = np.zeros(length), np.zeros(length, dtype=int), np.zeros(length, dtype=int)
        self._excess, self._expected = np.zeros((length, NUM_CELLS)), np.zeros((length, NUM_CELLS))
        self._variance, self._tokens = np.zeros((length, NUM_CELLS, NUM_CELLS)), np.zeros(length, dtype=int)

    def observe(self, samples: PrefixCounts, prefixes: Sequence[Prefix], target_probs: Tensor) -> None:
        """Add the target's distributions [B, V] after prefixes of the prompt of these samples."""
        chosen = samples.fresh(prefixes)
        if not chosen:
            return
        probs = target_probs[chosen].double()  # [A, V]
        cells = cells_of(probs)
        masses = torch.zeros(len(chosen), NUM_CELLS, dtype=probs.dtype, device=probs.device).scatter_add_(1, cells, probs)
        new_prefixes = [prefixes[index] for index in chosen]
        counters = [samples.counts[prefix] for prefix in new_prefixes]
        places, totals = np.array([len(prefix) for prefix in new_prefixes]), np.array([each.total() for each in counters])
        self._add_calibration(places, totals, masses.cpu().numpy())

        rows = np.repeat(np.arange(len(new_prefixes)), [len(each) for each in counters])
        tokens = [token for each in counters for token in each]
        counts = [count for each in counters for count in each.values()]
        at = torch.as_tensor(rows, device=probs.device), torch.tensor(tokens, device=probs.device)
        probs_seen = probs[at].tolist()  # target probability of every observed token
        np.add.at(self._excess, (places[rows], cells[at].cpu().numpy()), counts)
        self.impossible += sum(count for count, prob in zip(counts, probs_seen, strict=True) if prob == 0)
        if self.has_rounding:
            probs_seen = at_borders(probs)[at].tolist()
        observed = zip((new_prefixes[row] for row in rows.tolist()), tokens, strict=True)
        samples.probs.update(zip(observed, probs_seen, strict=True))
        for row in np.flatnonzero(totals >= 2 * MIN_EXPECTED).tolist():
            self._add_group(int(places[row]), counters[row], probs[row].cpu().numpy(), int(totals[row]))

    def _add_calibration(self, places: IntArray, totals: IntArray, masses: np.ndarray[Any, Any]) -> None:
        """Add expected counts per cell. ``places``, ``totals``: length and count of each prefix; ``masses``: [A, cells]."""
        expected = totals[:, None] * masses
        for place in np.unique(places):
            here = places == place
            self._excess[place] -= expected[here].sum(0)
            self._expected[place] += expected[here].sum(0)
            self._variance[place] += np.diag(expected[here].sum(0)) - expected[here].T @ masses[here]
            self._tokens[place] += totals[here].sum()

    def _add_group(self, place: int, counts: Counter[int], target_probs: np.ndarray[Any, Any], total: int) -> None:
        """Add the tokens after one prefix, a multinomial sample, with rare tokens in one cell."""
        expected = target_probs * total
        kept = np.flatnonzero(expected >= MIN_EXPECTED)
        kept = kept[np.argsort(expected[kept])][::-1]
        rest = total - expected[kept].sum()
        while len(kept) and 1e-6 * total < rest < MIN_EXPECTED:
            kept, rest = kept[:-1], rest + expected[kept[-1]]
        seen = np.array([counts[token] for token in kept.tolist()], dtype=float)
        expected = expected[kept]
        if rest >= MIN_EXPECTED:
            seen, expected = np.append(seen, total - seen.sum()), np.append(expected, rest)
        if len(seen) < 2:
            return
        g, freedom = g_statistic(seen, expected), len(seen) - 1
        self._g[place] += g
        self._g_freedom[place] += freedom
        self._g_tokens[place] += total

    def add_likelihood_ratios(self, samples: PrefixCounts) -> None:
        """Count the samples and add their likelihood ratios, which need the target's probability of every sampled token."""
        self.num_samples += len(samples.samples)
        for sample in samples.samples:
            self.origins.update(sample.origins)
            for place, draft_prob in sample.draft_probs.items():
                target_prob = samples.probs[sample.token_ids[:place], sample.token_ids[place]]
                ratio = draft_prob / target_prob if target_prob > 0 else 1e300
                self._log_ratios += np.log(np.maximum(1 + np.array(LEAKS) * (ratio - 1), 1e-300))
                self.num_rounds += 1

    def tests(self) -> list[Test]:
        """Return every test with enough tokens."""
        found = [test for place in range(self.length) for test in (self._g_test(place), self._calibration(place)) if test]
        return [*found, self._ratio_test()] if self.num_rounds else found

    def _g_test(self, place: int) -> Test | None:
        freedom, tokens = int(self._g_freedom[place]), int(self._g_tokens[place])
        if not freedom:
            return None
        statistic = float(self._g[place])
        effect = math.sqrt(max(0.0, statistic - freedom) / tokens)
        return Test("G", place + 1, statistic, freedom, chi_square_tail(statistic, freedom), tokens, effect)

    def _calibration(self, place: int) -> Test | None:
        """Return the chi-square test of observed minus expected tokens per cell, which are sums of independent variables under
        the target; None with too few tokens.
        """
        groups: list[list[int]] = [[]]  # cells merged with neighbours until enough tokens are expected
        for cell in range(NUM_CELLS):
            if self._expected[place, groups[-1]].sum() >= MIN_EXPECTED:
                groups.append([])
            groups[-1].append(cell)
        if len(groups) > 1 and self._expected[place, groups[-1]].sum() < MIN_EXPECTED:
            groups[-2:] = [groups[-2] + groups[-1]]
        join = np.zeros((len(groups), NUM_CELLS))
        for row, cells in enumerate(groups):
            join[row, cells] = 1
        excess, variance = join @ self._excess[place], join @ self._variance[place] @ join.T
        values, vectors = np.linalg.eigh(variance)
        is_free = values > MIN_VARIANCE  # cells sum to zero, and a point mass has no variance
        freedom, tokens = int(is_free.sum()), int(self._tokens[place])
        if not freedom:
            return None
        statistic = float((((excess @ vectors)[is_free]) ** 2 / values[is_free]).sum())
        effect = math.sqrt(max(0.0, statistic - freedom) / tokens)
        return Test("calibration", place + 1, statistic, freedom, chi_square_tail(statistic, freedom), tokens, effect)

    def _ratio_test(self) -> Test:
        """Test mixtures of target and draft against the target. Under the target the mean of the likelihood ratios has
        expectation 1, so it exceeds 1 / alpha with probability at most alpha, for any number of samples (Ville 1939)."""
        highest = float(self._log_ratios.max())
        log_mean = highest + math.log(float(np.exp(self._log_ratios - highest).mean()))
        share = LEAKS[int(self._log_ratios.argmax())] if log_mean > 0 else 0.0
        return Test("likelihood ratio", None, log_mean, None, math.exp(-max(log_mean, 0.0)), self.num_rounds, share)


def cells_of(probs: Tensor) -> Tensor:
    """Return the calibration cell of each token: float64 [B, V] -> int64 [B, V]."""
    return torch.bucketize(probs, torch.tensor(EDGES, dtype=probs.dtype, device=probs.device))


def at_borders(probs: Tensor) -> Tensor:
    """Return distributions [B, V] in which impossible tokens are as likely as the least likely possible one.

    If passes round differently, a token at the border of top-k or top-p may be kept in one and dropped in the other. This is
    not an error of the verifier.
    """
    least = torch.where(probs > 0, probs, torch.inf).amin(-1, keepdim=True)
    return torch.where(probs > 0, probs, least)


def g_statistic(seen: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Return 2 sum O log(O / E) divided by Williams' factor (1976), so that its mean is the degrees of freedom."""
    total, freedom = expected.sum(), len(expected) - 1
    positive = seen > 0
    g = 2 * float((seen[positive] * np.log(seen[positive] / expected[positive])).sum())
    return max(g, 0.0) / float(1 + ((total / expected).sum() - 1) / (6 * total * freedom))
