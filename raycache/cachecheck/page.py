"""A result as one HTML page, which loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from raycache.cachecheck.check import SCENARIOS, Result, figures
from raycache.cachecheck.report import facts, told, verdict

_STYLE = """
:root { color-scheme: light dark; --good: #16784a; --bad: #c0322b; --dim: #8886; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid var(--dim); padding-left: .8rem; }
.right { border-color: var(--good); } .fault { border-color: var(--bad); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--dim); }
th:first-child, td:first-child, td[colspan] { text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
svg text { fill: currentColor; font-size: 12px; } svg line { stroke: var(--dim); }
.dot { fill: currentColor; fill-opacity: .45; } .over { fill: var(--bad); }
.some, .gross { stroke: var(--bad); stroke-dasharray: 4 3; } .some { stroke-opacity: .5; }
"""
_CLASSES = ("right", "fault", "")
_WIDTH, _LEFT, _ROW = 720, 90, 24
_LOW, _HIGH = -7.0, 2.0
"""Powers of ten at both ends of the axis."""


def as_html(result: Result) -> str:
    """The whole page."""
    body = "\n".join(_body(result))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>cachecheck</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _body(result: Result) -> Iterator[str]:
    yield f'<h1 class="verdict {_CLASSES[result.exit_code]}">{escape(verdict(result))}</h1>'
    for fault in result.faults:
        yield f"<h2>Fault: {escape(fault.scenario)}, found after {fault.number} requests ({escape(fault.test)})</h2>"
        yield f"<p>{escape(fault.what)}</p>"
        if lines := told(fault):
            yield f"<pre>{escape(chr(10).join(lines))}</pre>"
    yield "<h2>What was done</h2><ul>"
    yield from (f"<li>{escape(line)}</li>" for line in facts(result))
    yield "</ul>"
    if any(one.difference.nats is not None for one in result.comparisons):
        yield "<h2>Changes of log-probabilities</h2>"
        yield '<p>A dot per compared answer, in nats; dashed: the thresholds.</p><div class="wide">'
        yield from _plot(result)
        yield "</div>"
    yield '<h2>Scenarios</h2><div class="wide"><table><thead><tr><th>scenario</th><th>compared</th><th>hits</th>'
    yield "<th>texts differ</th><th>largest change, nats</th><th>faults</th></tr></thead><tbody>"
    for name, row in figures(result).items():
        yield f"<tr><td>{escape(name)}</td>"
        if row["skipped"]:
            why = f"skipped: {row['skipped']}"
            yield f'<td colspan="5">{escape(why)}</td></tr>'
            continue
        largest = "" if row["largest_nats"] is None else f"{row['largest_nats']:.3g}"
        cells = (row["comparisons"], row["hits"], row["texts_differ"], largest, row["faults"])
        yield "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"


def _plot(result: Result) -> Iterator[str]:
    """Dots on a logarithmic axis, a row per scenario."""
    names = [name for name in SCENARIOS if any(one.scenario == name for one in result.comparisons)]
    height = _ROW * (len(names) + 1) + 8
    yield (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        'aria-label="changes of log-probabilities per scenario">'
    )
    bottom = _ROW * len(names) + 4
    for power in range(int(_LOW) + 1, int(_HIGH) + 1, 2):
        x = _x(10.0**power)
        yield f'<line x1="{x}" y1="0" x2="{x}" y2="{bottom}"/><text x="{x - 14}" y="{bottom + 16}">1e{power}</text>'
    noise = result.noise
    for kind, limit in () if noise is None else (("some", noise.some), ("gross", noise.gross)):
        if 0 < limit < math.inf:
            yield f'<line class="{kind}" x1="{_x(limit)}" y1="0" x2="{_x(limit)}" y2="{bottom}"/>'
    for row, name in enumerate(names):
        y = _ROW * row + _ROW // 2
        yield f'<text x="0" y="{y + 4}">{escape(name)}</text>'
        for one in result.comparisons:
            if one.scenario != name or one.difference.nats is None:
                continue
            nats, limit = one.difference.nats, math.inf if noise is None else noise.some
            kind = "dot over" if nats > limit else "dot"
            yield f'<circle class="{kind}" cx="{_x(nats)}" cy="{y}" r="4">'
            yield f"<title>{escape(one.what)}: {nats:.3g}</title></circle>"
    yield "</svg>"


def _x(nats: float) -> float:
    power = min(_HIGH, max(_LOW, math.log10(nats) if nats > 0 else _LOW))
    return round(_LEFT + (power - _LOW) / (_HIGH - _LOW) * (_WIDTH - _LEFT - 20), 1)
