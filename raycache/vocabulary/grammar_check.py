"""Tells what is wrong with grammars, in a process of its own (`api/grammar_checker.py`).

The compiler is native code: a grammar that nobody has thought of may overflow its stack, or take all memory. Here that
ends one process, which is started again, and not a server with all its streams.

    server                                     this process
    Vocabulary                              -> builds a table of tokens
                                            <- "" when it is ready
    grammar                                 -> compiles it, and makes its first mask
                                            <- what is wrong with it, or ""

Each message is its length in four bytes and its content. The process ends when its standard input does.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgpack
from llguidance import LLTokenizer

from raycache.vocabulary.base import Vocabulary
from raycache.vocabulary.grammar_tokens import compiled, plain_table, token_pieces, without_excerpt

LENGTH_BYTES = 4

_COMPILER_STACK_BYTES = 6 << 20
"""Three quarters of what the engine's thread has that compiles the grammar later: what fits here fits there."""
_MASK_STACK_BYTES = 1 << 20
"""Half of what the compiler's own threads have, which make masks in the engine."""
_STACK_BYTES_IF_UNLIMITED = 2 << 20  # of a thread, by the C library
_MEMORY_BYTES = 2 << 30
"""Address space that grammars may take beside the table of tokens."""
_EXTRA_S = 2.0

Check = Callable[[str, LLTokenizer], str]
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """What the process is told first.

    Attributes:
        tokens: bytes of every token that the model has logits for.
        special_ids: tokens that are marks and not text.
        eos_token_ids: tokens that end an output, at least one.
        timeout_s: longest time that a check may take; the process ends itself somewhat later, if the server is gone.
    """

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    eos_token_ids: Sequence[int]
    timeout_s: float

    @classmethod
    def of(cls, vocabulary: Vocabulary, *, num_logits: int, eos_token_ids: Sequence[int], timeout_s: float) -> Setup:
        """That of a model; arguments as in `grammar_tokens`."""
        return cls(
            token_pieces(vocabulary, num_logits=num_logits),
            sorted(i for i in vocabulary.special_ids if i < num_logits),
            [i for i in eos_token_ids if i < num_logits],
            timeout_s,
        )

    def packed(self) -> bytes:
        """As a message."""
        packed: bytes = msgpack.packb(asdict(self))
        return packed


def command() -> list[str]:
    """The command that runs `main` in another process, which finds modules where this one does."""
    path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others, too
    name = f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main()"
    return [sys.executable, "-I", "-c", name]


def framed(content: bytes) -> bytes:
    """A message as it is sent."""
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def problem(grammar: str, table: LLTokenizer) -> str:
    """What is wrong with a grammar; "" for nothing. Has less of a stack than the engine."""
    usual, _ = resource.getrlimit(resource.RLIMIT_STACK)
    usual = _STACK_BYTES_IF_UNLIMITED if usual == resource.RLIM_INFINITY else usual
    return _in_thread(partial(_problem, grammar, table), stack_bytes=min(_COMPILER_STACK_BYTES, usual // 4 * 3))


def _problem(grammar: str, table: LLTokenizer) -> str:
    matcher = compiled(grammar, table)
    # Some grammars turn out to allow nothing, or to be too complex, when the first token is asked for.
    _in_thread(matcher.compute_bitmask, stack_bytes=_MASK_STACK_BYTES)
    message = matcher.get_error()
    if "coerce_one_of" in message:
        return "the members of a oneOf do not exclude each other as far as can be seen; use anyOf"
    return without_excerpt(message) if matcher.is_error() else ""


def _in_thread(work: Callable[[], T], *, stack_bytes: int) -> T:
    before = threading.stack_size(stack_bytes)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()
    finally:
        threading.stack_size(before)


def main(check: Check = problem) -> None:
    """Answer what comes from standard input, until it ends."""
    # Nothing else may write to where the answers go.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin.buffer, answers, check)


def _serve(requests: BinaryIO, answers: BinaryIO, check: Check) -> None:
    setup = Setup(**msgpack.unpackb(_read(requests)))
    table = plain_table(setup.tokens, special_ids=setup.special_ids, eos_token_ids=setup.eos_token_ids)
    _limit_memory()
    _write(answers, "")
    while grammar := _read(requests):
        signal.setitimer(signal.ITIMER_REAL, setup.timeout_s + _EXTRA_S)  # ends the process, whatever it does
        found = check(grammar.decode(), table)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, found)


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _read(source: BinaryIO) -> bytes:
    """The next message, or nothing at the end of the stream."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "big")
    content = source.read(length)
    return content if len(content) == length else b""


def _write(sink: BinaryIO, text: str) -> None:
    sink.write(framed(text.encode()))
    sink.flush()
