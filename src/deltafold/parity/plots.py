"""Inline SVG for the report page and `docs/numerics.md`: bars, a grid of cells, lines. No script, no outside host.

Colours are literal, so that a plot looks the same in a page and as a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

INK, PALE = "#333333", "#dddddd"
SERIES = ("#3366aa", "#cc6633", "#559944", "#8855aa", "#999933", "#aa3355")
WIDTH, LEFT, TOP, BOTTOM = 680, 64, 28, 40


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: a name and a value for each x; values of 0 and below are drawn at the axis."""

    name: str
    values: Sequence[float]


def bars(title: str, labels: Sequence[str], groups: Sequence[Line], *, height: int = 220) -> str:
    """Counts side by side: one bar of each group at each label."""
    inner = height - TOP - BOTTOM
    top = max((value for group in groups for value in group.values), default=0) or 1
    slot = (WIDTH - LEFT - 12) / max(1, len(labels))
    width = slot * 0.8 / max(1, len(groups))
    parts = []
    for g, group in enumerate(groups):
        for i, value in enumerate(group.values):
            size = inner * value / top
            x = LEFT + slot * (i + 0.1) + g * width
            tip = f"{labels[i]}, {group.name}: {value:g}"
            parts.append(_rect(x, TOP + inner - size, width, size, SERIES[g % len(SERIES)], tip))
    for i, label in enumerate(labels):
        parts.append(_text(LEFT + slot * (i + 0.5), TOP + inner + 14, label, anchor="middle"))
    parts += [_text(LEFT - 6, TOP + 10, f"{top:g}", anchor="end"), _text(LEFT - 6, TOP + inner, "0", anchor="end")]
    parts.append(_axis(TOP + inner))
    return _svg(title, height, parts, [group.name for group in groups])


def grid(
    title: str, rows: Sequence[str], cells: Sequence[Sequence[tuple[str, str]]], legend: Sequence[tuple[str, str]]
) -> str:
    """One row of cells (colour, tip) for each label; `legend` pairs a colour with its meaning."""
    num_columns = max((len(row) for row in cells), default=1)
    size = (WIDTH - LEFT - 12) / max(1, num_columns)
    step = min(18.0, max(8.0, size))
    parts = []
    for r, (label, row) in enumerate(zip(rows, cells, strict=True)):
        y = TOP + r * step
        parts.append(_text(LEFT - 6, y + step * 0.75, label, anchor="end"))
        parts += [_rect(LEFT + c * size, y, size - 0.5, step - 1, colour, tip) for c, (colour, tip) in enumerate(row)]
    bottom = TOP + len(rows) * step
    x = float(LEFT)
    for colour, meaning in legend:
        parts += [_rect(x, bottom + 8, 10, 10, colour, meaning), _text(x + 14, bottom + 17, meaning)]
        x += 24 + 7 * len(meaning)
    return _svg(title, int(bottom + BOTTOM), parts, [])


def log_lines(
    title: str, labels: Sequence[str], lines: Sequence[Line], *, limit: float | None, height: int = 220
) -> str:
    """Positive values on a logarithmic axis, and a dashed line at `limit`."""
    positive = [v for line in lines for v in line.values if 0 < v < math.inf] + ([limit] if limit else [])
    low = math.floor(math.log10(min(positive, default=0.1)))
    high = max(low + 1, math.ceil(math.log10(max(positive, default=1.0))))
    inner = height - TOP - BOTTOM
    step = (WIDTH - LEFT - 24) / max(1, len(labels) - 1)

    def y_of(value: float) -> float:
        if value == math.inf:
            return float(TOP)
        place = low if value <= 0 else math.log10(value)
        return TOP + inner * (1 - min(1.0, max(0.0, (place - low) / (high - low))))

    parts = []
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="{PALE}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"1e{power}", anchor="end"))
    for i, label in enumerate(labels):
        parts.append(_text(LEFT + i * step, TOP + inner + 14, label, anchor="middle"))
    if limit:
        y = y_of(limit)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="{INK}" stroke-dasharray="4 3"/>'
        )
    for g, line in enumerate(lines):
        colour = SERIES[g % len(SERIES)]
        points = [(LEFT + i * step, y_of(value)) for i, value in enumerate(line.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for (x, y), value in zip(points, line.values, strict=True):
            tip = escape(f"{line.name}: {value:.2e}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"><title>{tip}</title></circle>')
    return _svg(title, height, parts, [line.name for line in lines])


def log_dots(title: str, labels: Sequence[str], groups: Sequence[Line]) -> str:
    """Positive values on a logarithmic axis across, a row of dots for each label; 0 and below stand at its start."""
    positive = [value for group in groups for value in group.values if 0 < value < math.inf]
    low = math.floor(math.log10(min(positive, default=0.1)))
    high = max(low + 1, math.ceil(math.log10(max(positive, default=1.0))))
    start, step = LEFT + 200, 17
    inner = WIDTH - start - 16
    bottom = TOP + len(labels) * step

    def x_of(value: float) -> float:
        place = low if value <= 0 else high if value == math.inf else math.log10(value)
        return start + inner * (place - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        x = x_of(10.0**power)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{PALE}"/>')
        parts.append(_text(x, bottom + 14, f"1e{power}", anchor="middle"))
    for i, label in enumerate(labels):
        y = TOP + (i + 0.5) * step
        parts.append(_text(start - 8, y + 4, label, anchor="end"))
        parts.append(f'<line x1="{start}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="{PALE}"/>')
    for g, group in enumerate(groups):
        for i, value in enumerate(group.values):
            tip = escape(f"{labels[i]}, {group.name}: {value:.2e}")
            parts.append(
                f'<circle cx="{x_of(value):.1f}" cy="{TOP + (i + 0.5) * step:.1f}" r="4" '
                f'fill="{SERIES[g % len(SERIES)]}" fill-opacity="0.8"><title>{tip}</title></circle>'
            )
    return _svg(title, bottom + BOTTOM - 16, parts, [group.name for group in groups])


def _svg(title: str, height: int, parts: Sequence[str], names: Sequence[str]) -> str:
    legend = []
    x = float(WIDTH - 12)
    for g in reversed(range(len(names))):
        x -= 20 + 6.5 * len(names[g])
        legend += [_rect(x, 8, 10, 10, SERIES[g % len(SERIES)], names[g]), _text(x + 14, 17, names[g])]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="11">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
        f'<text x="8" y="17" font-weight="bold" fill="{INK}">{escape(title)}</text>{"".join([*parts, *legend])}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'


def _axis(y: float) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="{INK}"/>'
