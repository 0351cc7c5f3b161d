"""Progress bar for downloads, shown only in a terminal."""

from __future__ import annotations

from typing import Any

from huggingface_hub.utils.tqdm import tqdm


class ProgressBar:
    """Bytes of a download, on stderr if that is a terminal and HF_HUB_DISABLE_PROGRESS_BARS is not set."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int) -> None:
        """Show progress, in bytes."""
        if self._bar is None or self._bar.total != total:
            self.__exit__()
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="downloading", disable=None)
        self._bar.update(done - self._bar.n)
