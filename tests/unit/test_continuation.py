"""A request that goes on after tokens that another engine gave it, as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from raycache.errors import RequestError
from raycache.llm import LLM
from raycache.types import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level

PROMPT = tuple(range(5, 45))
WHOLE = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = byte_level(make_tiny(tmp_path_factory.mktemp("model"), vocab_size=403, num_hidden_layers=2))
    with LLM(str(model), device="cpu", page_size=8, num_pages=100) as made:
        yield made


def run(llm: LLM, request: GenerateRequest) -> list[RequestOutput]:
    llm._engine.add(request)
    outputs: list[RequestOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += [output for output in llm._engine.step() if output.request_id == request.request_id]
    llm.check()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


@pytest.mark.parametrize("done", [1, 9, 23])
@pytest.mark.parametrize(
    "sampling",
    [
        replace(WHOLE, temperature=0.0),
        replace(WHOLE, temperature=1.3, seed=11),
        replace(WHOLE, temperature=1.3, seed=11, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5),
        replace(WHOLE, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1),
    ],
)
def test_it_continues_at_the_same_position_with_the_same_length(llm: LLM, sampling: SamplingParams, done: int) -> None:
    whole = run(llm, GenerateRequest("whole", PROMPT, sampling))
    rest = run(llm, GenerateRequest("rest", PROMPT, sampling, output=tokens_of(whole)[:done]))
    assert tokens_of(whole)[:done] + tokens_of(rest) == tokens_of(whole)
    assert rest[-1].finish_reason is FinishReason.LENGTH
    # Told before the first token, and so not again.
    assert all(output.prompt_logprobs is None for output in rest)


def test_its_stop_tokens_are_as_before(llm: LLM) -> None:
    tokens = tokens_of(run(llm, GenerateRequest("whole", PROMPT, replace(WHOLE, temperature=0.0))))
    stop = next(place for place, token in enumerate(tokens) if place > 3 and token not in tokens[:place])
    stopping = replace(WHOLE, temperature=0.0, stop_token_ids=(tokens[stop],))
    rest = run(llm, GenerateRequest("rest", PROMPT, stopping, output=tokens[:3]))
    assert tokens_of(rest) == tokens[3 : stop + 1] and rest[-1].finish_reason is FinishReason.STOP


def test_one_that_has_everything_already_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="has reached its limit"):
        run(llm, GenerateRequest("full", PROMPT, replace(WHOLE, max_tokens=2), output=(7, 8)))
