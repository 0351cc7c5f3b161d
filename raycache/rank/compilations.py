"""Notices kernels that are compiled, or read from the disk, at their first use in this process.

Triton reports each specialisation of its kernels, FlashInfer logs each of its builds. Once a rank is ready there should
be none, since requests would wait for them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any, Protocol

_log = logging.getLogger(__name__)

_BUILDS = "Building JIT module"
"""How FlashInfer's message begins."""


class Report(Protocol):
    """Called with the name of a kernel, and whether it was compiled instead of read from the disk."""

    def __call__(self, name: str, *, is_compiled: bool) -> None: ...


class Compilations:
    """Counts what is compiled and what is read from the disk while it is open.

    Attributes:
        compiled, read: kernel -> number of its specialisations.
    """

    def __init__(self) -> None:
        self.compiled, self.read = Counter[str](), Counter[str]()
        self._end = _nothing

    def __enter__(self) -> Compilations:
        self._end = listen(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _count(self, name: str, *, is_compiled: bool) -> None:
        (self.compiled if is_compiled else self.read)[name] += 1

    def __str__(self) -> str:
        """Such as "3 kernels compiled, 40 read from the disk"."""
        return f"{self.compiled.total()} kernels compiled, {self.read.total()} read from the disk"


def warn_of_compilers() -> Callable[[], None]:
    """Log a warning for each kernel that is compiled from now on; returns a function that ends this."""
    return listen(_warn)


def _warn(name: str, *, is_compiled: bool) -> None:
    if is_compiled:
        _log.warning(
            "kernel %s was compiled after the start, so requests waited for it; the warm-up should have compiled it: "
            "please report this with the settings",
            name,
        )
    else:
        _log.info("kernel %s was read from the disk after the start", name)


def listen(report: Report) -> Callable[[], None]:
    """Report kernels at their first use in this process; returns a function that ends this."""
    ends = [_listen_to_triton(report), _listen_to_flashinfer(report)]

    def end() -> None:
        for each in ends:
            each()

    return end


def _listen_to_triton(report: Report) -> Callable[[], None]:
    """Triton has one listener: the one before gets its calls, too."""
    try:
        knobs = import_module("triton.knobs").compilation
        before = knobs.listener
    except (ImportError, AttributeError):  # not installed, or too old
        return _nothing
    is_over = False

    def listener(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **more)
        if not is_over:
            report(str(src.name), is_compiled=not cache_hit)

    def end() -> None:
        nonlocal is_over
        is_over = True
        if knobs.listener is listener:
            knobs.listener = before

    knobs.listener = listener
    return end


def _listen_to_flashinfer(report: Report) -> Callable[[], None]:
    try:
        logger: logging.Logger = import_module("flashinfer.jit.core").logger
    except (ImportError, AttributeError, OSError, RuntimeError):
        return _nothing
    handler = _BuildHandler(report)
    logger.addHandler(handler)
    return lambda: logger.removeHandler(handler)


class _BuildHandler(logging.Handler):
    """Reports FlashInfer's builds."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.INFO)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        if str(record.msg).startswith(_BUILDS):
            name = record.args[0] if isinstance(record.args, tuple) and record.args else record.getMessage()
            self._report(f"{name} of FlashInfer", is_compiled=True)


def _nothing() -> None:
    """There is no library to listen to."""
