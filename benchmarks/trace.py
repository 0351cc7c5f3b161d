"""Traces of conversations: whole prefix trees of one, scaled down, and what a cache can reuse of them.

A trace has one JSON object per line, in the format of the Mooncake traces:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

hash_ids name the blocks of 512 tokens of a prompt, the last of which may be shorter. Prompts that begin with the same
ids begin with the same tokens:

    request 0   [ 0 ][ 1 ][ 2 ]              0 - 1 - 2        a group is a whole tree below a block, so that what
    request 1   [ 0 ][ 1 ][ 3 ]                 ` 3           requests share is kept, and the share of requests that
    request 2   [ 0 ][ 4 ]                   ` 4              share nothing too
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TRACE_BLOCK = 512
"""Tokens per block in the traces."""


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        time_s: of its arrival.
        prompt_len, output_len: tokens.
        blocks: ids of the prompt's blocks.
    """

    time_s: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A request that can be sent.

    Attributes:
        time_s: of its arrival, from the first one's.
        tokens: ids of the prompt.
        output_len: tokens to generate.
    """

    time_s: float
    tokens: tuple[int, ...]
    output_len: int


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a file, in its order.

    Raises:
        ValueError: a line is not of the format; the message has its number.
    """
    with path.open(encoding="utf-8") as lines:
        return [
            _read_line(line, where=f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()
        ]


def _read_line(line: str, *, where: str) -> TraceRequest:
    try:
        entry = json.loads(line)
        request = TraceRequest(
            time_s=entry["timestamp"] / 1000,
            prompt_len=entry["input_length"],
            output_len=entry["output_length"],
            blocks=tuple(entry["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as cause:
        raise ValueError(f"{where} is no request of a trace: {cause!r}") from cause
    if len(request.blocks) != -(-request.prompt_len // TRACE_BLOCK):
        raise ValueError(f"{where}: {request.prompt_len} tokens are not {len(request.blocks)} blocks of {TRACE_BLOCK}")
    return request


def synthetic_trace(num_requests: int, *, seed: int = 0) -> list[TraceRequest]:
    """Conversations of one to six turns below four system prompts, for when there is no file.

    Each turn's prompt is the one before with its answer and a new question below.
    """
    draw = random.Random(seed)
    ids = iter(range(10**9))
    systems = [tuple(next(ids) for _ in range(draw.randint(1, 6))) for _ in range(4)]
    requests: list[TraceRequest] = []
    start_s = 0.0
    while len(requests) < num_requests:
        start_s += draw.expovariate(1.0)
        blocks, time_s = draw.choice(systems), start_s
        for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
            blocks += tuple(next(ids) for _ in range(draw.randint(1, 12)))
            last_len = draw.randint(1, TRACE_BLOCK)
            output_len = draw.randint(50, 700)
            requests.append(TraceRequest(time_s, (len(blocks) - 1) * TRACE_BLOCK + last_len, output_len, blocks))
            # The block that was not full is another one in the next turn.
            blocks, time_s = blocks[:-1], time_s + draw.uniform(5, 60)
    return sorted(requests[:num_requests], key=lambda request: request.time_s)


def prefix_groups(requests: Sequence[TraceRequest], *, most: int) -> list[list[TraceRequest]]:
    """Divide a trace into whole prefix trees of at most `most` requests, as large as that allows."""
    groups: list[list[TraceRequest]] = []
    open_groups = [(0, list(requests))]
    while open_groups:
        depth, group = open_groups.pop()
        if depth and len(group) <= most:
            groups.append(group)
            continue
        children: dict[int, list[TraceRequest]] = {}
        for request in group:
            if len(request.blocks) <= depth:
                groups.append([request])  # a prompt that is itself the root of a tree that is too large
            else:
                children.setdefault(request.blocks[depth], []).append(request)
        open_groups += [(depth + 1, child) for child in children.values()]
    return groups


def choose(requests: Sequence[TraceRequest], *, count: int, seed: int = 0) -> list[TraceRequest]:
    """About `count` requests: whole prefix trees at random, each request being as likely as any other.

    Args:
        requests: of a trace.
        count: to stop at; the last tree may bring up to a quarter more, and only a tree larger than that is divided.
        seed: of the choice.
    """
    groups = prefix_groups(requests, most=max(1, count // 4))
    random.Random(seed).shuffle(groups)
    chosen: list[TraceRequest] = []
    for group in groups:
        if len(chosen) >= count:
            break
        chosen += group
    return sorted(chosen, key=lambda request: request.time_s)


def scale(request: TraceRequest, *, block_tokens: int) -> TraceRequest:
    """The same request with blocks of `block_tokens` tokens, and an output that is shorter by the same factor."""
    full, rest = divmod(request.prompt_len, TRACE_BLOCK)
    tail = -(-rest * block_tokens // TRACE_BLOCK)
    output_len = max(1, round(request.output_len * block_tokens / TRACE_BLOCK))
    return replace(request, prompt_len=full * block_tokens + tail, output_len=output_len)


def expand(requests: Iterable[TraceRequest], *, block_tokens: int, token_ids: Sequence[int]) -> list[Prompt]:
    """Scale requests and give their blocks tokens: the same id, the same tokens, in every run.

    Args:
        requests: as in the trace.
        block_tokens: length of a block.
        token_ids: to draw from; without the special ones.
    """
    prompts = []
    for request in requests:
        scaled = scale(request, block_tokens=block_tokens)
        tokens = [token for block in request.blocks for token in block_of(block, block_tokens, token_ids)]
        prompts.append(Prompt(scaled.time_s, tuple(tokens[: scaled.prompt_len]), scaled.output_len))
    start_s = min((prompt.time_s for prompt in prompts), default=0.0)
    return [replace(prompt, time_s=prompt.time_s - start_s) for prompt in prompts]


def block_of(block_id: int, count: int, token_ids: Sequence[int]) -> list[int]:
    """Tokens of a block."""
    return random.Random(block_id).choices(token_ids, k=count)


def reusable(prompts: Iterable[Sequence[int]], *, page_size: int) -> Iterator[int]:
    """Per prompt, the tokens that a cache without bounds reuses of the prompts before it.

    Whole pages of the longest common prefix, with at least one token left to compute. Outputs are not counted: those of
    a replay are not those of the trace.
    """
    # A node is the number of a known prefix of whole pages; its children are found by the next page's tokens.
    children: dict[tuple[int, tuple[int, ...]], int] = {}
    for prompt in prompts:
        node, hit_len, is_known = 0, 0, True
        for start in range(0, len(prompt) - page_size + 1, page_size):
            edge = (node, tuple(prompt[start : start + page_size]))
            is_known = is_known and edge in children
            if is_known and start + page_size < len(prompt):
                hit_len = start + page_size
            node = children.setdefault(edge, len(children) + 1)
        yield hit_len


def bound(prompts: Sequence[Sequence[int]], *, page_size: int) -> float:
    """The share of all prompt tokens that a cache without bounds reuses."""
    return sum(reusable(prompts, page_size=page_size)) / max(1, sum(map(len, prompts)))
