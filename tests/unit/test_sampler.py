import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from raycache.rank.sampler import SampleRow, TokenCounts, exponential_noise, logprobs, sample
from raycache.types import SamplingParams

GREEDY = SamplingParams(temperature=0)


def random_logits(rows: int, vocab: int, *, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def rows_of(
    sampling: SamplingParams, count: int, *, seed: int = 1, counts: TokenCounts | None = None
) -> list[SampleRow]:
    return [SampleRow(sampling, seed=seed, position=i, token_counts=counts) for i in range(count)]


def processors(sampling: SamplingParams) -> LogitsProcessorList:
    """What transformers' `generate` would build for these parameters, in its order."""
    chain = LogitsProcessorList()
    if sampling.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def splitmix(state: int) -> int:
    """The next number of SplitMix64, as its authors' C code has it."""
    bits = (state + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def slow_times(row: SampleRow, vocab: int) -> Tensor:
    """Token i has number i of the sequence that the row begins, as a time: [vocab] float64."""
    key = hashlib.blake2b(f"{row.seed}:{row.position}".encode(), digest_size=8).digest()
    state = int.from_bytes(key, "little") - 0x9E3779B97F4A7C15
    numbers = [splitmix((state + token * 0x9E3779B97F4A7C15) % 2**64) for token in range(vocab)]
    return torch.tensor([-math.log(((number >> 12) + 0.5) / 2**52) for number in numbers], dtype=torch.float64)


def drawn_by_transformers(logits: Tensor, rows: Sequence[SampleRow], *, tokens: Sequence[int] = (0,)) -> Tensor:
    """Filter with transformers, then let all tokens race: a token's time over its probability, the least wins."""
    scores = processors(rows[0].sampling)(torch.tensor([list(tokens)] * len(rows)), logits.clone())
    chances = scores.double().softmax(-1)
    times = exponential_noise([(row.seed, row.position) for row in rows], torch.arange(logits.shape[-1])[None])
    return (times / chances).argmin(-1)


def chi_square_excess(tokens: Tensor, chances: Tensor) -> float:
    """Standard deviations by which chi-square exceeds its expectation, tokens expected under 5 times put together."""
    expected = chances.double() * len(tokens)
    seen = tokens.bincount(minlength=len(chances)).double()
    rare = expected < 5
    seen = torch.cat((seen[~rare], seen[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None])).clamp(min=1e-9)
    freedom = len(expected) - 1
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


# --- greedy ---


def test_greedy_takes_the_most_likely_token_and_of_equal_ones_the_first() -> None:
    logits = random_logits(5, 300)
    logits[2, 7] = logits[2, 100] = 99.0
    tokens = sample(logits, rows_of(GREEDY, 5))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert tokens[2] == 7


def test_greedy_ignores_filters_and_seed() -> None:
    logits = random_logits(4, 300)
    rows = rows_of(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.2), 4, seed=123)
    assert sample(logits, rows).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [
    SamplingParams(temperature=1e-45), SamplingParams(temperature=1e-9), SamplingParams(top_k=1),
    SamplingParams(top_p=1e-12), SamplingParams(min_p=1.0),
])  # fmt: skip
def test_the_narrowest_filters_are_greedy(sampling: SamplingParams) -> None:
    logits = random_logits(50, 1000, scale=1000.0)
    assert sample(logits, rows_of(sampling, 50)).tolist() == logits.argmax(-1).tolist()


# --- filters, against transformers ---

FILTERS: list[Mapping[str, Any]] = [
    {}, {"temperature": 0.3}, {"temperature": 5.0}, {"top_k": 1}, {"top_k": 40}, {"top_k": 255}, {"top_k": 256},
    {"top_k": 257}, {"top_k": 10**6}, {"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.001},
    {"min_p": 0.1}, {"top_k": 50, "top_p": 0.5}, {"top_k": 600, "top_p": 0.9}, {"top_k": 300, "min_p": 0.01},
    {"top_p": 0.9, "min_p": 0.02}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 2.5, "top_k": 500, "top_p": 0.95, "min_p": 0.001},
]  # fmt: skip


