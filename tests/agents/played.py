"""An engine that plays a conversation behind the real server: a client's whole loop runs without a model that can.

with playing({"How warm is it in Bern?": call("weather", city="Bern"), "21 degrees": "It has 21 degrees."}) as server:
    client = openai.OpenAI(base_url=f"{server.endpoint}/v1", api_key="none")
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from raycache.api.tokenizer import Tokenizer
from raycache.types import GenerateRequest, RequestOutput
from raycache.vocabulary.grammar_tokens import grammar_tokens
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_port

TEMPLATE = Path(__file__).with_name("chat.jinja")
CONTEXT = 200_000


def call(function: str, /, **arguments: Any) -> str:
    """A call of a function as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': function, 'arguments': arguments})}\n</tool_call>"


class PlayedEngine(ScriptedEngine):
    """Answers a prompt by the cue that comes last in it.

    An answer that the grammar of its request does not allow fails the request, as no engine could have given it.

    Args:
        cues: text of a prompt -> answer.
    """

    def __init__(self, tokenizer: Tokenizer, cues: Mapping[str, str]) -> None:
        super().__init__(tokenizer, context=CONTEXT)
        self._tokenizer = tokenizer
        self._cues = cues
        self.prompts: list[str] = []

    def _outputs(self, request: GenerateRequest) -> Sequence[RequestOutput]:
        prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        self.prompts.append(prompt)
        cue = max(self._cues, key=prompt.rfind)
        assert cue in prompt, f"nothing to answer to {prompt[-500:]!r}"
        self._script = self._tokenizer.encode(self._cues[cue], add_special_tokens=False)
        if grammar := request.sampling.grammar:
            matcher = LLMatcher(self._table, grammar)
            num_allowed = matcher.validate_tokens(self._script)
            allowed = self._tokenizer.decode(self._script[:num_allowed])
            assert num_allowed == len(self._script), f"the grammar ends {self._cues[cue]!r} behind {allowed!r}"
            assert matcher.consume_tokens(self._script) and matcher.is_accepting(), f"{allowed!r} is not complete"
        return super()._outputs(request)

    @cached_property
    def _table(self) -> LLTokenizer:
        return grammar_tokens(
            self._tokenizer.vocabulary, num_logits=self._tokenizer.vocab_size, eos_token_ids=[self._eos]
        )


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        endpoint: such as http://127.0.0.1:4321.
    """

    endpoint: str
    engine: PlayedEngine

    @property
    def prompt(self) -> str:
        """The prompt of the newest request."""
        return self.engine.prompts[-1]


@contextmanager
def playing(cues: Mapping[str, str], **settings: Any) -> Iterator[Server]:
    """Serve on a port of this machine, from a thread of its own, so that clients may block.

    Args:
        cues: text of a prompt -> answer; the one that comes last in the prompt counts.
        settings: of the server.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(tiny_tokenizers.byte_level(Path(folder)))
    engine = PlayedEngine(tokenizer, cues)
    loop = asyncio.new_event_loop()
    endpoint: asyncio.Future[str] = loop.create_future()
    stopping = asyncio.Event()

    async def serve() -> None:
        async with over_port(engine, tokenizer, chat_template=str(TEMPLATE), **settings) as found:
            endpoint.set_result(found)
            await stopping.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        yield Server(asyncio.run_coroutine_threadsafe(asyncio.wait_for(endpoint, 30), loop).result(), engine)
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
