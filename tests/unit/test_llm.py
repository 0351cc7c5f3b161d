"""A model in this process against transformers on the same random weights."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raycache.errors import CheckpointError, ConfigError, EngineStoppedError, PromptTooLongError, RequestError
from raycache.llm import LLM
from raycache.types import FinishReason, SamplingParams
from tests.oracle.tiny import make_tiny, oracle_logits
from tests.oracle.tiny_tokenizers import byte_level

VOCAB = 403  # of the tokenizer, which has fewer tokens, and no multiple of anything
NUM_NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
LENGTHS = (1, 7, 8, 9, 40, 130)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_tiny(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, num_hidden_layers=2))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NUM_NEW):
                tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tuple(tokens[len(prompt) :]))
    return found


def load(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"device": "cpu", "page_size": 8, "num_pages": 200, **settings})


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    made = load(model)
    yield made
    # Increments of what a failed call left behind are taken by the next one.
    made.generate([[1]], SamplingParams(max_tokens=1))
    made.check()
    assert made.stats().pages_in_use == made.stats().pages_locked == 0
    made.close()


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(prompts, sampling)]


# --- greedy -----------------------------------------------------------------------------------------------------------


def test_one_by_one_equals_transformers_cold_and_from_the_cache(
    llm: LLM, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    for prompt, right in zip(prompts, expected, strict=True):
        (cold,) = llm.generate([prompt], GREEDY)
        (warm,) = llm.generate([prompt], GREEDY)
        assert cold.token_ids == warm.token_ids == right
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == (len(prompt) - 1) // 8 * 8
        assert warm.prompt_token_ids == tuple(prompt)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_step_tokens": 16},
        {"max_step_tokens": 1},
        {"max_running": 2},
        {"prefix_cache": False},
        {"num_pages": 20},
        {"page_size": 1, "num_pages": 600},
        {"page_size": 64},
    ],
    ids=str,
)
def test_a_batch_equals_transformers(
    model: Path, prompts: list[list[int]], expected: list[tuple[int, ...]], settings: dict[str, Any]
) -> None:
    with load(model, **settings) as llm:
        for _ in range(2):
            assert tokens_of(llm, prompts) == expected
            llm.check()


def test_tokens_are_the_same_under_preemption(model: Path, prompts: list[list[int]]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with load(model) as llm:
        right = tokens_of(llm, prompts[:5], sampling)
    with load(model, num_pages=16) as llm:
        assert tokens_of(llm, prompts[:5], sampling) == right
        assert llm.stats().preemptions > 0
        llm.check()


def test_a_prefix_that_ends_inside_a_page_is_reused_up_to_that_page(llm: LLM, prompts: list[list[int]]) -> None:
    llm.generate([prompts[-1]], GREEDY)
    longer = [*prompts[-1][:101], 5, 6, 7]
    with_cache = llm.generate([longer], GREEDY)[0]
    assert with_cache.cached_tokens == 96
    assert with_cache.token_ids == llm.generate([longer], GREEDY)[0].token_ids


# --- text -------------------------------------------------------------------------------------------------------------


def test_text_prompts_are_encoded_and_answers_decoded(llm: LLM) -> None:
    text = "The quick brown fox"
    (completion,) = llm.generate([text], GREEDY)
    assert completion.prompt_token_ids == tuple(llm.tokenizer.encode(text, add_special_tokens=True))
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.finish_reason is FinishReason.LENGTH


def test_chat_renders_the_template_and_answers(llm: LLM) -> None:
    (answer,) = llm.chat([[{"role": "user", "content": "one two"}]], GREEDY)
    rendered = "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids == tuple(llm.tokenizer.encode(rendered, add_special_tokens=False))
    assert answer.token_ids == llm.generate([answer.prompt_token_ids], GREEDY)[0].token_ids


def test_a_single_conversation_gets_a_list_of_one_answer(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "one two"}]
    (single,) = llm.chat(conversation, GREEDY)
    (listed,) = llm.chat([conversation], GREEDY)
    assert (single.prompt_token_ids, single.token_ids) == (listed.prompt_token_ids, listed.token_ids)
    with pytest.raises(RequestError, match="one list of messages, or a list"):
        llm.chat([*conversation, conversation], GREEDY)
    with pytest.raises(RequestError, match="must be an object"):
        llm.chat(["one two"], GREEDY)  # type: ignore[list-item]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(["one two three"], GREEDY)
    stop = whole.text[3:5]
    (cut,) = llm.generate(
        ["one two three"], SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, stop=(stop,))
    )
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_a_stop_token_ends_the_output_and_is_its_last_token(llm: LLM, prompts: list[list[int]]) -> None:
    (whole,) = tokens_of(llm, [prompts[4]])
    stop = whole[5]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, stop_token_ids=(stop,))
    (cut,) = llm.generate([prompts[4]], sampling)
    assert cut.token_ids == whole[: whole.index(stop) + 1]
    assert cut.finish_reason is FinishReason.STOP


def test_an_output_ends_at_the_context_length(model: Path) -> None:
    with load(model, max_model_len=20) as llm:
        (completion,) = llm.generate([[3] * 15], SamplingParams(temperature=0.0, ignore_eos=True))
        assert len(completion.token_ids) == 5
        assert completion.finish_reason is FinishReason.LENGTH


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model: Path, prompts: list[list[int]]) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=NUM_NEW, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True)
    with load(model) as llm:
        (alone,) = tokens_of(llm, [prompts[4]], seeded)
        mixed = llm.generate(prompts, [seeded if prompt is prompts[4] else free for prompt in prompts])
        assert mixed[4].token_ids == alone
        assert tokens_of(llm, [prompts[4]], seeded) == [alone]
    # Preempted again and again, and in chunks.
    with load(model, num_pages=20, max_step_tokens=16) as llm:
        mixed = llm.generate([*prompts, prompts[4]], [*[free] * len(prompts), seeded])
        assert mixed[-1].token_ids == alone


def test_another_seed_or_none_gives_other_tokens(llm: LLM, prompts: list[list[int]]) -> None:
    def sample(seed: int | None) -> tuple[int, ...]:
        return tokens_of(llm, [prompts[4]], SamplingParams(seed=seed, max_tokens=NUM_NEW, ignore_eos=True))[0]

    assert len({sample(1), sample(2), sample(None), sample(None)}) == 4


def test_each_prompt_has_its_own_sampling(llm: LLM, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    found = llm.generate(prompts[:2], [GREEDY, short])
    assert [completion.token_ids for completion in found] == [expected[0], expected[1][:2]]


def test_logit_bias_bans_and_forces(llm: LLM, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    first = expected[4][0]
    (banned,) = tokens_of(llm, [prompts[4]], SamplingParams(temperature=0.0, max_tokens=4, logit_bias={first: -100}))
    assert first not in banned
    forced = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={77: 100})
    assert tokens_of(llm, [prompts[4]], forced) == [(77,) * 4]


@pytest.mark.parametrize("num_pages", [200, 8])
def test_a_frequency_penalty_makes_every_token_new(model: Path, num_pages: int) -> None:
    # Twice as likely as all others until it is used; then less likely than all others.
    base = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    bias = {token: 90.0 for token in range(100, 140)}
    with load(model, num_pages=num_pages) as llm:
        (plain,) = llm.generate([[5] * 12], SamplingParams(**base, logit_bias=bias))
        sampling = SamplingParams(**base, logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0)
        first, second = llm.generate([[5] * 12, [6] * 12], sampling)
        for completion in (first, second):
            assert set(completion.token_ids) <= set(range(100, 140))
            assert len(set(completion.token_ids)) > len(set(plain.token_ids))
        assert llm.generate([[5] * 12], sampling)[0].token_ids == first.token_ids


def test_penalties_equal_those_computed_from_the_logits_of_transformers(model: Path) -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=10,
        ignore_eos=True,
        repetition_penalty=1.7,
        presence_penalty=0.5,
        frequency_penalty=1.5,
    )
    with load(model, max_step_tokens=3) as llm:
        (found,) = tokens_of(llm, [prompt], sampling)
    tokens = list(prompt)
    for _ in range(10):
        logits = oracle_logits(model, torch.tensor(tokens))[-1]
        output = tokens[len(prompt) :]
        for token in set(tokens):
            logits[token] = logits[token] * 1.7 if logits[token] < 0 else logits[token] / 1.7
        for token in set(output):
            logits[token] -= 0.5 + 1.5 * output.count(token)
        tokens.append(int(logits.argmax()))
    assert found == tuple(tokens[len(prompt) :])


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_step_tokens", ["auto", 7])
def test_logprobs_of_prompt_and_output_equal_transformers(
    model: Path, prompts: list[list[int]], max_step_tokens: int | str
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    with load(model, max_step_tokens=max_step_tokens) as llm:
        for prompt in prompts[:5]:
            for _ in range(2):  # cold, and with the prompt in the cache
                (completion,) = llm.generate([prompt], sampling)
                tokens = [*prompt, *completion.token_ids]
                scores = oracle_logits(model, torch.tensor(tokens)).log_softmax(-1)
                entries = [*completion.prompt_logprobs, *completion.logprobs]
                assert len(completion.prompt_logprobs) == len(prompt) and len(completion.logprobs) == 6
                assert entries[0] is None
                for position, entry in enumerate(entries[1:], start=1):
                    assert entry is not None and entry.token_id == tokens[position]
                    right = scores[position - 1]
                    assert entry.logprob == pytest.approx(float(right[tokens[position]]), abs=1e-4)
                    values, ids = right.topk(2 if position < len(prompt) else 3)
                    assert [token_id for token_id, _ in entry.top] == ids.tolist()
                    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_without_the_wish_there_are_no_logprobs(llm: LLM) -> None:
    asked, plain = llm.generate(
        [[5, 6], [7, 8]], [SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True), SamplingParams(max_tokens=2)]
    )
    assert [entry.top for entry in asked.logprobs] == [(), ()]
    assert plain.logprobs == plain.prompt_logprobs == ()


# --- what cannot work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ([], RequestError, "empty"),
        ("", RequestError, "empty"),
        ([VOCAB], RequestError, "vocabulary"),
        ([-1], RequestError, "vocabulary"),
        ([2**31], RequestError, "vocabulary"),
        ([3, 2**64], RequestError, "vocabulary"),
        ([3, 4.0], RequestError, "must be token ids, which are integers"),
        (np.array([3.0]), RequestError, "must be token ids, which are integers"),
        ([[3]], RequestError, "must be token ids, which are integers"),
        ([None], RequestError, "must be token ids, which are integers"),
        ([3] * 200 * 8, PromptTooLongError, "1600 tokens.*at most 1599"),
    ],
    ids=[
        "no token",
        "no text",
        "token beyond the vocabulary",
        "negative token",
        "33 bits",
        "65 bits",
        "fraction",
        "array of fractions",
        "nested",
        "none",
        "longer than the pool",
    ],
)
def test_a_wrong_prompt_is_refused_and_the_others_of_the_call_are_not_run(
    llm: LLM, prompt: Any, error: type[Exception], text: str, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    with pytest.raises(error, match=text):
        llm.generate([prompts[0], prompt], GREEDY)
    assert llm.stats().computed_tokens == 0
    assert tokens_of(llm, prompts) == expected


def test_a_wrong_prompt_does_not_empty_the_cache(llm: LLM, prompts: list[list[int]]) -> None:
    for _ in range(2):
        [found] = llm.generate([prompts[-1]], GREEDY)
        with pytest.raises(RequestError):
            llm.generate([[1.0]], GREEDY)  # type: ignore[list-item]
    assert found.cached_tokens == 128


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16, tuple], ids=str)
def test_prompts_may_be_arrays(llm: LLM, kind: Any, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    given = [tuple(prompt) if kind is tuple else np.array(prompt, kind) for prompt in prompts]
    found = llm.generate(given, GREEDY)
    assert [each.token_ids for each in found] == expected
    assert [each.prompt_token_ids for each in found] == [tuple(prompt) for prompt in prompts]
    assert {type(token) for each in found for token in each.prompt_token_ids} == {int}


def test_as_many_samplings_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 1 sampling"):
        llm.generate([[1], [2]], [GREEDY])


@pytest.mark.parametrize("prompts", ["one text", [1, 2, 3], np.array([1, 2, 3])], ids=repr)
def test_a_single_prompt_outside_a_list_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="list of prompts"):
        llm.generate(prompts)


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tp": 3}, "tp=3 does not divide num_attention_heads=8"),
        ({"pp": 3}, "pp=3 exceeds num_hidden_layers=2"),
        ({"cp": 3}, "cp=3 does not divide page_size=8"),
        ({"max_model_len": 10**6}, "above the model's 4096 positions"),
        ({"speed": 11}, "unknown setting 'speed'"),
        ({"tp": "2"}, "tp must be a whole number above 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(
    model: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load(model, **settings)


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        load(tmp_path / "nothing")


def test_a_closed_model_takes_no_prompts(model: Path) -> None:
    llm = load(model)
    llm.close()
    llm.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        llm.generate([[1]])


def test_an_interrupted_call_does_not_spoil_the_next(
    llm: LLM, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1400, ignore_eos=True))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert tokens_of(llm, prompts) == expected


def test_a_hybrid_says_which_component_cut_its_hit() -> None:
    document = "".join(chr(33 + (7 * i + i * i) % 90) for i in range(100))
    with load(Path("demos/hybrids/mamba2_gqa"), page_size=16, num_pages=64) as llm:
        cut = [
            (one.cached_tokens, one.cut_by)
            for question in ("aaa" * 20, "bbb" * 20, "ccc" * 20)
            for one in llm.generate([document + question], GREEDY)
        ]
        llm.check()
    assert cut == [(0, ""), (0, "state"), (96, "")]
