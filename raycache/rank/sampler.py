"""Samples the next token of each sequence from its logits.

    mask, min_tokens -> logits + logit_bias -> penalties -> / temperature -> top_k -> top_p -> min_p -> Gumbel-max

The order is that of Hugging Face transformers. A mask sets the logits of forbidden tokens to -inf, and no later step
changes that. Gumbel-max sampling adds Gumbel noise to the logits and takes the argmax. The noise depends only on (seed,
position, token id), and rows are independent: a request samples the same tokens in any batch and on any rank, and a
draft model whose probabilities are close to its target's mostly samples the same tokens as the target.

Sorting the vocabulary costs about a hundred times more than a small top-k. Filters are therefore applied to the most
likely tokens first; a row whose result could still change is retried with more of them, and finally with all.
"""

# Shapes in this file: N rows, M rows that are not greedy, V vocabulary, C candidates of a row, K top logprobs.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raycache.parallel.uploads import uploaded
from raycache.types import SamplingParams

_NUM_CANDIDATES = (256, 8192)  # fixed: must not depend on the other rows of the batch
_MIN_TEMPERATURE = 1e-6  # safe to divide float32 by; sampling is effectively greedy below it
_MAX_NOISE = {"cpu": 1 << 18, "cuda": 1 << 23}  # noise values computed at once: fits the CPU cache, bounds GPU memory
_ZERO_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0  # [256, 8]
_STRIDE, _MIX_1, _MIX_2 = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 ("Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), as signed integers."""


class TokenCounts:
    """Output token counts of one request, the input of its penalties. Prompt tokens are known but not counted."""

    def __init__(self, prompt: npt.ArrayLike, output: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, np.int64))
        self._slot_of = {token: slot for slot, token in enumerate(distinct.tolist())}
        self._ids = distinct
        self._counts = np.zeros(len(distinct), np.float32)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids of the prompt and the output."""
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences of each of `ids` in the output; 0 for a token that only the prompt contains."""
        return self._counts[: len(self._slot_of)]

    def copy(self) -> TokenCounts:
        """Make an independent copy."""
        other = TokenCounts(())
        other._slot_of, other._ids, other._counts = dict(self._slot_of), self._ids.copy(), self._counts.copy()
        return other

    def add(self, token: int) -> None:
        """Count an output token."""
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
        seed: of the request.
        position: index of the sampled token in the request's output; a preemption does not reset it.
        token_counts: required if the row has penalties.
        mask: tokens that may be sampled, a bit per token id, at least one; empty if all may be (see `Row.masks`).
    """

    sampling: SamplingParams
    seed: int
    position: int
    token_counts: TokenCounts | None = None
    mask: bytes = b""

    @property
    def forbidden_stops(self) -> tuple[int, ...]:
        """Tokens that end the output, as long as it has fewer than min_tokens; see `_admit` in decider/admission.py."""
        return self.sampling.stop_token_ids if self.position < self.sampling.min_tokens else ()

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is sampled, whatever came before."""
        plain = self.sampling.is_greedy and not self.sampling.logit_bias and not self.forbidden_stops
        return plain and self.token_counts is None and not self.mask


