"""Chooses the next token of each sequence from its logits.

    logits + logit_bias -> penalties -> / temperature -> top_k -> top_p -> min_p -> race

The order is that of Hugging Face transformers. In the race each remaining token gets a random exponential time with its
probability as the rate; the first wins, so each wins with its probability ("Gumbel-max"). Randomness is a function of
(seed, position, token) only, and rows are independent: a request gets the same tokens in any batch and on any rank, and
two models with similar probabilities mostly sample the same token, as a draft and its target should.

Sorting a vocabulary costs a hundred times more than finding its likeliest few tokens. So filters are tried on those
first; a row that they do not decide is tried with more, and sorted completely in the end.
"""

# Shapes in this file: N rows, M rows that sample, V vocabulary, C candidates of a row, K alternatives to report.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raycache.types import SamplingParams

_NUM_CANDIDATES = (256, 8192)  # fixed, so that a sample cannot depend on other rows
_MIN_TEMPERATURE = 1e-6  # float32 can divide by it; below, sampling is greedy in effect
_MOST_TIMES = {"cpu": 1 << 18, "cuda": 1 << 23}  # race times held at once, to fit the CPU cache or bound GPU memory
_STRIDE, _MIX_1, _MIX_2 = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 ("Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), as signed integers."""


class TokenCounts:
    """The distinct tokens of one request, and how often its output contains each; input of penalties.

    Args:
        prompt: token ids.
        output: token ids generated so far.
    """

    def __init__(self, prompt: npt.ArrayLike, output: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, np.int64))
        self._slot_of = {token: slot for slot, token in enumerate(distinct.tolist())}
        self._ids = distinct
        self._counts = np.zeros(len(distinct), np.float32)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids of prompt and output."""
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences of each entry of `ids` in the output; 0 for a token that is only in the prompt."""
        return self._counts[: len(self._slot_of)]

    def copy(self) -> TokenCounts:
        """Return an independent copy."""
        other = TokenCounts(())
        other._slot_of, other._ids, other._counts = dict(self._slot_of), self._ids.copy(), self._counts.copy()
        return other

    def add(self, token: int) -> None:
        """Count one more output token."""
        slot = self._slot_of.get(token)
        if slot is None:
            slot = self._slot_of[token] = len(self._slot_of)
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot + 16)
                self._counts = np.resize(self._counts, 2 * slot + 16)
            self._ids[slot], self._counts[slot] = token, 0
        self._counts[slot] += 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sampling parameters of one row of logits.

    Attributes:
        seed: the client's, or one chosen for the request.
        position: index of the token in the request's output, also after a preemption.
        token_counts: needed when sampling.has_penalties, else None.
    """

    sampling: SamplingParams
    seed: int
    position: int
    token_counts: TokenCounts | None = None


class Logprobs(NamedTuple):
    """Log-probabilities, natural log, of the model's own distribution.

    Attributes:
        token: [N] float32, log-probability of the given token.
        top_ids: [N, K] int64, the most likely tokens, most likely first.
        top: [N, K] float32, their log-probabilities.
    """

    token: Tensor
    top_ids: Tensor
    top: Tensor


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Choose one token per row.

    Args:
        logits: [N, V] float32, not modified.
    Returns:
        [N] int64 token ids, on the device of `logits`.
    """
    assert logits.ndim == 2 and len(logits) == len(rows), f"{len(rows)} rows for logits of shape {tuple(logits.shape)}"
    logits = _adjusted(logits, rows)
    tokens = logits.argmax(-1)
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if drawn:
        where = _on_device(drawn, torch.int64, logits.device)
        scores = logits if len(drawn) == len(rows) else logits[where]
        tokens[where] = _draw(scores, [rows[index] for index in drawn])
    return tokens


def logprobs(logits: Tensor, token_ids: Tensor, *, num_top: int) -> Logprobs:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: [N, V], raw.
        token_ids: [N] int64.
        num_top: K, number of alternatives.
    """
    scores = logits.float().log_softmax(-1)
    top, top_ids = _largest(scores, min(num_top, scores.shape[-1]))
    return Logprobs(token=scores.gather(-1, token_ids[:, None])[:, 0], top_ids=top_ids, top=top)


def race_times(seeds: Sequence[tuple[int, int]], ids: Tensor) -> Tensor:
    """Exponential times with rate 1, the same on every machine except for rounding.

    Args:
        seeds: M times seed and position, any integers.
        ids: [M or 1, C] int64, of the tokens.
    Returns:
        [M, C] float64.
    """
    keys = [hashlib.blake2b(b"%d:%d" % seed, digest_size=8).digest() for seed in seeds]
    first = _on_device(np.frombuffer(b"".join(keys), "<i8"), torch.int64, ids.device)
    # The token id is the index into the random sequence that starts at the row's key; products are modulo 2**64.
    bits = ids * _STRIDE + first[:, None]
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    bits ^= _shifted(bits, 31)
    return (_shifted(bits, 12).double() + 0.5).mul_(2.0**-52).log_().neg_()  # log of a number in (0, 1)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply logit_bias and penalties; copies if any row has some."""
    changed = [index for index, row in enumerate(rows) if row.sampling.logit_bias or row.sampling.has_penalties]
    if not changed:
        return logits
    logits = logits.clone()
    for index in changed:
        _add_bias(logits[index], rows[index].sampling)
        _penalise(logits[index], rows[index])
    return logits


