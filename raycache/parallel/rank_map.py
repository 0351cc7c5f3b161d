"""Maps of ranks to nodes as people write them: RANKS@NODE;RANKS@NODE, such as 0-3@10.0.0.1;4-7@10.0.0.2."""

from __future__ import annotations

import re

from raycache.errors import ConfigError

_RUN = re.compile(r"(\d+)(?:-(\d+))?$")


def parse_rank_map(text: str, *, world_size: int) -> tuple[str, ...]:
    """Read a map that names every rank once.

    Args:
        text: entries with ";" between them; ranks are numbers and runs such as 0-3 with "," between them.
        world_size: ranks that there are.
    Returns:
        A node's name per rank, as written.
    Raises:
        ConfigError: it is no map, or a rank is missing, named twice, or not there.
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
    """Ascending ranks as a map names them, such as "0-3,6"."""
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
