"""What follows a request begins when the engine has it, which does not wait, and sees all of it to the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycache.api.completions_form import CompletionsForm
from raycache.api.defaults import Defaults
from raycache.api.prepare import Choice, Generation, Served, prepare_completion
from raycache.api.run import Follower, answer
from raycache.api.schema import CompletionBody, parse_body
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import QueueFullError
from raycache.observe.metrics import Metrics
from raycache.types import GenerateRequest, RequestOutput
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, run


class Told:
    """What happens, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def take(self, output: RequestOutput) -> None:
        self.events.append("take")

    @contextmanager
    def follow(self, generation: Generation, choice: Choice) -> Iterator[Follower]:
        self.events.append("begin")
        try:
            yield self
        finally:
            self.events.append("end")


class ToldEngine(ScriptedEngine):
    """Says when it gets a request."""

    def __init__(self, tokenizer: Tokenizer, told: Told) -> None:
        super().__init__(tokenizer)
        self._told = told

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._told.events.append("engine")
        async for output in super().generate(request):
            yield output


async def ask(told: Told, folder: Path, *, refusal: QueueFullError | None = None) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(folder))
    engine = ToldEngine(tokenizer, told)
    engine.refusal = refusal
    served = Served.of(Config(), tokenizer=tokenizer, info=await engine.info(), defaults=Defaults())
    body = parse_body(CompletionBody, {"model": "tiny", "prompt": "x", "max_tokens": 3})
    generation = prepare_completion(body, served)
    form = CompletionsForm(generation, tokenizer=tokenizer)
    await answer(engine, generation, form=form, metrics=Metrics("tiny"), follow=[told.follow])


def test_the_engine_has_a_request_before_it_is_followed(tmp_path: Path) -> None:
    told = Told()
    run(ask(told, tmp_path))
    assert told.events == ["engine", "begin", "take", "take", "take", "end"]


def test_a_refused_request_is_followed_to_its_end(tmp_path: Path) -> None:
    told = Told()
    with pytest.raises(QueueFullError):
        run(ask(told, tmp_path, refusal=QueueFullError(8, 1.0)))
    assert told.events == ["engine", "begin", "end"]
