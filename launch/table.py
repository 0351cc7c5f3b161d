"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], *, rows: Sequence[Sequence[object]]) -> str:
    """Align columns, two spaces apart, without trailing spaces."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def counted(number: int, noun: str) -> str:
    """Format a count, such as "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(count: float) -> str:
    """Format a size, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
