"""Pictures and pages without a plotting library: SVG that stands alone, and HTML that holds everything it shows."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

COLOURS = ("#8a8f98", "#d9822b", "#2166ac", "#2a9d4a", "#c2272d", "#8e44ad", "#17becf", "#6b4423")
DASHES = ("", "6 4", "2 3", "10 3 2 3", "14 3")
MOST_BESIDE = 4  # panels of curves in one row: more become too small
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; overflow-wrap: anywhere; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; margin: 1rem 0; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem .3rem 0; text-align: right; vertical-align: top; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
.numbers th { overflow-wrap: normal; } .numbers td { white-space: nowrap; } pre { overflow-x: auto; }
.numbers td:first-child { min-width: 8rem; white-space: normal; overflow-wrap: normal; }
.noted td:last-child { min-width: 18rem; max-width: 24rem; white-space: normal; overflow-wrap: anywhere; }
.noted th:last-child, .noted td:last-child { text-align: left; }
.text td { min-width: 9rem; overflow-wrap: break-word; }
thead th { border-bottom: 2px solid #222; } td { border-bottom: 1px solid #ddd; }
mark { background: #fbd5d0; color: #8b1a10; } code { background: #f2f2f2; padding: 0 .2em; }
@media (max-width: 50rem) { .wide svg { max-width: none; } }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } svg { break-inside: avoid; } }
@media print { .wide { overflow: visible; } pre { overflow: visible; white-space: pre-wrap; font-size: 70%; } }
@media print { table { font-size: 70%; } th, td { padding-right: .4rem; } .numbers th { overflow-wrap: anywhere; } }
@media print { .noted th { overflow-wrap: break-word; } }
@media print { details::details-content { content-visibility: visible; block-size: auto; } }
"""
Points = Sequence[tuple[float, float]]


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """One self-contained HTML page of (heading, HTML) sections."""
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """An HTML table; cells are HTML, so that they can carry marks. `kind` is "numbers", "numbers noted" if the last
    column has words, or "text"."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def curves(panels: Mapping[str, Mapping[str, Points]], unit: str, steps: Sequence[float] = ()) -> str:
    """An SVG of one panel per measure side by side, in each one line per system; `unit` is that of the x axis.

    Systems have the same colour in every panel and are named once, above. With `steps` the x axis has these values,
    at equal distances whatever they are.
    """
    width, height, gap = 230, 170, 44
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    # More systems than colours begin again, with broken lines.
    strokes = [
        f'stroke="{colour}"' + (f' stroke-dasharray="{dash}"' if dash else "") for dash in DASHES for colour in COLOURS
    ]
    stroke = {name: strokes[i % len(strokes)] for i, name in enumerate(names)}
    x_high = max((x for series in panels.values() for line in series.values() for x, _ in line), default=1.0)
    column = max([190, *(46 + 7 * len(name) for name in names)])
    beside = len(panels) if len(panels) <= MOST_BESIDE else -(-len(panels) // 2)  # panels in a row
    total = max(beside * (width + gap) + gap // 2, gap + column)
    per_row = (total - gap) // column
    parts = []
    for i, name in enumerate(names):
        x, y = gap + i % per_row * column, 12 + i // per_row * 18
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" {stroke[name]} stroke-width="4"/>')
        parts.append(f'<text x="{x + 28}" y="{y + 5}">{escape(name)}</text>')
    top = 56 + max(len(names) - 1, 0) // per_row * 18

    def across(x: float) -> float:
        return steps.index(x) / max(len(steps) - 1, 1) if steps else x / x_high

    marks = [(across(x), f"{x:g}", "middle") for x in steps] or [
        (k / 2, f"{x_high * k / 2:.0f}" + (f" {unit}" if k == 2 else ""), ("start", "middle", "end")[k])
        for k in range(3)
    ]
    for i, (title, series) in enumerate(panels.items()):
        left, upper = i % beside * (width + gap) + gap, top + i // beside * (height + 76)
        parts.append(_panel(title, series, stroke, across, marks, left, upper, width, height))
        if steps:  # too close for a word between them
            below = upper + height + 34
            parts.append(f'<text x="{left + width}" y="{below}" text-anchor="end" fill="#555">{escape(unit)}</text>')
    lowest = top + max(len(panels) - 1, 0) // max(beside, 1) * (height + 76)
    return _svg(total, lowest + height + (46 if steps else 28), "".join(parts), ", ".join(panels))


def _panel(
    title: str,
    series: Mapping[str, Points],
    stroke: Mapping[str, str],
    across: Callable[[float], float],
    marks: Sequence[tuple[float, str, str]],
    left: float,
    top: float,
    width: float,
    height: float,
) -> str:
    values = [y for line in series.values() for _, y in line]
    ticks = _ticks(min(values, default=0.0), max(values, default=1.0))

    def up(y: float) -> float:
        return top + height - (y - ticks[0]) / (ticks[-1] - ticks[0]) * height

    parts = [f'<text x="{left}" y="{top - 12}" font-weight="bold">{escape(title)}</text>']
    for value in ticks:
        y = up(value)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>')
    for share, label, anchor in marks:
        x = left + width * share
        parts.append(f'<text x="{x}" y="{top + height + 17}" text-anchor="{anchor}" fill="#555">{escape(label)}</text>')
    for name, line in series.items():
        path = " ".join(f"{left + across(x) * width:.1f},{up(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" {stroke[name]} stroke-width="2.2"/>')
        if len(line) == 1:  # which no line shows
            x, y = line[0]
            parts.append(f'<circle cx="{left + across(x) * width:.1f}" cy="{up(y):.1f}" r="3" {stroke[name]}/>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that span the values; from zero where that wastes little of the panel."""
    low = 0.0 if 0 < low < 0.4 * high else low
    if low == high == 0:
        high = 1.0
    if high - low < 1e-6 * abs(high):  # equal values stand in the middle
        low, high = low - 0.05 * abs(low), high + 0.05 * abs(high)
    rough = max(high - low, 1e-9) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(k * step, 12) for k in range(first, max(last, first + 1) + 1)]


