"""The text of one request, made from the engine's token increments.

Detokenises, cuts at stop strings and keeps log-probabilities beside their tokens. The HTTP server and the in-process
use share it, so it knows no event loop:

    text = OutputText(tokenizer, prompt=request.prompt, sampling=request.sampling)
    for output in outputs:
        delta = text.push(output)
        if delta.finish_reason is not None:
            break                        # cancel the request if output.finish_reason is None: a stop string ended it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycache.api.detokenize import Detokenizer
from raycache.api.formats.parts import Part, PartsParser, ToolCallStart
from raycache.api.stops import StopMatcher
from raycache.api.tokenizer import Tokenizer
from raycache.divergence.history import Watch
from raycache.types import FinishReason, Miss, RequestOutput, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One token with its log-probability.

    Attributes:
        token_id: the token.
        offset: characters of the text before it.
        logprob: None for the first token of a prompt.
    """

    token_id: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one increment added.

    Attributes:
        text: characters that are complete and cannot be a part of a stop string.
        token_ids: generated tokens, up to the one that completed a stop string.
        entries: their log-probabilities if asked for; with echo those of the prompt come first.
        prompt_logprobs: as in RequestOutput.
        finish_reason: set in the last one.
        parts: the text split into reasoning, content and tool calls, if a parser was given.
        ends: for each part, how many of the tokens had come when it was there.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    entries: tuple[LogprobEntry, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    parts: tuple[Part, ...] = ()
    ends: tuple[int, ...] = ()


class OutputText:
    """Text, token count and end of one request.

    Args:
        prompt: token ids.
        sampling: its stop strings are used.
        echo: the text begins with the prompt.
        skip_special_tokens: marks such as <s> give no text.
        shown: special tokens that give their text all the same.
        parser: splits the text into parts.
    Attributes:
        num_tokens: tokens generated, up to and including the one that completed a stop string.
        num_reasoning_tokens: those of them that are reasoning, its closing mark included.
        num_calls: tool calls that have begun.
        cached_tokens: prompt tokens that were reused from the cache.
        cached_by_tier: those tokens by the tier that they came from.
        miss: why no more of the prompt was reused.
        cut_by: the component that kept more of them from being reused, or "".
        comparison: of the prompt with those before it (raycache/divergence), or None.
        drafted_tokens, accepted_tokens: as in RequestOutput.
        finish_reason: None while it runs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int],
        sampling: SamplingParams,
        echo: bool = False,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        parser: PartsParser | None = None,
    ) -> None:
        context = () if echo else prompt
        self._detokenizer = Detokenizer(tokenizer, prompt=context, skip_special_tokens=skip_special_tokens, shown=shown)
        self._stops = StopMatcher(sampling.stop)
        self._parser = parser
        self._echo = prompt if echo else ()
        self._text_len = 0
        self.num_tokens = self.num_reasoning_tokens = self.num_calls = 0
        self.cached_tokens = 0
        self.cached_by_tier: Mapping[str, int] = {}
        self.miss = Miss.NONE
        self.cut_by = ""
        self.comparison: Watch | None = None
        self.drafted_tokens = self.accepted_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, output: RequestOutput) -> TextDelta:
        """Add one increment. The token of a finish_reason "stop" gives no text: it is the mark that ended the output.

        Raises:
            ValueError: the text has ended.
        """
        if self.finish_reason is not None:
            raise ValueError(f"request {output.request_id} has ended with {self.finish_reason}")
        if output.cached_tokens > self.cached_tokens:
            self.cached_tokens, self.cached_by_tier = output.cached_tokens, output.cached_by_tier
        self.miss = self.miss or output.miss
        self.cut_by = self.cut_by or output.cut_by
        if output.drafted_tokens > self.drafted_tokens:
            self.drafted_tokens, self.accepted_tokens = output.drafted_tokens, output.accepted_tokens
        text, entries = self._push_prompt(output.prompt_logprobs)
        logprobs = output.logprobs or ()
        last_text = len(output.token_ids) - (output.finish_reason is FinishReason.STOP)
        parts: list[Part] = []
        ends: list[int] = []
        count = 0
        for token_id in output.token_ids:
            if logprobs:
                entries.append(LogprobEntry(token_id, self._text_len, logprobs[count]))
            piece, is_stopped = self._push_token(token_id) if count < last_text else ("", False)
            text += piece
            count += 1
            self.num_reasoning_tokens += self._parser is not None and self._parser.is_reasoning
            parts += self._split(piece)
            ends += [count] * (len(parts) - len(ends))
            if is_stopped:
                self.finish_reason = FinishReason.STOP
                break
        else:
            if output.finish_reason is not None:
                self.finish_reason = output.finish_reason
                tail = self._finish()
                text += tail
                parts += self._split(tail)
        if self.finish_reason is not None and self._parser is not None:
            parts += self._parser.finish()
        self.num_tokens += count
        self.num_calls += sum(isinstance(part, ToolCallStart) for part in parts)
        ends += [count] * (len(parts) - len(ends))
        return TextDelta(
            text,
            output.token_ids[:count],
            tuple(entries),
            output.prompt_logprobs,
            self.finish_reason,
            tuple(parts),
            tuple(ends),
        )

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._stops.found

    def _split(self, piece: str) -> list[Part]:
        return self._parser.feed(piece) if piece and self._parser is not None else []

    def _push_token(self, token_id: int) -> tuple[str, bool]:
        piece = self._detokenizer.push(token_id)
        self._text_len += len(piece)
        return self._stops.feed(piece)

    def _push_prompt(self, logprobs: Sequence[TokenLogprob | None] | None) -> tuple[str, list[LogprobEntry]]:
        """Text and entries of the prompt, once, if it is echoed. Stop strings do not count in it."""
        text, entries = "", []
        for position, token_id in enumerate(self._echo):
            if logprobs is not None:
                entries.append(LogprobEntry(token_id, self._text_len, logprobs[position]))
            piece = self._detokenizer.push(token_id)
            self._text_len += len(piece)
            text += piece
        self._echo = ()
        return text, entries

    def _finish(self) -> str:
        tail, is_stopped = self._stops.feed(self._detokenizer.finish())
        return tail if is_stopped else tail + self._stops.flush()
