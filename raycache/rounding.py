"""Division and powers of two, rounded up.

Triton has both, too, but takes 1.5 us a call, and a step makes hundreds of them.
"""

from __future__ import annotations


def ceil_div(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not less than a positive number."""
    return 1 << (number - 1).bit_length()
