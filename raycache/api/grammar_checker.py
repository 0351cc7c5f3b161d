"""Refuses grammars that cannot be enforced, before their requests wait in a queue.

Grammars are compiled one by one in a process of its own (vocabulary/grammar_check.py), which starts at the first one.
One that ends the process, or takes too long, is refused, and the process is started again for the next one. One during
which somebody kills the process is checked once more.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import signal
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from raycache.api.constraint import check_size
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError, RequestFailedError, RequestTimeoutError
from raycache.types import EngineInfo
from raycache.vocabulary.grammar_check import LENGTH_BYTES, Setup, command, framed

_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0
_WAIT_S = 120.0
_END_S = 1.0
_NUM_REMEMBERED = 256
_KILLED = (signal.SIGKILL.name, signal.SIGTERM.name)
"""Signals of others, such as the kernel when memory is short: the grammar need not be the cause."""

_log = logging.getLogger(__name__)


class GrammarChecker:
    """Compiles grammars with the model's tokens. Belongs to one event loop, with which its process ends.

    Args:
        tokenizer: of the model.
        info: the model's vocabulary and end tokens.
        program: command that runs the process; empty: the usual one.
        timeout_s: longest time that the check of one grammar may take.
    """

    def __init__(
        self, tokenizer: Tokenizer, info: EngineInfo, *, program: Sequence[str] = (), timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._tokenizer, self._info = tokenizer, info
        self._program, self._timeout_s = program or command(), timeout_s
        self._setup = b""
        self._errors: OrderedDict[bytes, str] = OrderedDict()  # digest -> what is wrong with it, "" for nothing
        self._pending: dict[bytes, _Pending] = {}  # by digest
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None

    async def check(self, grammar: str, *, field: str) -> None:
        """Refuse a grammar that cannot be compiled. Equal ones are checked once.

        Raises:
            RequestError: what is wrong with it.
            RequestTimeoutError: the grammars of other requests took too long.
            RequestFailedError: the process does not start.
        """
        check_size(grammar, field)
        if not any(token_id < self._info.vocab_size for token_id in self._info.eos_token_ids):
            raise RequestError(f"{field} cannot be enforced: this model has no end token", field=field)
        content = grammar.encode()
        digest = hashlib.blake2b(content).digest()
        if digest in self._errors:
            self._errors.move_to_end(digest)
            error = self._errors[digest]
        else:
            error = await self._wait(digest, content)
        if error:
            raise RequestError(f"{field} cannot be enforced: {error}", field=field)

    async def _wait(self, digest: bytes, grammar: bytes) -> str:
        pending = self._pending.get(digest)
        if pending is None:
            pending = _Pending(digest, grammar, asyncio.get_running_loop().create_future())
            self._pending[digest] = pending
            self._queue.put_nowait(pending)
        if self._work is None or self._work.done():
            # It outlives this request, so its log lines have no request id.
            self._work = asyncio.create_task(self._check_all(), context=contextvars.Context())
        pending.num_waiting += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                return await asyncio.shield(pending.error)
        except TimeoutError as cause:
            raise RequestTimeoutError(
                f"the grammars of other requests were still being checked after {_WAIT_S:.0f} s; try again later"
            ) from cause
        finally:
            pending.num_waiting -= 1

    async def _check_all(self) -> None:
        compiler: _Compiler | None = None
        try:
            while True:
                pending = await self._queue.get()
                if pending.num_waiting:
                    compiler = await self._checked(pending, compiler)
                del self._pending[pending.digest]
        finally:
            if compiler is not None:
                await compiler.end()

    async def _checked(self, pending: _Pending, compiler: _Compiler | None) -> _Compiler | None:
        """Check one grammar, and return the process if it still runs."""
        if compiler is not None and compiler.has_ended:  # while it was idle
            await compiler.end()
            compiler = None
        try:
            try:
                return await self._check(pending, compiler or await self._start())
            except _KilledError:
                return await self._check(pending, await self._start(), is_last=True)
        except RequestFailedError as cause:
            pending.error.set_exception(cause)
            pending.error.exception()  # all that waited may have left
            return None

    async def _check(self, pending: _Pending, compiler: _Compiler, *, is_last: bool = False) -> _Compiler | None:
        """Check one grammar, and return the process if it still runs.

        Args:
            is_last: whether a grammar is refused if somebody kills the process.
        Raises:
            _KilledError: somebody did, and it is not the last time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                error = await compiler.ask(pending.grammar)
        except (TimeoutError, EOFError, ConnectionError) as cause:
            ended_by = await compiler.end(is_soon=not isinstance(cause, TimeoutError))
            is_late = isinstance(cause, TimeoutError) or ended_by == signal.SIGALRM.name
            if not is_late and not is_last and ended_by in _KILLED:
                raise _KilledError from cause
            late = f"took longer than {self._timeout_s:g} s to check"
            what = late if is_late else f"crashed the compiler ({ended_by})"
            _log.warning("a grammar of %d bytes %s and was refused", len(pending.grammar), what)
            # Not remembered: the machine may have been busy, or somebody may have ended the process.
            pending.error.set_result(f"the grammar {what}")
            return None
        self._errors[pending.digest] = error
        while len(self._errors) > _NUM_REMEMBERED:
            self._errors.popitem(last=False)
        pending.error.set_result(error)
        return compiler

    async def _start(self) -> _Compiler:
        try:
            self._setup = self._setup or await asyncio.to_thread(self._pack)
            process = await asyncio.create_subprocess_exec(
                *self._program, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
        except (OSError, MemoryError) as cause:  # too little memory, or too many processes or open files
            raise RequestFailedError(f"the process that checks grammars did not start: {cause}") from cause
        compiler = _Compiler(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await compiler.ask(self._setup)
        except (TimeoutError, EOFError, ConnectionError) as cause:
            ended_by = await compiler.end(is_soon=not isinstance(cause, TimeoutError))
            raise RequestFailedError(f"the process that checks grammars did not start: {ended_by}") from cause
        except BaseException:
            await compiler.end()
            raise
        return compiler

    def _pack(self) -> bytes:
        info = self._info
        return Setup.of(
            self._tokenizer.vocabulary,
            num_logits=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            timeout_s=self._timeout_s,
        ).packed()


class _KilledError(Exception):
    """Somebody killed the process."""


@dataclass
class _Pending:
    """A grammar that is to be checked.

    Attributes:
        error: what is wrong with it; "" for nothing.
        num_waiting: requests; without any it need not be checked.
    """

    digest: bytes
    grammar: bytes
    error: asyncio.Future[str]
    num_waiting: int = 0


class _Compiler:
    """The process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._requests, self._answers = process, process.stdin, process.stdout

    @property
    def has_ended(self) -> bool:
        return self._answers.at_eof()

    async def ask(self, content: bytes) -> str:
        """Send a message, and return the answer.

        Raises:
            EOFError, ConnectionError: the process has ended.
        """
        self._requests.write(framed(content))
        await self._requests.drain()
        length = int.from_bytes(await self._answers.readexactly(LENGTH_BYTES), "big")
        return (await self._answers.readexactly(length)).decode()

    async def end(self, *, is_soon: bool = False) -> str:
        """End the process; returns the signal or the exit status with which it ended.

        Args:
            is_soon: it is about to end by itself.
        """
        if is_soon:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)
        with suppress(ProcessLookupError):
            self._process.kill()
        code = await self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
