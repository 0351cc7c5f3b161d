"""Which tokens a request's grammar allows next.

    output so far   { " a " : 4
    row             4 and the draft tokens 2 }
    masks           after 4: digits and }     after 2: digits and }     after }: end tokens only

A grammar follows the tokens that its request has, so preemption and the loss of ranks do not concern it. Masks are
made while the ranks run the layers of their step, for all its rows at once. An error, such as a grammar that becomes
too complex, ends that request only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from raycache.types import PackedTokens
from raycache.vocabulary.grammar_tokens import compiled, without_excerpt
from raycache.wire.plan import Masks, Row

_NUM_REMEMBERED = 128
"""Compiled grammars that are kept: the turns of one conversation mostly have the same."""


class RequestGrammar:
    """Grammar of one request.

    Args:
        compiled: matcher at its start; not changed.
        prompt_len: tokens before the output.
    """

    def __init__(self, compiled: Future[LLMatcher], *, prompt_len: int) -> None:
        self._compiled, self._end = compiled, 4 * prompt_len
        self._matcher: LLMatcher | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled."""
        return self._compiled.done()

    @property
    def error(self) -> str:
        """Why it cannot be followed any further; "" if it can, or is not ready."""
        if not self.is_ready:
            return ""
        cause = self._compiled.exception()
        return without_excerpt(str(cause) if cause else (self._matcher or self._compiled.result()).get_error())

    def at(self, tokens: PackedTokens) -> LLMatcher:
        """The matcher after all of a request's tokens; it must be ready."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        assert len(tokens) >= self._end, "a request has lost tokens"
        if len(tokens) > self._end:
            self._matcher.consume_tokens(np.frombuffer(bytes(tokens[self._end :]), np.int32).tolist())
            self._end = len(tokens)
        return self._matcher

    def allowed(self, drafts: PackedTokens, *, behind: PackedTokens) -> PackedTokens:
        """Those of the draft tokens behind a request's tokens that come before the first forbidden one."""
        count = self.at(behind).validate_tokens(np.frombuffer(drafts, np.int32).tolist())
        return drafts[: 4 * max(count, 0)]


class SameThread(Executor):
    """Runs what is submitted at once, for callers that wait for it anyway."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **settings: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **settings))
        except Exception as cause:  # as in another thread
            done.set_exception(cause)
        return done


@dataclass
class Grammars:
    """Compiles grammars and makes masks.

    Args:
        table: builds the table of the model's tokens; called at the first grammar, in a thread of `threads`.
        threads: runs compilations, one by one.
    """

    table: Callable[[], LLTokenizer]
    threads: Executor
    _compiled: OrderedDict[str, Future[LLMatcher]] = field(default_factory=OrderedDict)
    _table: LLTokenizer | None = None
    _executor: LLExecutor | None = None

    def begin(self, text: str, *, prompt_len: int) -> RequestGrammar:
        """Compile a request's grammar in the background."""
        compiled = self._compiled.pop(text, None) or self.threads.submit(self._compile, text)
        self._compiled[text] = compiled
        while len(self._compiled) > _NUM_REMEMBERED:
            self._compiled.popitem(last=False)
        return RequestGrammar(compiled, prompt_len=prompt_len)

    def wait(self, timeout_s: float) -> None:
        """Wait for a grammar that is being compiled, if there is one."""
        if pending := [each for each in self._compiled.values() if not each.done()]:
            wait(pending, timeout_s, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    @property
    def mask_len(self) -> int:
        """Bytes of a mask; a grammar must have been compiled."""
        assert self._table is not None, "a matcher was compiled without the table"
        return 4 * -(-self._table.vocab_size // 32)

    def masks(self, rows: Sequence[Row], matchers: Sequence[LLMatcher | None]) -> Masks:
        """Make the masks of a plan's masked rows, [num_masks, mask_len].

        Args:
            matchers: of the rows' requests, after all their tokens; None allows all tokens. One that fails is in error
                afterwards; its mask then allows end tokens only.
        """
        masks = np.full((sum(row.num_masks for row in rows), self.mask_len // 4), -1, np.int32)
        first, plain, drafted = 0, [], []
        for row, matcher in zip(rows, matchers, strict=True):
            if matcher is not None and row.num_drafts:
                drafts = np.frombuffer(row.tokens, np.int32)[row.first_sampled + 1 :].tolist()
                drafted.append((matcher, first, drafts))
            elif matcher is not None:
                plain.append((matcher, first))
            first += row.num_masks
        self._executor = self._executor or LLExecutor()
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)
        return masks.view(np.uint8)

    def _compile(self, text: str) -> LLMatcher:
        if self._table is None:
            self._table = self.table()
        return compiled(text, self._table)
