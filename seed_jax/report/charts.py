"""Charts as inline SVG. Colours are CSS variables of the page, so they follow its light or dark theme; every series
also differs by dash and marker, so colour is never the only sign."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seed_jax.report.markup import attribute, text

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 10, 34
SERIES = 6  # colours of the page, --s1 ..
_DASHES = ("", "5 3", "1.5 3", "8 3 1.5 3", "10 4", "3 2")
_MIN_BAR = 0.75  # width of a bar or segment below which it is not drawn, px


class Line(NamedTuple):
    """A series. error: standard errors, drawn as a band; place: number of its colour, dash and marker."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    place: int = 0


class Scale(NamedTuple):
    """A linear map from low..high to start..stop (px)."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers inside [low, high]."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    lines: Sequence[Line], label: str, y_range: tuple[float, float] | None = None, x_label: str = "iteration"
) -> str:
    """label: what the chart shows, for screen readers. y_range: None = what the data need."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return '<p class="note">nothing recorded</p>'
    low, high = y_range or _range(lines)
    xs = [x for line in lines for x in line.x]
    x = Scale(min(xs), max(max(xs), min(xs) + 1), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, x_label)]
    parts += [_band(line, x, y) for line in lines if line.error is not None]
    parts += [_path(line, x, y) for line in lines]
    return _svg(label, "".join(parts))


def _range(lines: Sequence[Line]) -> tuple[float, float]:
    """Bounds of the data and their bands with a little air; zero is included where it is near."""
    values = []
    for line in lines:
        errors = line.error or [0.0] * len(line.y)
        values += [v + s * e for v, e in zip(line.y, errors, strict=True) for s in (-1, 1)]
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    low, high = low - 0.06 * span, high + 0.06 * span
    if 0 < low < 0.4 * high:
        low = 0.0
    return (low, min(high, 0.0) if high > 0 and max(values) <= 0 else high)


def _axes(x: Scale, y: Scale, x_label: str) -> str:
    parts = []
    for value in ticks(y.low, y.high, 4):
        place = f"{y(value):.1f}"
        zero = " zero" if value == 0 and y.low < 0 else ""
        parts.append(f'<line class="grid{zero}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place}" dy=".32em" text-anchor="end">{number(value)}</text>')
    whole = [value for value in ticks(x.low, x.high, 6) if value == int(value)]
    for value in whole:
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{int(value)}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{text(x_label)}</text>')
    return "".join(parts)


def _band(line: Line, x: Scale, y: Scale) -> str:
    up = [(a, b + e) for a, b, e in zip(line.x, line.y, line.error, strict=True)]
    down = [(a, b - e) for a, b, e in zip(line.x, line.y, line.error, strict=True)]
    clamp = lambda value: min(max(value, y.low), y.high)  # noqa: E731
    points = " ".join(f"{x(a):.1f},{y(clamp(b)):.1f}" for a, b in up + down[::-1])
    if len(line.x) == 1:  # a band has no width here
        place = f"{x(line.x[0]):.1f}"
        ends = [f"{y(clamp(value)):.1f}" for value in (up[0][1], down[0][1])]
        return f'<line class="whisker" x1="{place}" x2="{place}" y1="{ends[0]}" y2="{ends[1]}"/>'
    return f'<polygon class="band s{line.place % SERIES}" points="{points}"/>'


def _path(line: Line, x: Scale, y: Scale) -> str:
    place = line.place % SERIES
    points = [(x(a), y(min(max(b, y.low), y.high))) for a, b in zip(line.x, line.y, strict=True)]
    d = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dash = f' stroke-dasharray="{_DASHES[place]}"' if _DASHES[place] else ""
    parts = [f'<polyline class="line s{place}" points="{d}"{dash}/>']
    for i, (a, b) in enumerate(points):
        spread = f" ± {line.error[i]:.3f}" if line.error is not None else ""
        tip = text(f"{line.name}, {number(line.x[i])}: {line.y[i]:.4g}{spread}")
        radius = 2.6 if len(points) <= 40 else 1.4
        parts.append(f'<g class="dot s{place}"><title>{tip}</title>{marker(place, a, b, radius)}</g>')
    return "".join(parts)


def marker(place: int, a: float, b: float, r: float) -> str:
    """A circle, square, triangle, diamond, ... of about the same size."""
    if place == 0:
        return f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{r}"/>'
    if place == 1:
        return f'<rect x="{a - r:.1f}" y="{b - r:.1f}" width="{2 * r}" height="{2 * r}"/>'
    corners = {2: 3, 3: 4}.get(place, place + 1)
    angles = [math.tau * i / corners - math.pi / 2 for i in range(corners)]
    points = " ".join(f"{a + 1.25 * r * math.cos(t):.1f},{b + 1.25 * r * math.sin(t):.1f}" for t in angles)
    return f'<polygon points="{points}"/>'