class Logprobs(NamedTuple):
    """Log-probabilities (natural logarithm) under the model's own distribution, before temperature and filters.

    Attributes:
        token: [N] float32, of the given tokens.
        top_ids: [N, K] int64, the most likely tokens in descending order.
        top: [N, K] float32, of `top_ids`.
    """

    token: Tensor
    top_ids: Tensor
    top: Tensor


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Sample one token per row; rows with temperature 0 take the argmax.

    Args:
        logits: [N, V] float32, not modified.
    Returns:
        [N] int64 token ids, on the device of `logits`.
    """
    assert logits.ndim == 2 and len(logits) == len(rows), f"{len(rows)} rows for logits of shape {tuple(logits.shape)}"
    logits = _adjusted(_masked(logits, rows), rows)
    tokens = logits.argmax(-1)
    random = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if random:
        where = _on_device(random, torch.int64, logits.device)
        scores = logits if len(random) == len(rows) else logits[where]
        tokens[where] = _sample_filtered(scores, [rows[index] for index in random])
    return tokens


def logprobs(logits: Tensor, token_ids: Tensor, *, num_top: int) -> Logprobs:
    """Compute log-probabilities of given tokens and of the K = `num_top` most likely ones.

    Args:
        logits: [N, V], as the model returns them.
        token_ids: [N] int64.
    """
    scores = logits.float().log_softmax(-1)
    top, top_ids = _top(scores, min(num_top, scores.shape[-1]))
    return Logprobs(token=scores.gather(-1, token_ids[:, None])[:, 0], top_ids=top_ids, top=top)


def exponential_noise(seeds: Sequence[tuple[int, int]], ids: Tensor) -> Tensor:
    """Exponential random numbers with rate 1, identical on all machines up to rounding; -log of them is Gumbel noise.

    Args:
        seeds: (seed, position) of each of M rows, any integers.
        ids: [M or 1, C] int64, token ids.
    Returns:
        [M, C] float64.
    """
    keys = [hashlib.blake2b(b"%d:%d" % seed, digest_size=8).digest() for seed in seeds]
    first = _on_device(np.frombuffer(b"".join(keys), "<i8"), torch.int64, ids.device)
    # SplitMix64 from the row's key; the token id is the index into its sequence. Products are modulo 2**64.
    bits = ids * _STRIDE + first[:, None]
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    bits ^= _shift_right(bits, 31)
    return (_shift_right(bits, 12).double() + 0.5).mul_(2.0**-52).log_().neg_()  # log of a number in (0, 1)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; that of torch is arithmetic."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _masked(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Make the logits of forbidden tokens -inf, in a copy if any row has a mask."""
    masked = [index for index, row in enumerate(rows) if row.mask]
    if not masked:
        return logits
    packed = np.frombuffer(b"".join(rows[index].mask for index in masked), np.uint8).reshape(len(masked), -1)
    bits, are_zero = _on_device(packed, torch.uint8, logits.device), _on_device(_ZERO_BITS, torch.bool, logits.device)
    num_rows = max(1, _MAX_NOISE.get(logits.device.type, _MAX_NOISE["cuda"]) // logits.shape[1])
    logits = logits.clone()
    for begin in range(0, len(masked), num_rows):
        is_forbidden = are_zero[bits[begin : begin + num_rows].int()].flatten(1)[:, : logits.shape[1]]
        where = _on_device(masked[begin : begin + num_rows], torch.int64, logits.device)
        logits[where] = logits[where].masked_fill_(is_forbidden, -torch.inf)
    return logits


def _adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply min_tokens, logit_bias and penalties, to a copy if any row has them."""
    changed = [
        index
        for index, row in enumerate(rows)
        if row.forbidden_stops or row.sampling.logit_bias or row.sampling.has_penalties
    ]
    if not changed:
        return logits
    logits = logits.clone()
    for index in changed:
        _forbid_stops(logits[index], rows[index])
        _add_bias(logits[index], rows[index].sampling)
        _penalise(logits[index], rows[index])
    return logits


def _forbid_stops(logits: Tensor, row: SampleRow) -> None:
    """Make the logits of stop tokens -inf in one row, [V], in place, unless its mask allows nothing else."""
    forbidden = [token for token in row.forbidden_stops if token < len(logits)]
    if not forbidden:
        return
    if row.mask:
        allowed = np.unpackbits(np.frombuffer(row.mask, np.uint8), count=len(logits), bitorder="little")
        allowed[forbidden] = 0
        if not allowed.any():
            return
    logits[_on_device(forbidden, torch.int64, logits.device)] = -torch.inf


def _add_bias(logits: Tensor, sampling: SamplingParams) -> None:
    """Add logit_bias to the logits of one row, [V], in place."""
    if sampling.logit_bias:
        ids = _on_device(list(sampling.logit_bias), torch.int64, logits.device)
        logits[ids] += _on_device(list(sampling.logit_bias.values()), logits.dtype, logits.device)


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """Apply penalties to the logits of one row, [V], in place."""
    sampling = row.sampling
    if not sampling.has_penalties:
        return
    assert row.token_counts is not None, "a row with penalties needs token_counts"
    ids = _on_device(row.token_counts.ids, torch.int64, logits.device)
    counts = _on_device(row.token_counts.counts, torch.float32, logits.device)
    seen = logits[ids]
    seen = torch.where(seen < 0, seen * sampling.repetition_penalty, seen / sampling.repetition_penalty)
    logits[ids] = seen - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _sample_filtered(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply temperature and filters to logits [M, V], and sample a token per row."""
    filters = _Filters.of(rows, device=logits.device)
    vocab = logits.shape[-1]
    scores = logits / filters.temperature
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    is_filtered = [0 < row.sampling.top_k < vocab or row.sampling.top_p < 1 or row.sampling.min_p > 0 for row in rows]
    unfiltered = [i for i, is_so in enumerate(is_filtered) if not is_so]
    if unfiltered:
        all_ids = torch.arange(vocab, device=logits.device)[None]
        where = _on_device(unfiltered, torch.int64, logits.device)
        tokens[where] = _gumbel_max(scores[where], all_ids, [rows[i] for i in unfiltered])
    undecided = [i for i, is_so in enumerate(is_filtered) if is_so]
    for num_candidates in (*(count for count in _NUM_CANDIDATES if count < vocab), vocab):
        if not undecided:
            break
        where = _on_device(undecided, torch.int64, logits.device)
        top, ids, num_kept, is_final = _filter(scores[where], filters.take(where), num_candidates=num_candidates)
        top[torch.arange(num_candidates, device=logits.device) >= num_kept] = -torch.inf
        columns = _gumbel_max(top, ids, [rows[i] for i in undecided])
        tokens[where] = ids.gather(-1, columns[:, None])[:, 0]
        undecided = [i for i, is_so in zip(undecided, is_final.tolist(), strict=True) if not is_so]
    return tokens


def _gumbel_max(scores: Tensor, ids: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Sample from softmax(scores): [M, C], with token ids [M or 1, C] -> column indices [M]."""
    count = max(1, _MAX_NOISE.get(scores.device.type, _MAX_NOISE["cuda"]) // scores.shape[1])
    columns = []
    for begin in range(0, len(rows), count):
        some = slice(begin, begin + count)
        noise = exponential_noise([(row.seed, row.position) for row in rows[some]], ids if len(ids) == 1 else ids[some])
        columns.append(noise.log_().neg_().add_(scores[some]).argmax(-1))
    return torch.cat(columns)


class _Filters(NamedTuple):
    """Sampling parameters of M rows as columns, [M, 1] each."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # float64
    min_p: Tensor  # float64

    @classmethod
    def of(cls, rows: Sequence[SampleRow], *, device: torch.device) -> _Filters:
        params = [row.sampling for row in rows]

        def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return _on_device(values, dtype, device)[:, None]

        return cls(
            temperature=column([max(s.temperature, _MIN_TEMPERATURE) for s in params], torch.float32),
            top_k=column([s.top_k for s in params], torch.int64),
            top_p=column([s.top_p for s in params]),
            min_p=column([s.min_p for s in params]),
        )

    def take(self, index: Tensor) -> _Filters:
        return _Filters(*(column[index] for column in self))


def _filter(scores: Tensor, filters: _Filters, *, num_candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the filters to the C = `num_candidates` most likely tokens, in descending order, ties by id.

    Each filter keeps a prefix of that order, so the shortest prefix is what remains.

    Args:
        scores: [M, V], logits divided by temperature.
    Returns:
        Scores and ids of the candidates, [M, C] each; how many of them remain, [M, 1]; whether the result is that for
        C = V, [M].
    """
    vocab = scores.shape[-1]
    top, ids = _top(scores, num_candidates)
    all_probs = scores.softmax(-1)
    probs = all_probs.gather(-1, ids).double()
    cumulative = probs.cumsum(-1)  # including the candidate itself
    all_mass = all_probs.sum(-1, keepdim=True, dtype=torch.float64)

    # top_k also keeps ties with the k-th token. If it keeps every candidate, there may be more ties beyond them.
    kth = top.gather(-1, (filters.top_k.clamp(max=num_candidates) - 1).clamp(min=0))
    num_kept = torch.where(filters.top_k > 0, (top >= kth).sum(-1, keepdim=True), num_candidates)
    num_kept = torch.minimum(num_kept, (~top.isneginf()).sum(-1, keepdim=True))  # the others are masked
    mass = torch.where(num_kept < num_candidates, cumulative.gather(-1, (num_kept - 1).clamp(min=0)), all_mass)
    is_final = (filters.top_k == 0) | (filters.top_k >= vocab) | (num_kept < num_candidates)

    by_top_p = (cumulative - probs < filters.top_p * mass).sum(-1, keepdim=True)
    by_top_p = torch.where(filters.top_p < 1, by_top_p, num_candidates)
    by_min_p = ((probs >= filters.min_p * probs[:, :1]) & (probs > 0)).sum(-1, keepdim=True)
    num_kept = torch.minimum(num_kept, torch.minimum(by_top_p, by_min_p)).clamp(min=1)
    # Among tokens tied with the last candidate, topk picks the candidates arbitrarily.
    is_final &= (num_kept < num_candidates) & (top.gather(-1, num_kept - 1) > top[:, -1:])
    return top, ids, num_kept, is_final[:, 0] | (num_candidates == vocab)


def _on_device(values: npt.ArrayLike, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy to the device asynchronously."""
    return uploaded(torch.tensor(np.asarray(values), dtype=dtype), device)


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Like `torch.topk` over the last dimension of [N, V], with ties in the order of their index."""
    if count == values.shape[-1]:
        return values.sort(dim=-1, descending=True, stable=True)
    _, ids = values.topk(count, dim=-1)
    ids = ids.sort(dim=-1).values
    ordered, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, order)