@pytest.mark.parametrize("vocab", [40, 1500, 9000])  # all tokens are candidates; few are, in one round or two
@pytest.mark.parametrize("wanted", FILTERS, ids=str)
def test_draws_equal_those_from_what_transformers_keeps(wanted: Mapping[str, Any], vocab: int) -> None:
    rows = rows_of(SamplingParams(**wanted), 200)
    logits = random_logits(200, vocab, scale=2.0)
    equal = sample(logits, rows) == drawn_by_transformers(logits, rows)
    assert equal.sum() >= 199  # a draw within a rounding error of the border between two tokens may differ


@pytest.mark.parametrize(
    "wanted", [{"top_k": 30}, {"top_k": 256}, {"min_p": 0.01}, {"top_k": 300, "min_p": 0.1}], ids=str
)
def test_filters_keep_what_is_as_likely_as_the_last(wanted: Mapping[str, Any]) -> None:
    rows = rows_of(SamplingParams(**wanted), 400)
    logits = random_logits(400, 1500).round()  # ten values or so
    equal = sample(logits, rows) == drawn_by_transformers(logits, rows)
    assert equal.sum() >= 399


@pytest.mark.parametrize(("vocab", "num_allowed"), [(1500, 1), (1500, 3), (1500, 100), (40, 3), (9000, 100)])
@pytest.mark.parametrize("wanted", [*FILTERS, {"temperature": 0}, {"repetition_penalty": 1.5}], ids=str)
def test_a_mask_does_what_logits_of_minus_infinity_do_in_transformers(
    wanted: Mapping[str, Any], vocab: int, num_allowed: int
) -> None:
    random = np.random.default_rng(vocab + num_allowed)
    is_allowed = np.zeros((100, vocab), bool)
    for line in is_allowed:
        line[random.choice(vocab, min(num_allowed, vocab), replace=False)] = True
    # Longer than the logits: the table of a tokenizer may have more tokens.
    masks = np.packbits(np.pad(is_allowed, ((0, 0), (0, 64 - vocab % 32))), axis=1, bitorder="little")
    sampling, logits = SamplingParams(**wanted), random_logits(100, vocab, scale=2.0)
    counts = TokenCounts([0]) if sampling.has_penalties else None
    rows = [
        SampleRow(sampling, seed=1, position=i, token_counts=counts, mask=mask.tobytes() if i % 3 else b"")
        for i, mask in enumerate(masks)
    ]
    before = logits.clone()
    tokens = sample(logits, rows)
    assert torch.equal(logits, before)
    masked = logits.masked_fill(torch.tensor([[bool(row.mask)] for row in rows]) & ~torch.tensor(is_allowed), -math.inf)
    for i, row in enumerate(rows):
        assert not row.mask or is_allowed[i, tokens[i]]
    right = masked.argmax(-1) if sampling.is_greedy else drawn_by_transformers(masked, rows)
    assert (tokens == right).sum() >= 99


def test_a_bias_does_not_bring_back_what_a_mask_forbids() -> None:
    mask = np.packbits(np.arange(64) == 5, bitorder="little").tobytes()
    rows = [
        SampleRow(SamplingParams(temperature=t, logit_bias={7: 100.0}, top_k=k), seed=1, position=0, mask=mask)
        for t in (0.0, 1.0) for k in (0, 3)
    ]  # fmt: skip
    assert sample(random_logits(4, 50), rows).tolist() == [5] * 4


def test_of_equally_likely_tokens_top_p_keeps_the_first() -> None:
    for logits in (torch.zeros(400, 2000), torch.cat((torch.full((400, 100), -torch.inf), torch.zeros(400, 2000)), 1)):
        found = sample(logits, rows_of(SamplingParams(top_p=0.1), 400)) - (logits.shape[1] - 2000)
        assert found.min() >= 0 and 150 < found.max() <= 200  # 0.1 is a little more in float64


def test_logits_that_are_no_numbers_give_some_token() -> None:
    for sampling in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)):
        assert 0 <= int(sample(torch.full((1, 600), torch.nan), rows_of(sampling, 1))) < 600


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((500, 600), -torch.inf)
    logits[:, [3, 599]] = 0.0
    assert set(sample(logits, rows_of(SamplingParams(), 500)).tolist()) == {3, 599}


# --- penalties and bias ---


