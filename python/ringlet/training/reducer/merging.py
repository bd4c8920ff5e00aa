"""Cuts a sequence of gradients into buckets, from measured times. Pure: no torch here.

The model is that of MG-WFBP (Shi et al., INFOCOM 2019, arXiv 1811.11141). To reduce n bytes takes alpha + beta n. One
bucket goes at a time, and it may start when its last gradient is there. A merge saves an alpha and may wait:

    one bucket each   |g0 a|g1 a|..g2 a|        each pays alpha
    {g0 g1} {g2}           |g0 g1 a|g2 a|       g0 waits for g1

The paper merges greedily: it merges a gradient into the next one if that one arrives before the first is sent, or less
than alpha later. In about half of random cases, this misses the best cuts of the same model. `cut` finds them by
dynamic programming: the earliest end of the first j gradients is a minimum over the start of their last bucket.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LATER = 1.05  # how much later than the earliest cut one with fewer groups may end


@dataclass(frozen=True)
class Cost:
    """Seconds of an all-reduce of n bytes: `alpha_s` + `beta_s` * n."""

    alpha_s: float
    beta_s: float

    def seconds(self, nbytes: int) -> float:
        return self.alpha_s + self.beta_s * nbytes


def fit(nbytes: Sequence[int], seconds: Sequence[float]) -> Cost:
    """The line through positive times of two sizes or more with the least squared relative error. It is never
    negative."""
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, nbytes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n in zip(weights, nbytes, strict=True))
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in zip(weights, nbytes, seconds, strict=True)) / spread
    if slope <= 0:
        return Cost(statistics.median(seconds), 0.0)
    if mean_t - slope * mean_n < 0:  # the best line without a constant
        per_byte = [(w * n * t, w * n * n) for w, n, t in zip(weights, nbytes, seconds, strict=True)]
        return Cost(0.0, sum(top for top, _ in per_byte) / sum(bottom for _, bottom in per_byte))
    return Cost(mean_t - slope * mean_n, slope)


def end_of(groups: Sequence[Sequence[int]], ready_s: Sequence[float], nbytes: Sequence[int], cost: Cost) -> float:
    """The time at which the last of `groups` (indices into the other two) is reduced, by the model, in seconds."""
    end = 0.0
    for group in groups:
        end = max(end, max(ready_s[index] for index in group)) + cost.seconds(sum(nbytes[index] for index in group))
    return end


def cut(ready_s: Sequence[float], nbytes: Sequence[int], cost: Cost) -> list[list[int]]:
    """The groups of neighbours that are all reduced earliest. `ready_s` must not decrease.

    Of equally early cuts, returns the one with the larger last buckets. At worst quadratic in the number of gradients.
    Skips cuts whose last bucket alone takes too long.
    """
    count = len(ready_s)
    end, start = [0.0] * (count + 1), [0] * (count + 1)
    for j in range(1, count + 1):
        best, size = float("inf"), 0
        for i in range(j - 1, -1, -1):
            size += nbytes[i]
            if ready_s[j - 1] + cost.seconds(size) > best:
                break
            found = max(end[i], ready_s[j - 1]) + cost.seconds(size)
            if found <= best:
                best, start[j] = found, i
        end[j] = best
    groups, j = [], count
    while j:
        groups.append(list(range(start[j], j)))
        j = start[j]
    return groups[::-1]


def cut_with_few(ready_s: Sequence[float], nbytes: Sequence[int], cost: Cost) -> list[list[int]]:
    """As `cut`, but with fewer groups if the last one ends at most 5% later by the model.

    The model does not know that a group also takes processor time from backward, which then ends later. So this cuts as
    if alpha were larger, and doubles it as long as the end, by `cost`, is early enough.
    """
    groups = cut(ready_s, nbytes, cost)
    latest, alpha_s = LATER * end_of(groups, ready_s, nbytes, cost), cost.alpha_s
    while len(groups) > 1 and alpha_s > 0:
        alpha_s *= 2
        fewer = cut(ready_s, nbytes, Cost(alpha_s, cost.beta_s))
        if end_of(fewer, ready_s, nbytes, cost) > latest:
            break
        groups = fewer
    return groups
