"""Downloads files of a repository to the cache: concurrently, with progress, checks and cancellation."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from raycache.checkpoint.hub_errors import FAILURES, is_transient
from raycache.checkpoint.hub_files import HubFile

_log = logging.getLogger(__name__)
_AT_A_TIME = 8
_ATTEMPTS = 3
"""Per file, in addition to those that huggingface_hub makes while connected."""
_LOOK_S = 0.2
_STOP_S = 5.0
"""Time for downloads to clean up when they are stopped; those blocked on the network are abandoned."""

OnProgress = Callable[[int, int], None]
"""Called with (bytes downloaded, total bytes); an exception stops the download."""


class Transfer(Protocol):
    """Downloads one file to the cache."""

    def __call__(self, name: str, *, counter: type) -> Path:
        """Download a file that the cache does not have.

        Args:
            name: of the file.
            counter: class of a progress bar like tqdm's.
        Returns:
            Where it is.
        """
        ...


class FetchError(Exception):
    """A file could not be downloaded; the cause says why."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class DamagedError(OSError):
    """A downloaded file differs from the one on the Hub."""


class Download:
    """Files of a model that are to be fetched.

    Args:
        files: to fetch.
        folder: where they will be.
        transfer: gets one of them.
        pause_s: before a file is tried a second time.
    """

    def __init__(self, files: Sequence[HubFile], *, folder: Path, transfer: Transfer, pause_s: float) -> None:
        self._files, self._folder, self._transfer, self._pause_s = files, folder, transfer, pause_s
        self._done = {file.name: 0 for file in files}
        self._is_stopped = threading.Event()

    def run(self, on_progress: OnProgress, *, done: int, total: int) -> None:
        """Fetch them; files that are whole are kept whatever happens.

        Args:
            on_progress: called in this thread.
            done, total: bytes that were there before, and bytes in all.
        Raises:
            FetchError: one of them could not be fetched.
        """
        todo, ended = SimpleQueue[HubFile](), SimpleQueue[BaseException | None]()
        for file in self._files:
            todo.put(file)
        workers = [
            threading.Thread(target=self._work, args=(todo, ended), name="download", daemon=True)
            for _ in self._files[:_AT_A_TIME]
        ]
        left, parts = len(self._files), self._parts()
        try:
            for worker in workers:
                worker.start()
            while left:
                with contextlib.suppress(Empty):
                    failure = ended.get(timeout=_LOOK_S)
                    if failure is not None:
                        raise failure
                    left -= 1
                on_progress(min(done + sum(self._done.values()), total), total)
        except BaseException:  # an interrupt, too: parts of files would stay
            self._is_stopped.set()
            deadline = time.monotonic() + _STOP_S
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))
            for part in self._parts() - parts:  # of one that was not waited for
                part.unlink(missing_ok=True)
            raise

    def _parts(self) -> set[Path]:
        return set((self._folder.parents[1] / "blobs").glob("*.incomplete"))

    def _work(self, todo: SimpleQueue[HubFile], ended: SimpleQueue[BaseException | None]) -> None:
        while not self._is_stopped.is_set():
            try:
                self._fetch(todo.get_nowait())
                ended.put(None)
            except Empty:
                return
            except BaseException as cause:  # whoever waits must hear of it
                ended.put(cause)
                return

    def _fetch(self, file: HubFile) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._try(file)
            except FAILURES as cause:
                if attempt == _ATTEMPTS or not is_transient(cause) or self._is_stopped.is_set():
                    raise FetchError(file.name) from cause
                _log.warning("%s: %s; trying again", file.name, " ".join(str(cause).split()))
            self._is_stopped.wait(self._pause_s * 4 ** (attempt - 1))

    def _try(self, file: HubFile) -> None:
        self._done[file.name] = 0
        _remove(self._folder / file.name)  # one of another size
        path = self._transfer(file.name, counter=_counter(self._done, file.name, self._is_stopped))
        if not file.is_at(path) or not file.has_content_of(path):
            what = "content" if file.is_at(path) else "size"
            _remove(path)
            raise DamagedError(f"{file.name} has another {what} than the Hub says")
        self._done[file.name] = file.size or 0


def _remove(path: Path) -> None:
    """Remove a file from the cache, and the blob that it links to."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _counter(done: dict[str, int], name: str, is_stopped: threading.Event) -> type:
    """A progress bar for huggingface_hub that counts a file's bytes, and ends the download when that is stopped."""

    class Counter:
        def __init__(self, *args: Any, initial: int = 0, **kwargs: Any) -> None:
            self.total = kwargs.get("total")
            self.update(initial)

        def __enter__(self) -> Counter:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def close(self) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            if is_stopped.is_set():
                raise RuntimeError(f"the download of {name} is stopped")
            done[name] += int(count or 0)

        def update_transfer(self, count: float | None = 1) -> None:
            pass  # what has arrived and is not written yet

        def set_postfix_str(self, *args: Any, **kwargs: Any) -> None:
            pass

        set_transfer_postfix_str = set_postfix_str

    return Counter