def test_token_counts_hold_each_token_once_with_its_count_in_the_output() -> None:
    prompt, output = [5, 9, 5, 1], [9, 7, 7, 7, *range(100, 140), 100]
    counts = TokenCounts(prompt, output[:2])
    for token in output[2:]:
        counts.add(token)
    held = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert held == {5: 0, 1: 0, **Counter(output)}
    assert TokenCounts([], [4]).ids.tolist() == [4]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_repetition_penalty_and_bias_equal_those_of_transformers(penalty: float, temperature: float) -> None:
    prompt, output, vocab = [1, 1, 2, 30, 31], [31, 40, 41, 40], 60
    bias = {2: 4.0, 40: -3.0, 50: 2.0, 51: -100.0}
    sampling = SamplingParams(temperature=temperature, repetition_penalty=penalty, logit_bias=bias)
    rows, logits = rows_of(sampling, 300, counts=TokenCounts(prompt, output)), random_logits(300, vocab)
    if temperature:
        wanted = drawn_by_transformers(logits, rows, tokens=prompt + output)
    else:
        chain = processors(SamplingParams(repetition_penalty=penalty, logit_bias=bias))
        wanted = chain(torch.tensor([prompt + output] * 300), logits.clone()).argmax(-1)
    assert (sample(logits, rows) == wanted).sum() >= 299


def test_presence_and_frequency_penalties_look_at_the_output_only() -> None:
    prompt, output, vocab = [1, 1, 2, 30], [30, 40, 41, 40, 40], 50
    sampling = SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=1.1)
    logits = random_logits(300, vocab)
    wanted = logits.clone()
    for token, count in Counter(output).items():
        wanted[:, token] -= 0.7 + 1.1 * count
    assert (wanted.argmax(-1) != logits.argmax(-1)).any()
    rows = rows_of(sampling, 300, counts=TokenCounts(prompt, output))
    assert sample(logits, rows).tolist() == wanted.argmax(-1).tolist()


def test_a_banned_token_and_a_forced_one() -> None:
    logits = random_logits(100, 50)
    assert set(sample(logits, rows_of(SamplingParams(logit_bias={7: 100.0}), 100)).tolist()) == {7}
    best = int(logits[0].argmax())
    assert sample(logits[:1], rows_of(SamplingParams(temperature=0, logit_bias={best: -100.0}), 1)).tolist() != [best]


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(2, 300)
    before = logits.clone()
    sampling = SamplingParams(logit_bias={1: 5.0}, repetition_penalty=2.0, temperature=0.5, top_k=3)
    sample(logits, rows_of(sampling, 2, counts=TokenCounts([1, 2], [3])))
    assert torch.equal(logits, before)


# --- randomness ---


@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.5}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("vocab", [30, 700])
def test_tokens_are_as_frequent_as_they_are_likely(wanted: Mapping[str, Any], vocab: int) -> None:
    rows = rows_of(SamplingParams(**wanted), 20_000, seed=42)
    logits = random_logits(1, vocab, scale=1.5)
    tokens = torch.cat([sample(logits.expand(2000, -1), rows[i : i + 2000]) for i in range(0, 20_000, 2000)])
    chances = processors(rows[0].sampling)(torch.zeros(1, 1, dtype=torch.int64), logits.clone()).softmax(-1)[0]
    assert (chances[tokens] > 0).all()
    assert chi_square_excess(tokens, chances) < 5


def test_times_are_those_of_a_slow_twin() -> None:
    rows = [SampleRow(SamplingParams(), seed=seed, position=i) for i, seed in enumerate([0, 1, 2**63, -(2**70), 7])]
    found = exponential_noise([(row.seed, row.position) for row in rows], torch.arange(500)[None])
    torch.testing.assert_close(found, torch.stack([slow_times(row, 500) for row in rows]), rtol=1e-14, atol=0)
    some = torch.tensor([[3, 499, 0]] * len(rows))
    assert torch.equal(exponential_noise([(row.seed, row.position) for row in rows], some), found[:, some[0]])


