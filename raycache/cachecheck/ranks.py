"""Wilcoxon's rank-sum test (Mann and Whitney's), exact and one-sided: are some values larger than others?

It assumes no distribution, only that without an effect every order of all values is equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def rank_test(larger: Sequence[float], smaller: Sequence[float]) -> float:
    """Probability that values of one distribution would be in this order, or one that speaks more for `larger`.

    Equal values count as if those of `smaller` were above, so that it is too large rather than too small.

    Args:
        larger, smaller: values that are independent of each other.
    """
    won = sum(one > other for one in larger for other in smaller)
    counts = _orders(len(larger), len(smaller))
    return sum(counts[won:]) / math.comb(len(larger) + len(smaller), len(larger))


def _orders(first: int, second: int) -> list[int]:
    """Number of orders of two groups of values by how many pairs the first group wins: Gauss's binomial coefficients.

    They are the coefficients of the product of (1 - q ** (first + i)) / (1 - q ** i) for i from 1 to `second`.
    """
    counts = [1] + [0] * (first * second)
    for step in range(1, second + 1):
        for at in range(first * second, first + step - 1, -1):
            counts[at] -= counts[at - first - step]
        for at in range(step, first * second + 1):
            counts[at] += counts[at - step]
    return counts