def legend(names: Sequence[str], places: Sequence[int] | None = None) -> str:
    """The sign of each series and its name."""
    items = []
    for i, name in enumerate(names):
        place = (places[i] if places else i) % SERIES
        dash = f' stroke-dasharray="{_DASHES[place]}"' if _DASHES[place] else ""
        sign = (
            f'<svg class="key" viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">'
            f'<line class="line s{place}" x1="1" x2="25" y1="5" y2="5"{dash}/>'
            f'<g class="dot s{place}">{marker(place, 13, 5, 2.8)}</g></svg>'
        )
        items.append(f"<li>{sign}{text(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


class Bar(NamedTuple):
    """One row of `bars`: values and their standard errors, one for each series."""

    name: str
    values: Sequence[float | None]
    errors: Sequence[float | None]


def bars(rows: Sequence[Bar], series: Sequence[str], label: str, high: float = 1.0) -> str:
    """Horizontal bars from 0, one below the other in each row, with whiskers of one standard error."""
    left, thick, gap = 138, 9, 3
    row_height = len(series) * (thick + gap) + 10
    height = len(rows) * row_height + 24
    x = Scale(0.0, high, left, WIDTH - 44)
    parts = [
        f'<line class="grid" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="4" y2="{height - 20}"/>'
        f'<text x="{x(v):.1f}" y="{height - 6}" text-anchor="middle">{number(v)}</text>'
        for v in ticks(0.0, high, 4)
    ]
    for i, row in enumerate(rows):
        top = i * row_height + 8
        middle = top + (row_height - 10) / 2
        parts.append(
            f'<text class="name" x="{left - 8}" y="{middle:.1f}" dy=".32em" text-anchor="end">'
            f"{text(clip(row.name, 24))}<title>{text(row.name)}</title></text>"
        )
        for j, (value, error) in enumerate(zip(row.values, row.errors, strict=True)):
            if value is not None:
                parts.append(_bar(row.name, series[j], value, error, j, x, top + j * (thick + gap), thick))
    return _svg(label, "".join(parts), height)


def _bar(
    name: str, series: str, value: float, error: float | None, place: int, x: Scale, top: float, thick: float
) -> str:
    spread = f" ± {error:.3f}" if error is not None else ""
    tip = text(f"{name}, {series}: {value:.3f}{spread}")
    width = max(x(value) - x(0), _MIN_BAR)
    middle = top + thick / 2
    whisker = ""
    end = value
    if error:
        a, end = max(value - error, 0.0), min(value + error, x.high)
        whisker = f'<line class="whisker" x1="{x(a):.1f}" x2="{x(end):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
    return (
        f'<g><title>{tip}</title><rect class="b{place}" x="{x(0):.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{thick}"/>{whisker}<text class="value" x="{x(max(end, value)) + 5:.1f}" y="{middle:.1f}" dy=".32em">'
        f"{value:.2f}</text></g>"
    )


def stacked(columns: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], label: str, unit: str) -> str:
    """One column for each (name, {part: amount}), parts on top of each other in the order of `names`."""
    top = max((sum(parts.values()) for _, parts in columns), default=0.0) or 1.0
    y = Scale(0.0, top, HEIGHT - BOTTOM, TOP)
    parts = []
    for value in ticks(0.0, top, 4):
        place = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place}" dy=".32em" text-anchor="end">{number(value)}</text>')
    step = (WIDTH - RIGHT - LEFT) / max(len(columns), 1)
    width, every = min(step * 0.82, 34.0), max(1, len(columns) // 8)
    for i, (name, amounts) in enumerate(columns):
        middle, base = LEFT + (i + 0.5) * step, 0.0
        for j, part in enumerate(names):
            amount = amounts.get(part, 0.0)
            if amount:
                tip = text(f"{name}, {part}: {amount:.1f} {unit}")
                height = y(base) - y(base + amount)
                parts.append(
                    f'<rect class="part s{j % SERIES}" x="{middle - width / 2:.1f}" y="{y(base + amount):.1f}" '
                    f'width="{width:.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
                )
            base += amount
        if i % every == 0:
            parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text(name)}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">iteration</text>')
    return _svg(label, "".join(parts))


def blocks(names: Sequence[str]) -> str:
    """A legend of filled squares for `stacked` and `bars`."""
    return (
        '<ul class="legend">'
        + "".join(
            f'<li><svg class="key" viewBox="0 0 10 10" width="10" height="10" aria-hidden="true">'
            f'<rect class="part s{i % SERIES}" width="10" height="10"/></svg>{text(name)}</li>'
            for i, name in enumerate(names)
        )
        + "</ul>"
    )


def number(value: float) -> str:
    """Few digits, a real minus sign."""
    return f"{value:.6g}".replace("-", "\u2212")


def clip(value: str, length: int) -> str:
    return value if len(value) <= length else value[: length - 1] + "\u2026"


def _svg(label: str, content: str, height: float = HEIGHT) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:g}"'
    return f'<svg class="chart" {size} role="img" aria-label="{attribute(label)}">{content}</svg>'