@pytest.mark.parametrize(
    "seeds", [[(7, i) for i in range(2000)], [(i, 7) for i in range(2000)]], ids=["places", "seeds"]
)
def test_times_are_exponential_and_do_not_depend_on_each_other(seeds: list[tuple[int, int]]) -> None:
    times = exponential_noise(seeds, torch.arange(10)[None])
    cells = (torch.exp(-times) * 8).long()  # even, if the times are exponential
    assert cells.min() >= 0 and cells.max() < 8
    assert chi_square_excess(cells.flatten(), torch.full((8,), 1 / 8)) < 5
    for first, second in ((cells[:-1], cells[1:]), (cells[:, :-1], cells[:, 1:])):  # neighbours of either kind
        assert chi_square_excess((first * 8 + second).flatten(), torch.full((64,), 1 / 64)) < 5


def test_times_stay_what_they_are_from_release_to_release() -> None:
    (found,) = exponential_noise([(1, 23)], torch.tensor([[0, 1, 151_000]])).tolist()
    assert found == pytest.approx([3.5096350372786964, 0.8348045305214322, 0.39748270254071755], rel=1e-14)


@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_models_that_nearly_agree_mostly_draw_the_same(wanted: Mapping[str, Any], noise: float) -> None:
    rows = rows_of(SamplingParams(**wanted), 3000, seed=3)
    logits = random_logits(1, 700).expand(3000, -1)
    other = logits + noise * random_logits(1, 700, scale=1.0, seed=9)
    chances, others = (
        processors(rows[0].sampling)(torch.zeros(1, 1, dtype=torch.int64), x[:1].clone()).softmax(-1)[0]
        for x in (logits, other)
    )
    shared = float(torch.minimum(chances, others).sum())  # no two ways of drawing from both agree more often
    equal = float((sample(logits, rows) == sample(other, rows)).double().mean())
    assert shared / (2 - shared) - 0.03 < equal < shared + 0.03


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    vocab = 2000
    logits = torch.cat(
        (random_logits(30, vocab), random_logits(30, vocab, scale=0.1, seed=1))
    )  # the last ones sort all
    mixed = [
        SampleRow(
            SamplingParams(**FILTERS[i % len(FILTERS)], logit_bias={i: 1.0} if i % 7 == 0 else {})
            if i % 5 else SamplingParams(temperature=0, repetition_penalty=1.5),
            seed=i, position=3 * i, token_counts=TokenCounts(range(i)),
        )
        for i in range(60)
    ]  # fmt: skip
    together = sample(logits, mixed)
    alone = [sample(logits[i : i + 1], [mixed[i]]).item() for i in range(60)]
    assert together.tolist() == alone
    order = np.random.default_rng(0).permutation(60)
    assert sample(logits[torch.from_numpy(order)], [mixed[i] for i in order]).tolist() == together[order].tolist()


def test_different_seeds_and_positions_give_different_tokens() -> None:
    logits = torch.zeros(100, 50_000)
    assert len(set(sample(logits, rows_of(SamplingParams(), 100)).tolist())) > 90
    seeds = [SampleRow(SamplingParams(), seed=i, position=0) for i in range(100)]
    assert len(set(sample(logits, seeds).tolist())) > 90


def test_nothing_to_sample_gives_no_tokens() -> None:
    assert sample(torch.empty(0, 50), []).tolist() == []


# --- logprobs ---


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_are_those_of_the_raw_distribution(num_top: int) -> None:
    logits, tokens = random_logits(6, 500, scale=8.0), torch.tensor([0, 1, 499, 3, 250, 77])
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    found = logprobs(logits, tokens, num_top=num_top)
    assert found.token.dtype == found.top.dtype == torch.float32
    assert found.top_ids.dtype == torch.int64
    assert found.top_ids.shape == found.top.shape == (6, num_top)
    np.testing.assert_allclose(found.token, exact[np.arange(6), tokens], rtol=0, atol=1e-5)
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :num_top]
    assert found.top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(found.top, np.take_along_axis(exact, order, -1), rtol=0, atol=1e-5)


def test_equal_alternatives_come_by_token_id() -> None:
    logits = torch.zeros(1, 400)
    logits[0, [9, 5, 300]] = 1.0
    found = logprobs(logits, torch.tensor([5]), num_top=3)
    assert found.top_ids.tolist() == [[5, 9, 300]]
    assert found.top[0].tolist() == [found.token.item()] * 3