def heat_map(title: str, rows: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """An SVG of probabilities: a row per token, a column per output position, the darker the more probable."""
    cell, top = 20, 34
    left = max([110, *(16 + 7 * len(name) for name in rows)])
    parts = [f'<text x="0" y="16" font-weight="bold">{escape(title)}</text>']
    for r, (name, line) in enumerate(zip(rows, values, strict=True)):
        y = top + r * cell
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        for c, value in enumerate(line):
            shade = ",".join(str(round(255 + (deep - 255) * value)) for deep in (33, 102, 172))
            parts.append(
                f'<rect x="{left + c * cell}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="rgb({shade})">'
                f"<title>{escape(name)} at position {c + 1}: {value:.3f}</title></rect>"
            )
    columns = max((len(line) for line in values), default=0)
    width = max(left + columns * cell + 10, 8 * len(title))  # bold
    return _svg(width, top + len(rows) * cell + 10, "".join(parts), title)


Map = tuple[str, str, Sequence[float], str, Sequence[float], Sequence[Sequence[float]]]


def surface(label: str, maps: Sequence[Map]) -> str:
    """An SVG of tables one below the other, each (title, name and values of its rows, of its columns, what is inside),
    the darker the higher over all of them; the highest is framed."""
    wide, cell, left, top = 56, 24, 90, 46
    inside = [value for *_, rows in maps for row in rows for value in row]
    low, high = min(inside), max(inside)
    parts = []
    y = 0
    for title, row_name, row_values, column_name, column_values, rows in maps:
        parts.append(f'<text x="0" y="{y + 16}" font-weight="bold">{escape(title)}</text>')
        for c, value in enumerate(column_values):
            middle = left + c * wide + wide / 2
            parts.append(f'<text x="{middle}" y="{y + top - 8}" text-anchor="middle">{value:g}</text>')
        parts.append(f'<text x="{left - 8}" y="{y + top - 8}" text-anchor="end">{escape(column_name)}</text>')
        for r, (value, row) in enumerate(zip(row_values, rows, strict=True)):
            line = y + top + r * cell
            if row_name:
                named = f"{escape(row_name)} {value:g}"
                parts.append(f'<text x="{left - 8}" y="{line + 16}" text-anchor="end">{named}</text>')
            for c, score in enumerate(row):
                share = (score - low) / ((high - low) or 1.0)
                shade = ",".join(str(round(255 + (deep - 255) * share)) for deep in (33, 102, 172))
                frame = ' stroke="#d9822b" stroke-width="2"' if score == high else ""
                colour = "#fff" if share > 0.6 else "#222"
                parts.append(
                    f'<rect x="{left + c * wide}" y="{line}" width="{wide - 2}" height="{cell - 2}" '
                    f'fill="rgb({shade})"{frame}/><text x="{left + c * wide + wide / 2 - 1}" y="{line + 15}" '
                    f'text-anchor="middle" fill="{colour}">{score:.1f}</text>'
                )
        y += top + len(rows) * cell + 14
    columns = max(len(column_values) for _, _, _, _, column_values, _ in maps)
    return _svg(left + columns * wide + 10, y, "".join(parts), label)


def _svg(width: float, height: float, content: str, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="12" fill="#222">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{content}</svg>'
    )
