"""What clients of a server see: a published shape with drawn weights, token ids over HTTP, streamed.

    python -m benchmarks.served_shape --only stream,long
    python -m benchmarks.served_shape --shape nemotron-3-nano -- --tp 2
    python -m benchmarks.served_shape --device cpu --tiny        whether it runs, in a minute

Flags behind `--` go to `raycache launch`. Kinds of lines:

    stream      one stream behind 1,024 tokens: between tokens, and the first token
    long        65,536 new tokens, and 48 new ones behind 65,536 cached ones: the first token
    streams     64 streams, and 256, each of 1,024 tokens in and 256 out: tokens per second, between tokens
    mixed       32 streams, beside which two prompts of 24,576 tokens come, and then three of 1,024: between tokens of
                the streams while prompts are computed, and the first tokens of the prompts
    chats       64 chats of six turns, 32 at a time: tokens per second, and the first token
    documents   48 documents of 8,192 tokens twice, with a device pool for a third of them and a host tier for all: the
                second round in turns of eight
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.client import Reply, complete
from benchmarks.figures import percentile, write_json
from benchmarks.model_shape import SHAPES, ModelShape
from benchmarks.server import launched, status
from benchmarks.trace import Prompt

_KINDS = ("stream", "long", "streams", "mixed", "chats", "documents")
_PAGE_SIZE = 64
_ROUNDS = 5
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    """Tokens and requests of each kind of line."""

    context: int = 1024
    output: int = 256
    long: int = 65_536
    new: int = 48
    streams: tuple[int, ...] = (64, 256)
    mixed: int = 32
    mixed_output: int = 600
    mixed_long: int = 24_576
    mixed_apart_s: float = 0.3
    chats: int = 64
    chats_at_once: int = 32
    turns: int = 6
    question: int = 256
    answer: int = 128
    documents: int = 48
    document: int = 8192
    documents_at_once: int = 8

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with room for what follows a prompt."""
        chat = self.context + self.turns * (self.question + self.answer)
        alone = max(self.output, self.mixed_output)
        return max(self.long + self.new, self.mixed_long, self.context + alone, chat, self.document + self.new) + 64

    @property
    def document_pages(self) -> int:
        """Pages of all documents, with their questions."""
        return self.documents * -(-(self.document + 2 * self.new) // _PAGE_SIZE)


_TINY = Sizes(
    context=96, output=8, long=512, new=8, streams=(2, 4), mixed=2, mixed_output=60, mixed_long=256, chats=3,
    chats_at_once=2, turns=2, question=16, answer=6, documents=6, document=192, documents_at_once=2,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A figure.

    Attributes:
        what: was measured.
        value: in `unit`.
    """

    what: str
    value: float
    unit: str


class Load:
    """Requests of random tokens against one server.

    Args:
        endpoint: of the server.
        model: name that it knows.
        vocab_size: ids are drawn below it.
    """

    def __init__(self, endpoint: str, model: str, *, vocab_size: int, sizes: Sizes) -> None:
        self._endpoint, self._model, self._vocab_size, self._sizes = endpoint, model, vocab_size, sizes
        self._random = random.Random(0)

    async def stream(self) -> AsyncIterator[Line]:
        """One stream."""
        sizes = self._sizes
        replies = [await self._ask(self._draw(sizes.context), sizes.output) for _ in range(1 + _ROUNDS)][1:]
        gaps = statistics.median(gap for reply in replies for gap in reply.gaps_s)
        yield Line(f"one stream after {sizes.context:,} tokens: between tokens", 1e3 * gaps, "ms")
        yield Line(f"one stream after {sizes.context:,} tokens: first token", _first_ms(replies), "ms")

    async def long(self) -> AsyncIterator[Line]:
        """A long prompt, and hits behind it."""
        sizes = self._sizes
        for _ in range(2):  # the first one is for what is compiled and allocated once
            prefix = self._draw(sizes.long)
            reply = await self._ask(prefix, 1, has_ids=False)
        yield Line(f"{sizes.long:,} new tokens: first token", _first_ms([reply]), "ms")
        hits = [await self._ask([*prefix, *self._draw(sizes.new)], 1, has_ids=False) for _ in range(1 + _ROUNDS)][1:]
        for hit in hits:
            if hit.cached_tokens < sizes.long - 2 * _PAGE_SIZE:
                raise RuntimeError(f"{hit.cached_tokens} tokens of {sizes.long} came from the cache")
        yield Line(f"{sizes.long:,} cached, {sizes.new} new: first token", _first_ms(hits), "ms")

    async def streams(self) -> AsyncIterator[Line]:
        """Streams that begin together."""
        sizes = self._sizes
        for count in sizes.streams:
            prompts = [self._draw(sizes.context) for _ in range(count)]
            begin_s = time.perf_counter()
            replies = await self._together(prompts, sizes.output)
            seconds = time.perf_counter() - begin_s
            name = f"{count} streams, {sizes.context:,} in, {sizes.output} out"
            yield Line(f"{name}: tokens per second", count * sizes.output / seconds, "1/s")
            yield Line(f"{name}: mean time between tokens", _between_tokens_ms(replies), "ms")

    async def mixed(self) -> AsyncIterator[Line]:
        """Prompts that come while others are answered."""
        sizes = self._sizes
        begun = [await self._ask(self._draw(sizes.context), 1) for _ in range(2)]  # how long a prompt takes
        prompts = [self._draw(sizes.context) for _ in range(sizes.mixed)]
        running = asyncio.ensure_future(self._together(prompts, sizes.mixed_output))
        await asyncio.sleep(sizes.mixed * begun[-1].first_token_s)
        coming = [asyncio.ensure_future(self._ask(self._draw(sizes.mixed_long), 2)) for _ in range(2)]
        for _ in range(3):
            await asyncio.sleep(sizes.mixed_apart_s)
            coming.append(asyncio.ensure_future(self._ask(self._draw(sizes.context), 2)))
        replies, streams = await asyncio.gather(*coming), await running
        begin_s = min(reply.start_s for reply in replies)
        end_s = max(reply.token_times_s[0] for reply in replies)
        gaps = [
            after - before
            for stream in streams
            for before, after in zip(stream.token_times_s, stream.token_times_s[1:], strict=False)
            if begin_s < after <= end_s
        ]
        name = f"{sizes.mixed} streams beside prompts"
        for percent in (50, 99):
            yield Line(f"{name}: between tokens, p{percent}", 1e3 * percentile(gaps, percent), "ms")
        yield Line(f"{name}: first token of {sizes.mixed_long:,} new ones", _first_ms(replies[:2]), "ms")
        yield Line(f"{name}: first token of {sizes.context:,} new ones behind them", _first_ms(replies[2:]), "ms")
        yield Line(f"{name}: all first tokens", end_s - begin_s, "s")

    async def chats(self) -> AsyncIterator[Line]:
        """Conversations whose prompts grow by answers and questions."""
        sizes, slots = self._sizes, asyncio.Semaphore(self._sizes.chats_at_once)
        firsts: list[float] = []

        async def chat() -> None:
            text = self._draw(sizes.context)
            async with slots:
                for _ in range(sizes.turns):
                    reply = await self._ask(text, sizes.answer)
                    firsts.append(1e3 * reply.first_token_s)
                    text = [*text, *reply.tokens, *self._draw(sizes.question)]

        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(sizes.chats):
                group.create_task(chat())
        seconds = time.perf_counter() - begin_s
        name = f"{sizes.chats} chats of {sizes.turns} turns, {sizes.chats_at_once} at a time"
        yield Line(f"{name}: tokens per second", sizes.chats * sizes.turns * sizes.answer / seconds, "1/s")
        for percent in (50, 99):
            yield Line(f"{name}: first token, p{percent}", percentile(firsts, percent), "ms")

    async def documents(self) -> AsyncIterator[Line]:
        """Two rounds over documents."""
        sizes, slots = self._sizes, asyncio.Semaphore(self._sizes.documents_at_once)
        documents = [self._draw(sizes.document) for _ in range(sizes.documents)]

        async def ask(document: list[int]) -> Reply:
            async with slots:
                return await self._ask([*document, *self._draw(sizes.new)], 8)

        for number in (1, 2):
            begin_s = time.perf_counter()
            replies = await asyncio.gather(*(ask(document) for document in documents))
            seconds = time.perf_counter() - begin_s
            share = sum(reply.cached_tokens for reply in replies) / sum(reply.prompt_tokens for reply in replies)
            name = f"{sizes.documents} documents of {sizes.document:,}, round {number}, {share:.0%} cached"
            yield Line(name, seconds, "s")
            yield Line(f"{name}: first token", _first_ms(replies), "ms")

    def _draw(self, count: int) -> list[int]:
        return self._random.choices(range(3, self._vocab_size), k=count)

    async def _ask(self, tokens: list[int], output: int, *, has_ids: bool = True) -> Reply:
        """Send a request. With ids, the first event repeats those of the prompt, which takes time for long ones."""
        prompt, more = Prompt(0.0, tuple(tokens), output), {"return_token_ids": has_ids}
        return await complete(self._endpoint, prompt, model=self._model, timeout_s=_TIMEOUT_S, more=more)

    async def _together(self, prompts: Sequence[list[int]], output: int) -> list[Reply]:
        return await asyncio.gather(*(self._ask(prompt, output) for prompt in prompts))


def _first_ms(replies: Sequence[Reply]) -> float:
    return 1e3 * statistics.median(reply.first_token_s for reply in replies)


def _between_tokens_ms(replies: Sequence[Reply]) -> float:
    """Mean time between tokens of a stream while all of them run; the median of all streams.

    Not the median of single times: a server that is behind sends several tokens at a time.
    """
    begin_s, end_s = max(reply.token_times_s[0] for reply in replies), min(reply.token_times_s[-1] for reply in replies)
    means = []
    for reply in replies:
        times = [time_s for time_s in reply.token_times_s if begin_s <= time_s <= end_s]
        if len(times) > 1:
            means.append((times[-1] - times[0]) / (len(times) - 1))
    return 1e3 * statistics.median(means) if means else math.nan


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server per pool size, measure, print."""
    options, flags = _options(argv)
    sizes = _TINY if options.tiny else Sizes()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelShape.make(
            options.shape,
            Path(folder),
            layers=options.layers or (2 if options.tiny else 0),
            is_tiny=options.tiny,
            dtype=torch.bfloat16 if options.device == "cuda" else torch.float32,
            device_type=options.device,
        )
        base = [
            *("--dummy-weights", "--device", options.device, "--page-size", str(_PAGE_SIZE)),
            *("--max-model-len", str(sizes.longest), "--max-running", str(max(sizes.streams))),
            *flags,
        ]
        if options.tiny:
            base += ["--num-pages", "64"]
        for kinds, more in _servers(options.only, sizes, host_memory=options.host_memory):
            with launched(str(shape.model_dir), *base, *more) as endpoint:
                name = shape.model_dir.name
                print(f"{name}: {status(endpoint)['num_pages']} pages; {' '.join([*flags, *more])}", flush=True)
                load = Load(endpoint, name, vocab_size=shape.model.vocab_size, sizes=sizes)
                for kind in kinds:
                    lines += asyncio.run(_printed(getattr(load, kind)()))
    if options.json:
        write_json(options.json, {"shape": options.shape, "flags": flags, "lines": [asdict(line) for line in lines]})
    return 0


def _servers(only: Sequence[str], sizes: Sizes, *, host_memory: str) -> list[tuple[list[str], list[str]]]:
    """Kinds of lines that share a server, and its flags."""
    found: list[tuple[list[str], list[str]]] = []
    if most := [kind for kind in _KINDS if kind in only and kind != "documents"]:
        found.append((most, []))
    if "documents" in only:
        pages = sizes.document_pages // 3
        found.append((["documents"], ["--num-pages", str(pages), "--host-memory", host_memory]))
    return found


async def _printed(lines: AsyncIterator[Line]) -> list[Line]:
    found = []
    async for line in lines:
        print(f"{line.what:74}{line.value:12,.2f} {line.unit}", flush=True)
        found.append(line)
    return found


def _options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    given = list(sys.argv[1:] if argv is None else argv)
    given, flags = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served_shape",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = sorted(path.stem for path in SHAPES.glob("*.json"))
    parser.add_argument("--shape", choices=names, default="qwen3-8b", help="(default: %(default)s)")
    parser.add_argument("--only", default=",".join(_KINDS), help="kinds of lines (default: all)")
    parser.add_argument("--layers", type=int, default=0, help="first ones that are kept; 0: all")
    parser.add_argument("--host-memory", default="64GiB", help="of documents (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shrink the shape and the work, to see whether it runs")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    options = parser.parse_args(given)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(_KINDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(_KINDS)}")
    if options.tiny:
        options.host_memory = "64MiB"
    return options, flags


if __name__ == "__main__":
    sys.exit(main())
