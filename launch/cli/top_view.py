"""One frame of `raycache top`: the state and rates of a service, from two snapshots of its /status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.table import human_bytes
from raycache.observe.figures import LANES

_MOST_RANKS = 8
"""Above this number, ranks are summarised by node."""
_BAR = 12
_MAX_POSITIONS = 3
_MOST_MISSES = 3
_MOST_CAUSES = 3
_LEAST_GAIN = 0.001
_NAME = 8
Figures = Mapping[str, Any]


class Change:
    """Two snapshots of a service.

    Args:
        figures: current /status.
        before: earlier /status; empty at first.
        seconds: between them.
    """

    def __init__(self, figures: Figures, *, before: Figures, seconds: float) -> None:
        self.figures, self.before = figures, before
        self._seconds = seconds

    def __getitem__(self, name: str) -> Any:
        return self.figures.get(name, 0)

    def gain(self, *path: str) -> float:
        """Increase of a counter since the earlier snapshot, or its value if the engine restarted since."""
        now, before = _at(self.figures, path), _at(self.before, path) if self.before else 0.0
        return now - before if now >= before else now

    def rate(self, *path: str) -> float | None:
        """Increase per second; None with one snapshot only."""
        return self.gain(*path) / self._seconds if self.before and self._seconds > 0 else None

    def of(self, replica: str) -> Change:
        """The change of one replica."""
        before = self.before.get("replicas", {}).get(replica, {})
        return Change(self.figures["replicas"][replica], before=before, seconds=self._seconds)


def view(change: Change, *, endpoint: str, error: str) -> RenderableType:
    """Render the whole frame.

    Args:
        error: why the service does not respond at the moment, or empty.
    """
    parts: list[RenderableType] = [_head(change, endpoint=endpoint, error=error), _load(change), Text()]
    parts += [_tiers(change), _moves(change), _misses(change)]
    if change["reuse"]:
        parts += [_reuse(change["reuse"]), _lost(change["reuse"])]
    has_replicas = len(change.figures.get("replicas", {})) > 1
    if has_replicas:
        parts += [Text(), _replicas(change)]
    rows = [{**row, "rank": _named(row) if has_replicas else row["rank"]} for row in change["ranks"] or ()]
    parts += [Text(), _ranks(rows)]
    parts += [Text(f"! {line}", "yellow", no_wrap=True, overflow="ellipsis") for line in change["warnings"] or ()]
    return Group(*parts)


def _head(change: Change, *, endpoint: str, error: str) -> Text:
    head = Text.assemble((f"{change['model']}", "bold"), "  ", no_wrap=True, overflow="ellipsis")
    head.append(f"no response: {error}" if error else "ready", "bold red" if error else "green")
    head.append(f"  epoch {change['epoch']}")
    for name, text in (("rebuilds", "gangs lost"), ("engines_lost", "engines lost")):
        if change[name]:
            head.append(f"  {text} {change[name]}", "yellow")
    return head.append(f"  {endpoint}", "dim")


def _load(change: Change) -> Table:
    grid = _grid(5)
    finished = sum(change.figures.get("finished", {}).values())
    rates = {name: _rate(change.rate(name)) for name in ("prompt_tokens", "computed_tokens", "output_tokens")}
    grid.add_row(
        "requests",
        f"running {change['running']}",
        f"waiting {change['waiting']}",
        f"ended {_short(finished)}",
        f"refused {change['refused']}, preempted {change['preemptions']}",
    )
    grid.add_row(
        "tokens/s",
        f"prompt {rates['prompt_tokens']}",
        f"computed {rates['computed_tokens']}",
        f"output {rates['output_tokens']}",
        f"cached {_hit_rate(change)}",
    )
    drafted, accepted = change.figures.get("drafted", {}), change.figures.get("accepted", {})
    if drafted:
        rows = change["output_tokens"] - sum(accepted.values())
        per_step = f"{change['output_tokens'] / rows:.2f} per step" if rows > 0 else ""
        grid.add_row("drafts", per_step, *_by_position(drafted, accepted))
    return grid


def _by_position(drafted: Mapping[str, int], accepted: Mapping[str, int]) -> Iterator[str]:
    """Acceptance rates of draft tokens at the first few positions after the last known token."""
    for position in sorted(drafted, key=int)[:_MAX_POSITIONS]:
        yield f"{_percent(accepted.get(position, 0), drafted[position])} accepted at {position}"


def _hit_rate(change: Change) -> str:
    """Fraction of prompt tokens from the cache: between the snapshots, and in total."""
    lately, whole = change.gain("prompt_tokens"), change["prompt_tokens"]
    now = _percent(change.gain("cached_tokens"), lately) if change.before else "-"
    return f"{now} now, {_percent(change['cached_tokens'], whole)} in total"


def _tiers(change: Change) -> Table:
    table = _table("tier".ljust(_NAME), "used", "", "holds", "hits", "in", "out", "evicted")
    free, total = change["pages_free"], change["pages_total"]
    table.add_row(
        *("device", _bar(total - free, total), _percent(total - free, total), f"{_short(total)} pages"),
        *(_hits(change, "device"), "", "", _short(change["evicted_pages"])),
    )
    tiers = change.figures.get("tiers", {})
    if "host" in tiers:
        host = tiers["host"]
        free, total = host.get("pages_free", 0), host.get("pages_total", 0)
        moved = (_rate_bytes(change.rate("tiers", "host", f"{name}_bytes")) for name in ("saved", "loaded"))
        table.add_row(
            *("host", _bar(total - free, total), _percent(total - free, total), f"{_short(total)} pages"),
            *(_hits(change, "host"), *moved, _short(host.get("evicted_pages", 0))),
        )
    if "storage" in tiers and "objects" in tiers["storage"]:
        stored = tiers["storage"]
        used, limit = stored.get("bytes_used", 0), stored.get("bytes_limit", 0)
        moved = (_rate_bytes(change.rate("tiers", "storage", f"{name}_bytes")) for name in ("persisted", "prefetched"))
        table.add_row(
            *("storage", _bar(used, limit), _percent(used, limit), human_bytes(used)),
            *(_hits(change, "storage"), *moved, _short(stored.get("evicted", 0))),
        )
    return table


def _hits(change: Change, tier: str) -> str:
    return _percent(change.figures.get("cached_by_tier", {}).get(tier, 0), change["prompt_tokens"])


def _moves(change: Change) -> Table:
    """Fraction of time that each kind of transfer takes."""
    grid = _grid(1 + len(LANES))
    tiers = change.figures.get("tiers", {})
    lanes = [
        f"{lane} {_share(change.rate('tiers', tier, seconds))} busy"
        for lane, (tier, _, seconds) in LANES.items()
        if seconds in tiers.get(tier, {})
    ]
    if lanes:
        grid.add_row("moves", *lanes)
    return grid


def _misses(change: Change) -> Table:
    """The most frequent miss reasons."""
    misses = change.figures.get("misses", {})
    most = sorted(misses.items(), key=lambda item: -item[1])[:_MOST_MISSES]
    grid = _grid(2)
    grid.add_row("misses", "  ".join(f"{reason} {_short(count)}" for reason, count in most) or "none")
    return grid


def _reuse(reuse: Mapping[str, Any]) -> Table:
    """What a cache without limits would have reused, and which tier would give most if it were twice as large."""
    grid = _grid(3)
    error = f" (+-{100 * reuse['error']:.1f})" if reuse["error"] else ""
    tier, gain = max(reuse["gain_if_doubled"].items(), key=lambda item: item[1], default=("", 0.0))
    grid.add_row(
        "reuse",
        f"{_share(reuse['achieved'])} of {_share(reuse['achievable'])}{error} possible",
        f"twice the {tier} tier: +{100 * gain:.1f} %" if gain >= _LEAST_GAIN else "",
    )
    return grid


def _lost(reuse: Mapping[str, Any]) -> Table:
    """What lies between, by cause."""
    grid = _grid(2)
    lost = sorted(reuse["lost"].items(), key=lambda item: -item[1])[:_MOST_CAUSES]
    grid.add_row("lost", "  ".join(f"{cause} {_share(share)}" for cause, share in lost) or "nothing")
    return grid


def _replicas(change: Change) -> Table:
    table = _table("replica", "running", "waiting", "output/s", "cached", "pages used", "epoch")
    for name in change["replicas"]:
        own = change.of(name)
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
    """A table without header; the first column holds the names of the rows."""
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
    """Format a count, such as 950, 12.3k or 4.5M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= limit:
            return f"{count / (limit if unit != 'k' else 1e3):.1f}{unit}"
    return f"{count:.0f}"
