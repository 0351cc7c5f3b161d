"""One frame of `raycache top`: what a service does now, from two looks at its /status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.table import human_bytes
from raycache.observe.figures import LANES

_MOST_RANKS = 8
"""More of them are shown by node."""
_BAR = 12
_MOST_PLACES = 3
_MOST_MISSES = 3
_NAME = 8
Figures = Mapping[str, Any]


class Look:
    """Two looks at a service.

    Args:
        figures: of its /status now.
        before: the same earlier; empty at first.
        seconds: between them.
    """

    def __init__(self, figures: Figures, *, before: Figures, seconds: float) -> None:
        self.figures, self.before = figures, before
        self._seconds = seconds

    def __getitem__(self, name: str) -> Any:
        return self.figures.get(name, 0)

    def gain(self, *path: str) -> float:
        """What a counter has gained since the earlier look; since its engine began anew if it is lower."""
        now, before = _at(self.figures, path), _at(self.before, path) if self.before else 0.0
        return now - before if now >= before else now

    def rate(self, *path: str) -> float | None:
        """The same per second; None after one look."""
        return self.gain(*path) / self._seconds if self.before and self._seconds > 0 else None

    def of(self, replica: str) -> Look:
        """The same of one replica."""
        before = self.before.get("replicas", {}).get(replica, {})
        return Look(self.figures["replicas"][replica], before=before, seconds=self._seconds)


def view(look: Look, *, endpoint: str, error: str) -> RenderableType:
    """The whole frame.

    Args:
        look: at the service.
        endpoint: of it.
        error: why it does not answer right now, or empty.
    """
    parts: list[RenderableType] = [_head(look, endpoint=endpoint, error=error), _load(look), Text()]
    parts += [_tiers(look), _moves(look), _misses(look)]
    has_replicas = len(look.figures.get("replicas", {})) > 1
    if has_replicas:
        parts += [Text(), _replicas(look)]
    rows = [{**row, "rank": _named(row) if has_replicas else row["rank"]} for row in look["ranks"] or ()]
    parts += [Text(), _ranks(rows)]
    parts += [Text(f"! {line}", "yellow", no_wrap=True, overflow="ellipsis") for line in look["warnings"] or ()]
    return Group(*parts)


def _head(look: Look, *, endpoint: str, error: str) -> Text:
    head = Text.assemble((f"{look['model']}", "bold"), "  ", no_wrap=True, overflow="ellipsis")
    head.append(f"no answer: {error}" if error else "ready", "bold red" if error else "green")
    head.append(f"  epoch {look['epoch']}")
    for name, text in (("rebuilds", "gangs lost"), ("engines_lost", "engines lost")):
        if look[name]:
            head.append(f"  {text} {look[name]}", "yellow")
    return head.append(f"  {endpoint}", "dim")


def _load(look: Look) -> Table:
    grid = _grid(5)
    finished = sum(look.figures.get("finished", {}).values())
    rates = {name: _rate(look.rate(name)) for name in ("prompt_tokens", "computed_tokens", "output_tokens")}
    grid.add_row(
        "requests",
        f"running {look['running']}",
        f"waiting {look['waiting']}",
        f"ended {_short(finished)}",
        f"refused {look['refused']}, preempted {look['preemptions']}",
    )
    grid.add_row(
        "tokens/s",
        f"prompt {rates['prompt_tokens']}",
        f"computed {rates['computed_tokens']}",
        f"output {rates['output_tokens']}",
        f"cached {_hit_rate(look)}",
    )
    drafted, accepted = look.figures.get("drafted", {}), look.figures.get("accepted", {})
    if drafted:
        rows = look["output_tokens"] - sum(accepted.values())
        per_step = f"{look['output_tokens'] / rows:.2f} per step" if rows > 0 else ""
        grid.add_row("drafts", per_step, *_by_place(drafted, accepted))
    return grid


def _by_place(drafted: Mapping[str, int], accepted: Mapping[str, int]) -> Iterator[str]:
    """Acceptance rate of draft tokens by their distance from the last known token; the first few."""
    for place in sorted(drafted, key=int)[:_MOST_PLACES]:
        yield f"{_percent(accepted.get(place, 0), drafted[place])} accepted at {place}"


def _hit_rate(look: Look) -> str:
    """Of the prompt tokens, how many came from the cache: lately, and of all."""
    lately, whole = look.gain("prompt_tokens"), look["prompt_tokens"]
    now = _percent(look.gain("cached_tokens"), lately) if look.before else "-"
    return f"{now} now, {_percent(look['cached_tokens'], whole)} of all"


def _tiers(look: Look) -> Table:
    table = _table("tier".ljust(_NAME), "used", "", "holds", "hits", "in", "out", "evicted")
    free, total = look["pages_free"], look["pages_total"]
    table.add_row(
        *("device", _bar(total - free, total), _percent(total - free, total), f"{_short(total)} pages"),
        *(_hits(look, "device"), "", "", _short(look["evicted_pages"])),
    )
    tiers = look.figures.get("tiers", {})
    if "host" in tiers:
        host = tiers["host"]
        free, total = host.get("pages_free", 0), host.get("pages_total", 0)
        moved = (_rate_bytes(look.rate("tiers", "host", f"{name}_bytes")) for name in ("saved", "loaded"))
        table.add_row(
            *("host", _bar(total - free, total), _percent(total - free, total), f"{_short(total)} pages"),
            *(_hits(look, "host"), *moved, _short(host.get("evicted_pages", 0))),
        )
    if "storage" in tiers and "objects" in tiers["storage"]:
        stored = tiers["storage"]
        used, limit = stored.get("bytes_used", 0), stored.get("bytes_limit", 0)
        moved = (_rate_bytes(look.rate("tiers", "storage", f"{name}_bytes")) for name in ("persisted", "prefetched"))
        table.add_row(
            *("storage", _bar(used, limit), _percent(used, limit), human_bytes(used)),
            *(_hits(look, "storage"), *moved, _short(stored.get("evicted", 0))),
        )
    return table


def _hits(look: Look, tier: str) -> str:
    return _percent(look.figures.get("cached_by_tier", {}).get(tier, 0), look["prompt_tokens"])


def _moves(look: Look) -> Table:
    """How busy each lane is, as the share of time that it spends in moves."""
    grid = _grid(1 + len(LANES))
    tiers = look.figures.get("tiers", {})
    lanes = [
        f"{lane} {_share(look.rate('tiers', tier, seconds))} busy"
        for lane, (tier, _, seconds) in LANES.items()
        if seconds in tiers.get(tier, {})
    ]
    if lanes:
        grid.add_row("moves", *lanes)
    return grid


def _misses(look: Look) -> Table:
    """Why prompts found no more, the most frequent reasons."""
    misses = look.figures.get("misses", {})
    most = sorted(misses.items(), key=lambda item: -item[1])[:_MOST_MISSES]
    grid = _grid(2)
    grid.add_row("misses", "  ".join(f"{reason} {_short(count)}" for reason, count in most) or "none")
    return grid


def _replicas(look: Look) -> Table:
    table = _table("replica", "running", "waiting", "output/s", "cached", "pages used", "epoch")
    for name in look["replicas"]:
        own = look.of(name)
        used = own["pages_total"] - own["pages_free"]
        table.add_row(
            *(name, str(own["running"]), str(own["waiting"]), _rate(own.rate("output_tokens"))),
            *(_percent(own["cached_tokens"], own["prompt_tokens"]), _percent(used, own["pages_total"])),
            str(own["epoch"]),
        )
    return table


def _ranks(rows: Sequence[Mapping[str, Any]]) -> Table:
    if len(rows) <= _MOST_RANKS:
        table = _table("rank", "position", "node", "device", "pages")
        for row in rows:
            table.add_row(*(str(row[name]) for name in ("rank", "coords", "node", "device", "pages")))
        return table
    table = _table("node", "ranks", "devices", "pages")
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        nodes.setdefault(str(row["node"]), []).append(row)
    for node, own in nodes.items():
        devices = sorted({str(row["device"]) for row in own})
        shown = devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
        table.add_row(node, f"{len(own)}: {_spans(str(row['rank']) for row in own)}", shown, str(own[0]["pages"]))
    return table


def _named(row: Mapping[str, Any]) -> str:
    return f"{row.get('replica') or '0'}/{row['rank']}"


def _spans(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{listed[0]} to {listed[-1]}" if len(listed) > 1 else listed[0]


def _grid(num_columns: int) -> Table:
    """Whose first column has the names of the lines."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold cyan", min_width=_NAME, no_wrap=True)
    for _ in range(num_columns - 1):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _bar(part: float, whole: float) -> Text:
    full = round(_BAR * part / whole) if whole else 0
    return Text.assemble(("#" * full, "green" if full < _BAR else "yellow"), ("." * (_BAR - full), "dim"))


def _at(figures: Any, path: Sequence[str]) -> float:
    for name in path:
        figures = figures.get(name, {})
    return float(figures or 0)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _rate(value: float | None) -> str:
    return "-" if value is None else _short(value)


def _rate_bytes(value: float | None) -> str:
    return "-" if value is None else f"{human_bytes(value)}/s"


def _short(count: float) -> str:
    """Such as 950, 12.3k or 4.5M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= limit:
            return f"{count / (limit if unit != 'k' else 1e3):.1f}{unit}"
    return f"{count:.0f}"
