"""The report of a GPU as one HTML page: no script, no server, nothing from elsewhere; charts are SVG. `page` makes the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Mapping, Sequence

STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5d6675;--line:#d8dde5;--back:#fff;--bar:#2f6fd6}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa4b5;--line:#363d4a;--back:#14181f;--bar:#6aa0f5}}
*{box-sizing:border-box}body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--back);margin:0 auto;
max-width:1100px;padding:1rem}h1{font-size:1.5rem}h2{font-size:1.15rem;border-top:1px solid var(--line);padding-top:1rem}
p{color:var(--soft)}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.85rem}
th,td{text-align:right;padding:.25rem .5rem;border-bottom:1px solid var(--line);white-space:nowrap}
th{white-space:normal}th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:9rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(250px,1fr));gap:1rem}figure{margin:0;min-width:0}
figcaption{font-size:.75rem;color:var(--soft);overflow-wrap:anywhere}svg{width:100%;height:auto;display:block}
.line{stroke:var(--bar);fill:none;stroke-width:1.5}.axis{stroke:var(--line)}text{fill:var(--soft);font-size:9px}
meter{width:5rem}@media(max-width:700px){meter{display:none}th,td{padding:.25rem .3rem;font-size:.78rem}}
"""


@dataclass(frozen=True)
class Row:
    """One problem of the report. Times in us; `peers` is name -> time; `gains` is (trial, best time) at each gain."""

    problem: str
    evidence: str
    config: str
    time_us: float
    roofline_us: float
    default_us: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    gains: Sequence[tuple[int, float]] = ()
    importance: Mapping[str, float] = field(default_factory=dict)


def page(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """The whole page. Everything that comes from files is escaped."""
    peers = sorted({name for row in rows for name in row.peers})
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes), _coverage(rows), _times(rows, peers),
             _searches([row for row in rows if row.gains]), _importance(rows), _failures(rows)]
    return ("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
            "content=\"width=device-width,initial-scale=1\"><link rel=\"icon\" href=\"data:,\">"
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n" + "\n".join(filter(None, parts))
            + "\n</body></html>\n")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<div class=\"wide\"><table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>\n{lines}</table></div>"


def _coverage(rows: Sequence[Row]) -> str:
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        op, dtype = row.problem.split("-")[:2]
        kinds.setdefault((op, dtype), []).append(row)
    body = [(escape(f"{op} {dtype}"), str(len(some)), str(sum(row.evidence == "measured" for row in some)),
             str(sum(bool(row.gains) for row in some))) for (op, dtype), some in sorted(kinds.items())]
    return "<h2>Coverage</h2>" + _table(("kind", "problems", "measured", "with trials here"), body)


def _times(rows: Sequence[Row], peers: Sequence[str]) -> str:
    body = []
    for row in rows:
        share = min(1.0, row.roofline_us / row.time_us)
        gain = f"{row.default_us / row.time_us:.2f}x" if row.default_us else "-"
        cells = [f"{row.peers[name] / row.time_us:.2f}x" if name in row.peers else "-" for name in peers]
        body.append((escape(row.problem), f"{row.time_us:.1f}", _meter(share), gain, *cells, escape(row.evidence)))
    head = ("problem", "us", "of roofline", "over default", *(f"over {name}" for name in peers), "evidence")
    said = "Roofline: what the GPU's arithmetic or memory needs at boost clock. Over a peer: how many times as fast."
    return f"<h2>Times</h2><p>{said}</p>" + _table(head, body)


def _meter(share: float) -> str:
    return f"<meter value=\"{share:.3f}\">{share:.0%}</meter> {share:.0%}"


def _searches(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    figures = "".join(f"<figure>{_curve(row)}<figcaption>{escape(row.problem)}</figcaption></figure>" for row in rows)
    said = "Best time so far over the final best, by configs tried."
    return f"<h2>How searches converged</h2><p>{said}</p><div class=\"tiles\">{figures}</div>"


def _curve(row: Row, width: int = 250, height: int = 90) -> str:
    best, last = row.gains[-1][1], max(sum(row.outcomes.values()), row.gains[-1][0], 2)
    most = max(1.02, min(row.gains[0][1] / best, 3.0))

    def at(n: int, time_us: float) -> tuple[float, float]:
        over = min(time_us / best, most)
        return 30 + (width - 40) * (n - 1) / (last - 1), 8 + (height - 26) * (most - over) / (most - 1)

    points, before = [], None
    for n, time_us in [*row.gains, (last, best)]:
        x, y = at(n, time_us)
        points += [f"{x:.1f},{before:.1f}"] if before is not None else []
        points.append(f"{x:.1f},{y:.1f}")
        before = y
    floor = height - 18
    return (f"<svg viewBox=\"0 0 {width} {height}\" role=\"img\">"
            f"<line class=\"axis\" x1=\"30\" y1=\"{floor}\" x2=\"{width - 10}\" y2=\"{floor}\"/>"
            f"<polyline class=\"line\" points=\"{' '.join(points)}\"/><text x=\"2\" y=\"14\">{most:.2f}x</text>"
            f"<text x=\"2\" y=\"{floor}\">1.00x</text>"
            f"<text x=\"{width - 10}\" y=\"{height - 4}\" text-anchor=\"end\">{last}</text></svg>")


def _importance(rows: Sequence[Row]) -> str:
    sums: dict[str, list[float]] = {}
    for row in rows:
        for name, share in row.importance.items():
            sums.setdefault(name, []).append(share)
    if not sums:
        return ""
    means = sorted(((sum(shares) / len(shares), name, len(shares)) for name, shares in sums.items()), reverse=True)
    body = [(escape(name), _meter(mean), str(count)) for mean, name, count in means]
    said = "Share of what makes a config one of the best (PED-ANOVA), the mean over problems."
    return f"<h2>Importance of parameters</h2><p>{said}</p>" + _table(("parameter", "share", "problems"), body)


def _failures(rows: Sequence[Row]) -> str:
    kinds = sorted({name for row in rows for name in row.outcomes})
    if not kinds:
        return ""
    body = [(escape(row.problem), *(str(row.outcomes.get(name, 0)) for name in kinds)) for row in rows if row.outcomes]
    return "<h2>How configs ended</h2>" + _table(("problem", *(name.replace("_", " ") for name in kinds)), body)
