"""Parses maps of ranks to nodes: RANKS@NODE;RANKS@NODE, such as 0-3@10.0.0.1;4-7@10.0.0.2."""

from __future__ import annotations

import re

from raycache.errors import ConfigError

_RUN = re.compile(r"(\d+)(?:-(\d+))?$")


def parse_rank_map(text: str, *, world_size: int) -> tuple[str, ...]:
    """Parse a map that must contain every rank once.

    Args:
        text: entries separated by ";"; ranks are numbers or ranges such as 0-3, separated by ",".
    Returns:
        Name of each rank's node, as written.
    Raises:
        ConfigError: the text is not a map, or a rank is missing, duplicate, or out of range.
    """
    named: dict[int, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        ranks, _, node = entry.partition("@")
        if not ranks or not node:
            raise _refusal(text, f"{entry!r} is not RANKS@NODE")
        for rank in _ranks(text, ranks):
            if rank >= world_size:
                raise _refusal(text, f"there is no rank {rank}, the split has {world_size}")
            if rank in named:
                raise _refusal(text, f"rank {rank} is named twice")
            named[rank] = node.strip()
    missing = [rank for rank in range(world_size) if rank not in named]
    if missing:
        raise _refusal(text, f"it says nothing of rank{'s' if len(missing) > 1 else ''} {brief_ranks(missing)}")
    return tuple(named[rank] for rank in range(world_size))


def brief_ranks(ranks: list[int]) -> str:
    """Ascending ranks in the syntax of maps, such as "0-3,6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _ranks(text: str, ranks: str) -> list[int]:
    found: list[int] = []
    for part in ranks.split(","):
        run = _RUN.match(part.strip())
        if run is None or int(run[2] or run[1]) < int(run[1]):
            raise _refusal(text, f"{part.strip()!r} is neither a rank nor a run of ranks such as 0-3")
        if int(run[2] or run[1]) - int(run[1]) >= 1 << 16:
            raise _refusal(text, f"{part.strip()!r} is more ranks than a split can have")
        found += range(int(run[1]), int(run[2] or run[1]) + 1)
    return found


def _refusal(text: str, reason: str) -> ConfigError:
    return ConfigError(f"placement={text!r}: {reason}; write auto, or a map such as 0-3@10.0.0.1;4-7@10.0.0.2")
