"""How many tokens a step may have, and how many of them prompts may take while other requests generate.

A step lasts as long as its prompts take, and each request that generates gets one token of it. So while there are such
requests, prompts share a part of the budget:

    nobody generates     [ prompt .............................. ]    the whole budget, one prompt after the other
    others generate      [ d d d | prompt ... | prompt ... |     ]    `prompt_share` of it, in equal parts

Where many requests wait for their first token and few generate, as when a burst of them arrives, short steps would
spare the few at the cost of the many. So the part grows with the fraction of requests that wait to start, less one.

A prompt's part is not made smaller than a quarter of that: every chunk of a prompt reads all of the prompt's cached
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PARTS = 4
"""Prompts among which a step's share is divided; others wait for the next steps."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of every step.

    Attributes:
        tokens: of all rows.
        prompt_share: minimum part of `tokens` for prompts while other requests generate; 1 sets no limit.
    """

    tokens: int
    prompt_share: float = 1.0

    @property
    def is_bounded(self) -> bool:
        """Whether prompts are limited at all."""
        return self.prompt_share < 1

    def prompt_tokens(self, page_size: int, *, num_prompts: int = 1, num_others: int = 1) -> int:
        """Tokens of prompts in a step in which others generate: whole pages, at least one.

        Args:
            num_prompts: requests whose prompts are being computed, or could be.
            num_others: all others that run.
        """
        share = max(self.prompt_share, (num_prompts - 1) / (num_prompts + num_others))
        return max(1, int(self.tokens * share) // page_size) * page_size


def least_chunk(tokens: int) -> int:
    """Smallest part of a step's tokens for prompts that is worth a chunk of one."""
    return max(1, tokens // MAX_PARTS)


def longest_chunk(wanted: Sequence[int], tokens: int) -> int:
    """Divide a step's tokens for prompts evenly; what short ones leave goes to the others.

    Args:
        wanted: tokens that each prompt has left to compute.
    Returns:
        The limit of each chunk, not below `least_chunk`.
    """
    left = tokens
    for number, length in enumerate(sorted(wanted)):
        part = left // (len(wanted) - number)
        if length > part:
            return max(part, least_chunk(tokens))
        left -= length
    return tokens