def _add_bias(logits: Tensor, sampling: SamplingParams) -> None:
    """Add logit_bias to one row of logits, [V], in place."""
    if sampling.logit_bias:
        ids = _on_device(list(sampling.logit_bias), torch.int64, logits.device)
        logits[ids] += _on_device(list(sampling.logit_bias.values()), logits.dtype, logits.device)


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """Apply penalties to one row of logits, [V], in place."""
    sampling = row.sampling
    if not sampling.has_penalties:
        return
    assert row.token_counts is not None, "a row with penalties needs token_counts"
    ids = _on_device(row.token_counts.ids, torch.int64, logits.device)
    counts = _on_device(row.token_counts.counts, torch.float32, logits.device)
    seen = logits[ids]
    seen = torch.where(seen < 0, seen * sampling.repetition_penalty, seen / sampling.repetition_penalty)
    logits[ids] = seen - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Sample every row of [M, V]."""
    filters = _Filters.of(rows, device=logits.device)
    vocab = logits.shape[-1]
    scores = logits / filters.temperature
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    is_filtered = [0 < row.sampling.top_k < vocab or row.sampling.top_p < 1 or row.sampling.min_p > 0 for row in rows]
    free = [i for i, is_so in enumerate(is_filtered) if not is_so]
    if free:
        every = torch.arange(vocab, device=logits.device)[None]
        where = _on_device(free, torch.int64, logits.device)
        tokens[where] = _winners(scores[where], every, [rows[i] for i in free])
    waiting = [i for i, is_so in enumerate(is_filtered) if is_so]
    for num_candidates in (*(count for count in _NUM_CANDIDATES if count < vocab), vocab):
        if not waiting:
            break
        where = _on_device(waiting, torch.int64, logits.device)
        best, ids, num_kept, is_known = _kept(scores[where], filters.take(where), num_candidates=num_candidates)
        best[torch.arange(num_candidates, device=logits.device) >= num_kept] = -torch.inf
        won = _winners(best, ids, [rows[i] for i in waiting])
        tokens[where] = ids.gather(-1, won[:, None])[:, 0]
        waiting = [i for i, is_so in zip(waiting, is_known.tolist(), strict=True) if not is_so]
    return tokens


def _winners(scores: Tensor, ids: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Winner of each row's race: logits [M, C] of tokens [M or 1, C] -> column indices [M]."""
    most = _MOST_TIMES.get(scores.device.type, _MOST_TIMES["cuda"])
    count = max(1, most // scores.shape[1])
    won = []
    for begin in range(0, len(rows), count):
        some = slice(begin, begin + count)
        times = race_times([(row.seed, row.position) for row in rows[some]], ids if len(ids) == 1 else ids[some])
        won.append(times.log_().neg_().add_(scores[some]).argmax(-1))
    return torch.cat(won)


class _Filters(NamedTuple):
    """Sampling parameters of M rows as columns, [M, 1] each."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # float64
    min_p: Tensor  # float64

    @classmethod
    def of(cls, rows: Sequence[SampleRow], *, device: torch.device) -> _Filters:
        wanted = [row.sampling for row in rows]

        def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return _on_device(values, dtype, device)[:, None]

        return cls(
            temperature=column([max(s.temperature, _MIN_TEMPERATURE) for s in wanted], torch.float32),
            top_k=column([s.top_k for s in wanted], torch.int64),
            top_p=column([s.top_p for s in wanted]),
            min_p=column([s.min_p for s in wanted]),
        )

    def take(self, index: Tensor) -> _Filters:
        return _Filters(*(column[index] for column in self))


def _kept(scores: Tensor, filters: _Filters, *, num_candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply filters to the likeliest tokens, most likely first, ties by id.

    Every filter keeps some number of first tokens in that order, so the smallest number decides.

    Args:
        scores: [M, V], logits over temperature.
        num_candidates: C, number of most likely tokens to consider; V for all.
    Returns:
        Scores and ids of the candidates, [M, C] each; how many are kept, [M, 1]; whether considering all tokens would
        give the same result, [M].
    """
    vocab = scores.shape[-1]
    best, ids = _largest(scores, num_candidates)
    probs = scores.softmax(-1)
    chance = probs.gather(-1, ids).double()  # probability of each candidate, before any filter
    upto = chance.cumsum(-1)  # cumulative, including the candidate
    all_mass = probs.sum(-1, keepdim=True, dtype=torch.float64)

    # top_k also keeps ties with the k-th. A filter that keeps every candidate might keep more than those.
    kth = best.gather(-1, (filters.top_k.clamp(max=num_candidates) - 1).clamp(min=0))
    num_kept = torch.where(filters.top_k > 0, (best >= kth).sum(-1, keepdim=True), num_candidates)
    mass = torch.where(num_kept < num_candidates, upto.gather(-1, (num_kept - 1).clamp(min=0)), all_mass)
    is_known = (filters.top_k == 0) | (filters.top_k >= vocab) | (num_kept < num_candidates)

    by_top_p = (upto - chance < filters.top_p * mass).sum(-1, keepdim=True)
    by_top_p = torch.where(filters.top_p < 1, by_top_p, num_candidates)
    by_min_p = ((chance >= filters.min_p * chance[:, :1]) & (chance > 0)).sum(-1, keepdim=True)
    num_kept = torch.minimum(num_kept, torch.minimum(by_top_p, by_min_p)).clamp(min=1)
    # Which of the tokens tied with the last candidate are candidates is arbitrary.
    is_known &= (num_kept < num_candidates) & (best.gather(-1, num_kept - 1) > best[:, -1:])
    return best, ids, num_kept, is_known[:, 0] | (num_candidates == vocab)


def _on_device(values: npt.ArrayLike, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy to the device without waiting for a GPU, which needs pinned memory."""
    host = torch.tensor(np.asarray(values), dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of [N, V] and their indices, largest first, ties by index."""
    if count == values.shape[-1]:
        return values.sort(dim=-1, descending=True, stable=True)
    _, places = values.topk(count, dim=-1)
    places = places.sort(dim=-1).values
    ordered, order = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return ordered, places.gather(-1, order)
